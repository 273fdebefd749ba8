#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Tell the state of an SGLang server."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_health
short_description: Tell the state of an SGLang server, with evidence
description:
  - Looks at the unit, its processes and its log, asks C(/health), and has the server generate a few tokens
    whose count
    and text are checked.
  - With O(wait) it asks until the server is healthy, and ends within seconds of a crash instead of at its
    limit. Without O(unit) it also ends when the process that listened, or that wrote O(log), is gone, even if
    that left no word; of processes of other users only root can know.
  - Does not fail because of a state. Use C(failed_when) on RV(status).
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
  unit:
    description:
      - systemd unit of the server on this host. Its state and its journal are looked at.
      - What answers at O(url) must be a process of this unit. Where it is seen to be another one of this host, which
        root can see of all, the status is V(degraded). So O(url) is to be the server's own address, not that of
        a proxy. A server in a container, and what an engine forwards to it, is not taken for another one.
    type: str
  log:
    description:
      - Log file of the server on this host, where it does not log to the journal. Used instead of the
        journal.
      - Of a file with several runs the last start counts. Where the unit logs to the journal, the unit's
        present run is told apart exactly.
    type: path
  wait:
    description: Ask until the server is healthy, degraded or crashed, or O(timeout_seconds) is over.
    type: bool
    default: false
  timeout_seconds:
    description:
      - Longest wait. A first start that compiles kernels may take up to an hour.
      - With O(unit) it begins when the unit was started, so that one which hung long ago is waited for a minute.
    type: float
    default: 1200.0
  health_timeout_seconds:
    description:
      - Limit for C(/health). Must be above 20 seconds, the time that the server itself waits for its
        scheduler.
    type: float
    default: 25.0
  generate_tokens:
    description: Tokens to generate, greedily.
    type: int
    default: 32
  generate_timeout_seconds:
    description: Limit for that generation.
    type: float
    default: 60.0
  prompt:
    description: What to generate from.
    type: str
    default: The capital of France is
  text_check:
    description:
      - V(strict) - the count, an empty text, one token repeated, replacement characters, log
        probabilities that are no numbers.
      - V(count) - the count and the log probabilities only. For a dummy model with random weights, whose
        text means
        nothing.
      - V(off) - that there is an answer.
    type: str
    choices: [strict, count, "off"]
    default: strict
  expect_text:
    description: Regular expression that the generated text must match. Not with O(text_check=off).
    type: str
attributes:
  check_mode:
    support: full
    details: Asks once and does not wait.
  diff_mode:
    support: none
    details: Changes nothing.
author:
  - sglang-sm120 contributors
"""

EXAMPLES = r"""
- name: Wait until the server answers
  sglang_health:
    url: http://127.0.0.1:30000
    unit: sglang-main.service
    wait: true
    timeout_seconds: 3600
  register: health
  failed_when: health is failed or health.status != 'healthy'

- name: Check the text as well
  sglang_health:
    api_key: "{{ vault_sglang_api_key }}"
    expect_text: Paris
"""

RETURN = r"""
status:
  description: One of stopped, starting, warming, healthy, degraded, hung, crashed.
  returned: always
  type: str
  sample: healthy
msg:
  description: The server, its status and the reason in one line; with a diagnosis also the cause and the next step.
  returned: always
  type: str
evidence:
  description:
    - What the status rests on - unit, process, health, generation, log, as far as looked at.
    - C(stranger) with C(pid), C(name) and C(unit), where what answers is no process of O(unit).
  returned: always
  type: dict
version:
  description: SGLang's version, from a server that answers.
  returned: always
  type: str
model:
  description: Path of the served model, from a server that answers.
  returned: always
  type: str
diagnosis:
  description: First cause in the log of a server that crashed or hangs; null without one.
  returned: always
  type: dict
  contains:
    signature: {description: Name in the catalogue., type: str}
    layer: {description: Where it went wrong., type: str}
    line: {description: The line of the log., type: str}
    line_number: {description: Its number since the start of what was read., type: int}
    meaning: {description: What it means., type: str}
    advice: {description: What to do next., type: str}
waited_seconds:
  description: How long it took.
  returned: always
  type: float
"""

import re
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.health import LEAST_HEALTH_SECONDS, AccessDenied, Checker, Question, Verdict
from ansible.module_utils.sm120.http import Client, UrlError
from ansible.module_utils.sm120.redact import redact, redact_tree

ARGUMENTS: dict[str, dict[str, Any]] = {
    "url": {"type": "str", "default": "http://127.0.0.1:30000"},
    "api_key": {"type": "str", "no_log": True},
    "ca_path": {"type": "path"},
    "unit": {"type": "str"},
    "log": {"type": "path"},
    "wait": {"type": "bool", "default": False},
    "timeout_seconds": {"type": "float", "default": 1200.0},
    "health_timeout_seconds": {"type": "float", "default": 25.0},
    "generate_tokens": {"type": "int", "default": 32, "no_log": False},
    "generate_timeout_seconds": {"type": "float", "default": 60.0},
    "prompt": {"type": "str", "default": "The capital of France is"},
    "text_check": {"type": "str", "choices": ["strict", "count", "off"], "default": "strict"},
    "expect_text": {"type": "str"},
}


def wrong_argument(given: dict[str, Any]) -> str | None:
    """One message for the first argument that cannot be."""
    if given["health_timeout_seconds"] < LEAST_HEALTH_SECONDS:
        return (
            f"health_timeout_seconds: must be at least {LEAST_HEALTH_SECONDS:.0f}, found "
            f"{given['health_timeout_seconds']:g}: the server itself waits 20 s for its scheduler"
        )
    for name, least in (("timeout_seconds", 1), ("generate_timeout_seconds", 1), ("generate_tokens", 1)):
        if given[name] < least:
            return f"{name}: must be at least {least}, found {given[name]:g}"
    if not given["prompt"]:
        return "prompt: must not be empty"
    if given["expect_text"] is not None:
        if given["text_check"] == "off":
            return (
                "expect_text: nothing of the text is looked at with text_check off: set it to strict or count"
            )
        try:
            re.compile(given["expect_text"])
        except re.error as error:
            return f"expect_text: no regular expression: {error}"
    return None


def message(server: str, verdict: Verdict) -> str:
    text = f"{server} is {verdict.status}: {verdict.reason}"
    if verdict.diagnosis:
        text += f". Cause ({verdict.diagnosis['layer']}): {verdict.diagnosis['line']}"
        text += f" - {verdict.diagnosis['meaning']} Next: {verdict.diagnosis['advice']}"
    return text


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    given = module.params
    key = given["api_key"]
    problem = wrong_argument(given)
    if problem:
        module.fail_json(msg=problem)
    question = Question(
        generate_tokens=given["generate_tokens"],
        prompt=given["prompt"],
        text_check=given["text_check"],
        expect_text=given["expect_text"],
        health_timeout_seconds=given["health_timeout_seconds"],
        generate_timeout_seconds=given["generate_timeout_seconds"],
    )
    server = f"{given['unit']} ({given['url']})" if given["unit"] else given["url"]
    begun = time.monotonic()
    try:
        checker = Checker(
            Client(given["url"], key, ca_path=given["ca_path"]),
            question,
            unit=given["unit"],
            log=Path(given["log"]) if given["log"] else None,
        )
        if given["wait"] and not module.check_mode:
            verdict = checker.wait(given["timeout_seconds"])
        else:
            verdict = checker.check()
    except (UrlError, AccessDenied, OSError, subprocess.SubprocessError) as error:
        module.fail_json(msg=redact(f"{server}: {error}", [key]))
    module.exit_json(
        changed=False,
        status=verdict.status,
        msg=redact(message(server, verdict), [key]),
        evidence=redact_tree(verdict.evidence, [key]),
        version=verdict.version,
        model=verdict.model,
        diagnosis=redact_tree(verdict.diagnosis, [key]),
        waited_seconds=round(time.monotonic() - begun, 2),
    )


if __name__ == "__main__":
    main()
