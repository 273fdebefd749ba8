"""Drives the gate modules and the real builtin modules in this process, in the role's order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import sm120_gates_info
import sm120_gates_state
from ansible.modules import blockinfile, lineinfile, replace

BUILTIN = {"lineinfile": lineinfile, "blockinfile": blockinfile, "replace": replace}
RunModule = Callable[..., tuple[int, dict[str, Any]]]


class Gates:
    """The gates of one site-packages folder."""

    def __init__(self, run_module: RunModule, site: Path) -> None:
        self.run = run_module
        self.site = site
        self.state_dir = site.parent / "state"
        self.features = ["allreduce_fusion", "moe_autotune"]

    def info(self, want: str = "present", **more: Any) -> dict[str, Any]:
        code, answer = self.run(
            sm120_gates_info.main,
            sglang_root=str(self.site / "sglang"),
            flashinfer_root=str(self.site / "flashinfer"),
            state_dir=str(self.state_dir),
            features=self.features,
            want=want,
            **more,
        )
        assert code == 0, answer
        return answer

    def state(
        self, action: str, plan: dict[str, Any], check: bool = False, **more: Any
    ) -> tuple[int, dict[str, Any]]:
        return self.run(
            sm120_gates_state.main,
            check=check,
            action=action,
            plan=plan,
            state_dir=str(self.state_dir),
            **more,
        )

    def must(self, action: str, plan: dict[str, Any], **more: Any) -> dict[str, Any]:
        code, answer = self.state(action, plan, **more)
        assert code == 0, answer
        return answer

    def edit(self, edits: list[dict[str, Any]]) -> None:
        for edit in edits:
            validate = {"validate": edit["validate"]} if edit["validate"] else {}
            code, answer = self.run(
                BUILTIN[edit["module"]].main, path=edit["path"], **edit["args"], **validate
            )
            assert code == 0, answer
            assert answer["changed"], edit

    def apply(self, want: str = "present", edits: int | None = None) -> dict[str, Any]:
        """The role's order of work; stops after that many edits, as a killed run does."""
        plan = self.info(want)
        assert plan["problems"] == []
        self.must("keep", plan["plan"])
        self.must("restore", plan["plan"], scope="outdated")
        self.edit(plan["edits"][:edits])
        if edits is None:
            self.must("verify", plan["plan"])
            self.must("settle", plan["plan"])
        return plan

    def states(self) -> dict[str, str]:
        return {gate["id"]: gate["state"] for gate in self.info()["gates"]}
