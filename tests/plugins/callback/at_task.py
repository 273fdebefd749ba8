"""For tests: when a task starts, kill this ansible-playbook, or copy one file over another.

AT_TASK is a task's number (from 1) or its name without the role, which may start several times: AT_NTH is the one
meant (1). AT_DO is `kill`, or `copy` (AT_FROM, AT_TO).
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: at_task
type: aggregate
short_description: Act when a task starts
description: For tests only.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "at_task"

    def __init__(self) -> None:
        super().__init__()
        self.started = 0
        self.named = 0

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self.started += 1
        if os.environ.get("AT_TASK") not in (str(self.started), task.name):
            return
        self.named += 1
        if self.named != int(os.environ.get("AT_NTH", "1")):
            return
        if os.environ["AT_DO"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        shutil.copyfile(os.environ["AT_FROM"], os.environ["AT_TO"])
