#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Measure an SGLang server's throughput and latencies."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_throughput
short_description: Measure throughput, latencies and GPU power of an SGLang server
description:
  - Drives a ladder of concurrencies against a running server, closed loop (every stream sends its next
    request when
    its last one is answered), and returns the figures by the formulas of C(sglang.bench_serving).
  - Every request asks for exactly O(output_tokens) tokens of a fresh random prompt. A rung whose token
    counts are not
    what was asked for is invalid, not slow.
  - One thread, standard library only. Needs no package on the target.
options:
  url:
    description: Base address of the server.
    type: str
    default: http://127.0.0.1:30000
  api_key:
    description: Sent as a bearer token. Never returned.
    type: str
  ca_path:
    description: File of certificate authorities for an https URL. Certificates are always verified.
    type: path
  api:
    description: Which API to measure, V(generate) for C(/generate) or V(completions) for C(/v1/completions).
    type: str
    choices: [generate, completions]
    default: generate
  concurrency:
    description:
      - The rungs of the ladder, each a number of streams.
      - To see each rung when it is done, include for each a file of tasks that calls this module and shows RV(msg).
    type: list
    elements: int
    default: [1, 8]
  requests_per_stream:
    description: Requests that each stream sends one after the other, per repeat.
    type: int
    default: 4
  input_tokens:
    description: Prompt length, in tokens.
    type: int
    default: 128
  output_tokens:
    description: Tokens generated per request, exactly.
    type: int
    default: 128
  repeats:
    description:
      - How often each rung is measured. Rates and latencies are medians of the repeats, counts are
        sums.
    type: int
    default: 3
  warmup_requests:
    description: Requests before each rung that are not measured. Their tokens are reported.
    type: int
    default: 2
  seed:
    description:
      - Seed of the random prompts. Every rung and repeat derives its own prompts from it.
      - The same seed and O(run) send the same prompts, which a server that has already seen them answers
        from its prefix cache.
      - When not given, a new one is drawn and returned in RV(method).
    type: int
  run:
    description:
      - Any word, mixed into O(seed). One seed with another word gives other prompts, so a run with a fixed
        seed does not meet the prompts of an earlier one in the server's cache.
    type: str
    default: ""
  vocab_size:
    description:
      - Prompts are drawn from token ids below this.
      - Default is the vocabulary of the served model, read on this machine from the C(config.json) at the
        path that
        the server names. A larger value is refused before anything is sent, because an id outside kills
        the server.
    type: int
  sample_gpus:
    description: Sample power, load and memory of all GPUs with C(nvidia-smi) meanwhile, where there is one.
    type: bool
    default: true
  goodput:
    description:
      - Limits that a request must keep to count as good. Known are C(ttft_ms), C(tpot_ms) and C(e2e_ms),
        in milliseconds.
    type: dict
    default: {}
  stall_seconds:
    description: Give a rung up when no stream received anything for this long.
    type: float
    default: 120.0
  timeout_seconds:
    description: Give one repeat up after this long.
    type: float
    default: 1800.0
attributes:
  check_mode:
    support: full
    details: Sends no load. RV(rungs) is empty.
  diff_mode:
    support: none
    details: Changes nothing.
author:
  - sglang-sm120 contributors
"""

EXAMPLES = r"""
- name: Measure a short ladder
  sglang_throughput:
    url: http://127.0.0.1:30000
    concurrency: [1, 8]
    input_tokens: 64
    output_tokens: 128
  register: measured

- name: Measure at the concurrency of the story, with limits for goodput
  sglang_throughput:
    url: https://gpu1.example.org
    api_key: "{{ vault_sglang_api_key }}"
    concurrency: [1024]
    requests_per_stream: 2
    input_tokens: 1024
    output_tokens: 512
    repeats: 5
    goodput:
      ttft_ms: 2000
      tpot_ms: 50
  register: at_1024
  failed_when: at_1024 is failed or at_1024.rungs | rejectattr('valid') | length > 0
"""

RETURN = r"""
rungs:
  description: One entry per concurrency, in the order asked for.
  returned: always
  type: list
  elements: dict
  contains:
    concurrency: {description: Streams., type: int}
    repeats: {description: Repeats measured., type: int}
    valid: {description: Whether the figures may be believed., type: bool}
    invalid_because: {description: Why they may not., type: list}
    notes: {description: What to know when reading the figures., type: list}
    completed: {description: Requests with exactly the tokens asked for - all repeats., type: int}
    failed: {description: Other requests - all repeats., type: int}
    errors: {description: Their messages and how often each came., type: dict}
    input_tokens: {description: Prompt tokens of completed requests as the server counts them., type: int}
    output_tokens: {description: Output tokens of completed requests - all repeats., type: int}
    cached_tokens: {description: Prompt tokens that came from the server's prefix cache., type: int}
    tokens_requested: {description: Output tokens asked for - warm-up and all repeats., type: int}
    tokens_received: {description: Output tokens received - warm-up and failed requests included., type: int}
    warmup: {description: Requests and tokens of the warm-up., type: dict}
    duration_seconds: {description: Measured time of all repeats together., type: float}
    output_tokens_per_second: {description: Median of the repeats., type: float}
    total_tokens_per_second: {description: Input and output; median of the repeats., type: float}
    requests_per_second: {description: Median of the repeats., type: float}
    goodput_requests_per_second: {description: Within all limits of O(goodput); else null., type: float}
    mean_concurrency: {description: Requests in flight on average., type: float}
    ttft_ms: {description: Time to first token as mean p50 p90 p95 p99., type: dict}
    tpot_ms: {description: Time per output token after the first., type: dict}
    itl_ms: {description: Inter-token latency over all tokens., type: dict}
    e2e_ms: {description: End-to-end latency., type: dict}
    spread: {description: (max - min) / median over the repeats., type: dict}
    power_watts: {description: Mean power of all GPUs together; null where there is none., type: float}
    tokens_per_joule: {description: Output tokens per joule of GPU energy; or null., type: float}
    gpu: {description: Per repeat the means per GPU; null where there is none., type: list}
    client: {description: CPU use and lag of the measurement itself - worst repeat., type: dict}
    series: {description: The main figures of every repeat., type: list}
msg:
  description: Each rung's main figures, one line for each, with what makes it invalid and its notes.
  returned: always
  type: str
tokens_requested:
  description:
    - Output tokens asked for in this call, warm-ups included. The server's generation_tokens_total grows
      by this.
  returned: always
  type: int
tokens_received:
  description: Output tokens received in this call, warm-ups included.
  returned: always
  type: int
valid:
  description: Whether every rung is valid.
  returned: always
  type: bool
method:
  description: How it was measured, to be shown beside the figures.
  returned: always
  type: dict
  sample:
    api: generate
    input_tokens: 128
    output_tokens: 128
    seed: 1234
    formulas: sglang.bench_serving
server:
  description: What the server said about itself - version, limits, fusion settings.
  returned: when it answered
  type: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.http import Client, UrlError
from ansible.module_utils.sm120.ladder import Ladder
from ansible.module_utils.sm120.load import LimitError, allow_open_files
from ansible.module_utils.sm120.measurement import (
    check_arguments,
    check_length,
    make_spec,
    method_of,
    note_queue,
    served_vocabulary,
)
from ansible.module_utils.sm120.redact import redact, redact_tree
from ansible.module_utils.sm120.rungs import say
from ansible.module_utils.sm120.served_model import server_info
from ansible.module_utils.sm120.throughput import SpecError

ARGUMENTS: dict[str, dict[str, Any]] = {
    "url": {"type": "str", "default": "http://127.0.0.1:30000"},
    "api_key": {"type": "str", "no_log": True},
    "ca_path": {"type": "path"},
    "api": {"type": "str", "choices": ["generate", "completions"], "default": "generate"},
    "concurrency": {"type": "list", "elements": "int", "default": [1, 8]},
    "requests_per_stream": {"type": "int", "default": 4},
    "input_tokens": {"type": "int", "default": 128},
    "output_tokens": {"type": "int", "default": 128},
    "repeats": {"type": "int", "default": 3},
    "warmup_requests": {"type": "int", "default": 2},
    "seed": {"type": "int", "no_log": False},
    "run": {"type": "str", "default": ""},
    "vocab_size": {"type": "int"},
    "sample_gpus": {"type": "bool", "default": True},
    "goodput": {"type": "dict", "default": {}},
    "stall_seconds": {"type": "float", "default": 120.0},
    "timeout_seconds": {"type": "float", "default": 1800.0},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    given = module.params
    keys = [given["api_key"]]
    try:
        check_arguments(given)
        client = Client(given["url"], given["api_key"], ca_path=given["ca_path"])
        if module.check_mode:
            nothing = {"rungs": [], "tokens_requested": 0, "tokens_received": 0, "valid": True}
            skipped = "check mode: no load was sent"
            module.exit_json(changed=False, msg=skipped, method={"skipped": skipped}, **nothing)
        allow_open_files(max(given["concurrency"]))
        vocabulary = served_vocabulary(client)
        spec = make_spec(given, vocabulary)
        server = server_info(client)
        check_length(spec, server)
        ladder = Ladder(client, spec, ca_path=given["ca_path"], sample_gpus=given["sample_gpus"])
        rungs = [ladder.rung(concurrency) for concurrency in spec.concurrency]
    except (SpecError, UrlError, LimitError, OSError) as error:
        module.fail_json(msg=redact(str(error), keys), changed=False)
    for rung in rungs:
        note_queue(rung, server)
    method = method_of(
        spec,
        seed_given=given["seed"] is not None,
        power_note=ladder.power_note,
        model_vocab_size=vocabulary,
    )
    module.exit_json(
        changed=False,
        msg=redact("\n".join(map(say, rungs)), keys),
        rungs=redact_tree(rungs, keys),
        tokens_requested=sum(rung["tokens_requested"] for rung in rungs),
        tokens_received=sum(rung["tokens_received"] for rung in rungs),
        valid=all(rung["valid"] for rung in rungs),
        method=method,
        server=redact_tree(server, keys),
    )


if __name__ == "__main__":
    main()
