#!/usr/bin/python
# Copyright: the project's contributors
# Apache License 2.0 (see LICENSE)
"""Collect greedy answers of an SGLang server, to compare two of its configurations by."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_answers
short_description: Collect greedy answers of an SGLang server
description:
  - Sends each prompt with temperature 0 and returns the tokens of the answer with the best candidates for each, so that
    M(sglang_decide) can tell an answer that is wrong from one that parted at a tie.
options:
  url:
    description: Base address of the server.
    type: str
    default: http://127.0.0.1:30000
  api_key:
    description: Key sent as a bearer token. Never returned.
    type: str
  ca_path:
    description: File of certificate authorities for an https URL. Certificates are always verified.
    type: path
  prompts:
    description: The texts to continue.
    type: list
    elements: str
    required: true
  output_tokens:
    description: Tokens generated for each prompt, exactly.
    type: int
    default: 64
  timeout_seconds:
    description: How long one answer may take, in seconds.
    type: float
    default: 300.0
attributes:
  check_mode:
    support: full
    details: Sends nothing. RV(answers) is empty.
  diff_mode:
    support: none
    details: Changes nothing.
author:
  - sglang-sm120 contributors
"""

EXAMPLES = r"""
- name: Collect what the server answers now
  sglang_answers:
    prompts:
      - The capital of France is
      - "def fibonacci(n):"
  register: answers
"""

RETURN = r"""
answers:
  description: For each prompt its C(output_ids) and C(meta_info) with C(output_top_logprobs).
  returned: always
  type: list
  elements: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sm120.http import KEY_REFUSED, Client, UrlError
from ansible.module_utils.sm120.redact import redact

CANDIDATES = 5


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "default": "http://127.0.0.1:30000"},
            "api_key": {"type": "str", "no_log": True},
            "ca_path": {"type": "path"},
            "prompts": {"type": "list", "elements": "str", "required": True},
            "output_tokens": {"type": "int", "default": 64},
            "timeout_seconds": {"type": "float", "default": 300.0},
        },
        supports_check_mode=True,
    )
    given: dict[str, Any] = module.params
    if given["output_tokens"] < 1:
        module.fail_json(msg=f"output_tokens: wanted at least 1, found {given['output_tokens']}")
    if module.check_mode:
        module.exit_json(changed=False, answers=[])
    answers = []
    try:
        client = Client(given["url"], given["api_key"], ca_path=given["ca_path"])
        for prompt in given["prompts"]:
            sampling = {"temperature": 0, "max_new_tokens": given["output_tokens"], "ignore_eos": True}
            request = {
                "text": prompt,
                "sampling_params": sampling,
                "return_logprob": True,
                "top_logprobs_num": CANDIDATES,
            }
            answer = client.post("/generate", request, timeout_seconds=given["timeout_seconds"])
            if not answer.ok:
                found = f"HTTP {answer.status}" if answer.status else f"{answer.error}: {answer.detail}"
                if answer.status == 401:
                    found += f": {KEY_REFUSED}"
                module.fail_json(
                    msg=redact(
                        f"wanted an answer of /generate at {given['url']}, found {found}", [given["api_key"]]
                    )
                )
            said = answer.json()
            meta = said.get("meta_info") if isinstance(said, dict) else None
            if not isinstance(meta, dict):
                found = client.redact(answer.text(200))
                module.fail_json(
                    msg=f"wanted JSON with meta_info of /generate at {given['url']}, found {found!r}. Is that an "
                    "SGLang server, and no proxy's page? Look: curl " + given["url"] + "/get_model_info"
                )
            answers.append(
                {
                    "output_ids": said.get("output_ids"),
                    "meta_info": {"output_top_logprobs": meta.get("output_top_logprobs")},
                }
            )
    except (UrlError, OSError) as error:
        module.fail_json(msg=redact(str(error), [given["api_key"]]))
    module.exit_json(changed=False, answers=answers)


if __name__ == "__main__":
    main()
