"""The role sglang_promote where there is nothing to measure: it says so, or in `site.yml` passes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from local_play import play

PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact:
        sglang_runtime_facts: {device: cuda, release: 0.5.23, versions: {sglang: 0.5.23}}
        sm120_gates_facts: {digest: abc, features: {allreduce_fusion: open}}
    - ansible.builtin.include_role: {name: sglang_promote, tasks_from: "{{ entry }}"}
"""
SEE = "See what runs and what was decided before"


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """A host with one instance deployed, which does not run."""
    etc = tmp_path / "etc"
    (etc / "main").mkdir(parents=True)
    record = {
        "unit": "sglang-none.service",
        "user": "nobody",
        "home": "/nonexistent",
        "url": "http://[::1]:1",
    }
    (etc / "main/instance.json").write_text(json.dumps(record))
    return {"__sglang_server_etc": str(etc), "cuda_toolkit_home": ""}


# Either of the two decides by itself: no verdict is served, and "runs with fusion off" would not be true.
DECIDED: list[dict[str, Any]] = [
    {"sm120_gates_policy": "forced"},
    {"sglang_server_instances": [{"instance": "main", "allreduce_fusion": "on"}]},
]


@pytest.mark.parametrize("decided", DECIDED, ids=["policy", "instance"])
def test_what_is_decided_already_is_not_measured(
    tmp_path: Path, given: dict[str, Any], decided: dict[str, Any]
) -> None:
    code, output = play(tmp_path, PLAY, entry="main", **given, **decided)
    assert code == 2, output
    told = " ".join(output.split())
    wanted = decided.get("sm120_gates_policy", "measured")
    fusion = "on" if "sglang_server_instances" in decided else "auto"
    assert f"Found: policy {wanted}, allreduce_fusion {fusion}." in told
    code, output = play(tmp_path, PLAY, entry="where_it_decides", **given, **decided)
    assert code == 0, output
    assert SEE not in output


def test_a_preview_tells_the_restarts(tmp_path: Path, given: dict[str, Any]) -> None:
    code, output = play(tmp_path, PLAY, "--check", entry="where_it_decides", **given)
    assert code == 0, output
    assert "Would serve main with fusion off, on, on, off in turn" in " ".join(output.split())
