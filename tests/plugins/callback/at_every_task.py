"""For tests: before each task starts, copy the folder EVERY_FROM into EVERY_TO: what a kill there would leave.

A copy is named after the task, with its number (from 01) before it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: at_every_task
type: aggregate
short_description: Copy a folder whenever a task starts
description: For tests only.
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "at_every_task"

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        self.started += 1
        if "EVERY_TO" in os.environ:
            target = Path(os.environ["EVERY_TO"]) / f"{self.started:02} {task.name}"
            shutil.copytree(os.environ["EVERY_FROM"], target, symlinks=True)
