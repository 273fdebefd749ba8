"""For tests: one JSON line for each result, in the file RECORD_TO: host, task, action, status, changed.

Of the gates role also the facts that it set, as the next task would read them: no task of the test's own is needed.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: record
type: aggregate
short_description: Record every result
description: For tests only.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "record"

    def _record(self, result: Any, status: str) -> None:
        if "RECORD_TO" not in os.environ:
            return
        told = result.result.get("ansible_facts", {})
        line = {
            "host": result.host.get_name(),
            "task": result.task.name,
            "action": result.task.action,
            "status": status,
            "changed": bool(result.result.get("changed")),
            **({"facts": told} if "sm120_gates_facts" in told else {}),
        }
        with open(os.environ["RECORD_TO"], "a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")

    def v2_runner_on_ok(self, result: Any) -> None:
        self._record(result, "ok")

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._record(result, "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._record(result, "unreachable")
