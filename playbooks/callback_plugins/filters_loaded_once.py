"""Load filters and tests before a task's process is forked.

Ansible runs each task in a process of its own, which loads every filter and test anew when it first meets an
expression: a tenth of the controller's time in a run that changes nothing. What is loaded here is inherited by all.
"""

from __future__ import annotations

from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

DOCUMENTATION = r"""
name: filters_loaded_once
type: aggregate
short_description: Load filters and tests before a task's process is forked
description:
  - Prints nothing and changes nothing. Each task's process finds filters and tests loaded, and does not load them anew.
"""


class CallbackModule(CallbackBase):
    """On by itself: its folder is beside the playbooks."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "filters_loaded_once"

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """Of either any will do: the first one brings all. A role with filters of its own makes Ansible forget them."""
        filter_loader.get("default")
        test_loader.get("defined")

    def v2_playbook_on_handler_task_start(self, task: Any) -> None:
        self.v2_playbook_on_task_start(task, False)
