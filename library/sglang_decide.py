#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Decide from measurements whether a change is kept."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_decide
short_description: Decide from measurements whether a change is kept
description:
  - Compares the rungs of M(sglang_throughput) and the answers of M(sglang_answers) without and with a change. Better
    beyond noise is kept; worse, wrong or failed is not. The same measurements always give the same decision.
options:
  side_off:
    description: Without the change, C(rungs) and C(answers) as the modules returned them.
    type: dict
    required: true
  side_on:
    description: With the change, the same.
    type: dict
    required: true
  on_failure:
    description: How the server failed with the change; empty if it did not. Outweighs all figures.
    type: str
    default: ""
  min_repeats:
    description: Repeats of each rung that each side needs.
    type: int
    default: 5
  min_effect:
    description: The least difference of medians that counts, as a share.
    type: float
    default: 0.03
  max_latency_growth:
    description: Growth of median TTFT or TPOT that counts as worse, as a share.
    type: float
    default: 0.1
  confidence:
    description: Confidence of the bootstrap interval of the ratio of medians.
    type: float
    default: 0.95
  keep_when_equal:
    description: Keep a change that makes no difference beyond noise.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
    details: Changes nothing.
author:
  - sglang-sm120 contributors
"""

EXAMPLES = r"""
- name: Decide
  sglang_decide:
    side_off: "{{ measured_off }}"
    side_on: "{{ measured_on }}"
  register: decision
"""

RETURN = r"""
verdict:
  description: better, worse, within noise, invalid, too few repeats or outputs differ.
  returned: always
  type: str
keep:
  description: Whether the change stays on.
  returned: always
  type: bool
needs_attention:
  description: Whether somebody has to look, because the change is worse, wrong or not measured.
  returned: always
  type: bool
reasons:
  description: Sentences with the figures that decided.
  returned: always
  type: list
  elements: str
comparisons:
  description:
    - Every figure of every rung with both medians, their ratio and its interval.
    - C(tokens_per_joule), where power was sampled, is for information and decides nothing.
  returned: always
  type: list
  elements: dict
explained:
  description: Greedy answers that part at a tie, each with C(prompt) and C(token), counted from 1.
  returned: always
  type: list
  elements: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.decision import Rules, decide
from ansible.module_utils.sm120.outputs import answer_of, difference


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "side_off": {"type": "dict", "required": True},
            "side_on": {"type": "dict", "required": True},
            "on_failure": {"type": "str", "default": ""},
            "min_repeats": {"type": "int", "default": 5},
            "min_effect": {"type": "float", "default": 0.03},
            "max_latency_growth": {"type": "float", "default": 0.1},
            "confidence": {"type": "float", "default": 0.95},
            "keep_when_equal": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params
    for side in ("side_off", "side_on"):
        if not given["on_failure"] and not isinstance(given[side].get("answers"), list):
            module.fail_json(
                msg=f"{side}: wanted answers, as sglang_answers returns them; found "
                f"{', '.join(given[side]) or 'nothing'}. Take them on both sides, or set on_failure"
            )
    names = ("min_repeats", "min_effect", "max_latency_growth", "confidence", "keep_when_equal")
    rules = Rules(**{name: given[name] for name in names})
    if problem := rules.problem():
        module.fail_json(msg=problem)
    off, on = given["side_off"], given["side_on"]
    outputs, explained = None, []
    if not given["on_failure"]:
        outputs, explained = difference(
            [answer_of(one) for one in off["answers"]], [answer_of(one) for one in on["answers"]]
        )
    decision = decide(
        off.get("rungs", []),
        on.get("rungs", []),
        rules,
        outputs=outputs,
        explained=explained,
        on_failure=given["on_failure"] or None,
    ).as_dict()
    decision["needs_attention"] = decision.pop("failed")
    module.exit_json(changed=False, **decision)


if __name__ == "__main__":
    main()
