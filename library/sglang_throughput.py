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
      - To see each rung when it is done, loop over the rungs in the playbook with one rung per task item.
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
      - Seed of the random prompts. The same seed sends the same prompts, which a server that has already
        seen them
        answers from its prefix cache.
      - When not given, a new one is drawn and returned in RV(method).
    type: int
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

import secrets
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.http import Client, UrlError
from ansible.module_utils.sm120.ladder import Ladder
from ansible.module_utils.sm120.load import LimitError, allow_open_files
from ansible.module_utils.sm120.redact import redact_tree
from ansible.module_utils.sm120.served_model import model_info, server_info, vocabulary_at
from ansible.module_utils.sm120.throughput import Spec, SpecError, check_numbers, check_vocab

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
    "vocab_size": {"type": "int"},
    "sample_gpus": {"type": "bool", "default": True},
    "goodput": {"type": "dict", "default": {}},
    "stall_seconds": {"type": "float", "default": 120.0},
    "timeout_seconds": {"type": "float", "default": 1800.0},
}
NUMBERS = (
    "api",
    "concurrency",
    "requests_per_stream",
    "input_tokens",
    "output_tokens",
    "repeats",
    "warmup_requests",
    "stall_seconds",
    "timeout_seconds",
)


def goodput_limits(given: dict[str, Any]) -> dict[str, float]:
    try:
        return {name: float(limit) for name, limit in given.items()}
    except (TypeError, ValueError):
        raise SpecError(f"goodput: every limit must be a number of milliseconds, found {given}") from None


def served_vocabulary(client: Client) -> int | None:
    """The model's vocabulary, if it can be known here; raises SpecError when the server cannot be
    asked at all."""
    answer = model_info(client)
    where = f"{client.address.scheme}://{client.address.netloc}"
    if answer.status == 401:
        raise SpecError(f"api_key: {where} answers 401: the key is missing or wrong")
    if not answer.ok:
        found = f"HTTP {answer.status}" if answer.status else f"{answer.error}: {answer.detail}"
        raise SpecError(
            f"url: {where}/model_info: wanted an answer from a running server, found {found}. "
            "Is it started? sglang_health tells its state"
        )
    info = answer.json()
    path = info.get("model_path") if isinstance(info, dict) else None
    return vocabulary_at(path) if isinstance(path, str) else None


def method_of(
    spec: Spec, seed_given: bool, ladder_note: str | None, vocabulary: int | None
) -> dict[str, Any]:
    return {
        "api": spec.api,
        "formulas": "sglang.bench_serving",
        "loop": "closed: each stream sends its next request when its last is answered",
        "requests_per_stream": spec.requests_per_stream,
        "input_tokens": spec.input_tokens,
        "output_tokens": spec.output_tokens,
        "repeats": spec.repeats,
        "warmup_requests": spec.warmup_requests,
        "seed": spec.seed,
        "seed_given": seed_given,
        "vocab_size": spec.vocab_size,
        "model_vocab_size": vocabulary,
        "temperature": 0.0,
        "ignore_eos": True,
        "percentiles": "linear interpolation",
        "goodput": spec.goodput,
        "power": ladder_note or "nvidia-smi, mean over each repeat, all GPUs together",
    }


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    given = module.params
    try:
        goodput = goodput_limits(given["goodput"])
        check_numbers(**{name: given[name] for name in NUMBERS}, goodput=goodput)
        check_vocab(given["vocab_size"] or 0 if given["vocab_size"] is not None else 32, None)
        client = Client(given["url"], given["api_key"], ca_path=given["ca_path"])
        if module.check_mode:
            module.exit_json(
                changed=False,
                rungs=[],
                tokens_requested=0,
                tokens_received=0,
                valid=True,
                method={"skipped": "check mode: no load was sent"},
            )
        allow_open_files(max(given["concurrency"]))
        vocabulary = served_vocabulary(client)
        spec = Spec(
            api=given["api"],
            concurrency=tuple(given["concurrency"]),
            requests_per_stream=given["requests_per_stream"],
            input_tokens=given["input_tokens"],
            output_tokens=given["output_tokens"],
            repeats=given["repeats"],
            warmup_requests=given["warmup_requests"],
            seed=given["seed"] if given["seed"] is not None else secrets.randbelow(2**31),
            vocab_size=check_vocab(given["vocab_size"], vocabulary),
            goodput=goodput,
            stall_seconds=given["stall_seconds"],
            timeout_seconds=given["timeout_seconds"],
        )
        server = server_info(client)
        check_length(spec, server)
        ladder = Ladder(client, spec, ca_path=given["ca_path"], sample_gpus=given["sample_gpus"])
        rungs = [ladder.rung(concurrency) for concurrency in spec.concurrency]
    except (SpecError, UrlError, LimitError, OSError) as error:
        module.fail_json(msg=client_safe(str(error), given["api_key"]), changed=False)
    for rung in rungs:
        note_queue(rung, server)
    module.exit_json(
        changed=False,
        rungs=redact_tree(rungs, [given["api_key"]]),
        tokens_requested=sum(rung["tokens_requested"] for rung in rungs),
        tokens_received=sum(rung["tokens_received"] for rung in rungs),
        valid=all(rung["valid"] for rung in rungs),
        method=method_of(spec, given["seed"] is not None, ladder.power_note, vocabulary),
        server=redact_tree(server, [given["api_key"]]),
    )


def client_safe(text: str, key: str | None) -> str:
    cleaned: str = redact_tree(text, [key])
    return cleaned


def check_length(spec: Spec, server: dict[str, Any]) -> None:
    """A request longer than the server takes is answered 400, a thousand times over: say it once instead."""
    longest = server.get("max_req_input_len")
    if isinstance(longest, int) and spec.input_tokens > longest:
        raise SpecError(
            f"input_tokens: the server takes prompts of at most {longest}, found {spec.input_tokens}"
        )


def note_queue(rung: dict[str, Any], server: dict[str, Any]) -> None:
    most = server.get("max_running_requests")
    if isinstance(most, int) and most < rung["concurrency"]:
        rung["notes"].append(
            f"the server runs at most {most} requests at once (max_running_requests): "
            f"{rung['concurrency'] - most} of {rung['concurrency']} streams wait in its queue"
        )


if __name__ == "__main__":
    main()
