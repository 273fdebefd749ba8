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
        sglang_runtime_facts: {device: cuda, release: 0.5.23, versions: {sglang: "{{ installed | default('0.5.23') }}"}}
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


@pytest.mark.parametrize("entry", ["main", "where_it_decides"])
def test_a_preview_refuses_nothing_that_the_play_brings_about(
    tmp_path: Path, given: dict[str, Any], entry: str
) -> None:
    new = {"sglang_server_instances": [{"instance": "new"}], "installed": "0.5.9"}
    code, output = play(tmp_path, PLAY, "--check", entry=entry, **given, **new)
    assert code == 0, output
    told = " ".join(output.split())
    assert "Would serve new with fusion off, on, on, off in turn" in told
    assert "keep the better one, once it is deployed." in told


def test_an_instance_that_is_not_listed_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    listed = {"sglang_server_instances": [{"instance": "new"}], "sglang_promote_instance": "main"}
    for options in ([], ["--check"]):
        code, output = play(tmp_path, PLAY, *options, entry="main", **given, **listed)
        assert code == 2, output
        assert "Found: new. Name one of them (-e sglang_promote_instance=new)" in " ".join(output.split())


@pytest.fixture
def disproved(tmp_path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """That host, after a probe that failed."""
    failure = {"stage": "numbers", "cause": "wrong_numbers", "text": "one row is wrong"}
    packages = {"sglang": {"version": "0.5.23"}}
    report = {"verdict": "failed", "began": "2026-01-01", "gates": "abc", "failure": failure}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report, "environment": {"packages": packages}}))
    return {**given, "__sglang_server_probe_report": str(path)}


def test_what_the_probe_found_wrong_is_not_measured(tmp_path: Path, disproved: dict[str, Any]) -> None:
    code, output = play(tmp_path, PLAY, "--check", entry="main", **disproved)
    assert code == 2, output
    assert "failed at stage numbers (one row is wrong)" in " ".join(output.split())
    code, output = play(tmp_path, PLAY, entry="where_it_decides", **disproved)
    assert code == 0, output
    assert "main is not measured, and runs with fusion off: the fusion probe of" in " ".join(output.split())


@pytest.mark.parametrize("entry", ["main", "where_it_decides"])
@pytest.mark.parametrize(
    "insisted",
    [
        {"sglang_server_insist": ["fusion-probe-failed"]},
        {"sglang_server_instances": [{"instance": "main", "insist": ["fusion-probe-failed"]}]},
    ],
    ids=["everywhere", "instance"],
)
def test_what_is_insisted_on_is_measured_all_the_same(
    tmp_path: Path, disproved: dict[str, Any], entry: str, insisted: dict[str, Any]
) -> None:
    code, output = play(tmp_path, PLAY, "--check", entry=entry, **disproved, **insisted)
    assert code == 0, output
    assert "Would serve main with fusion off" in " ".join(output.split())


def test_a_preview_tells_the_restarts(tmp_path: Path, given: dict[str, Any]) -> None:
    code, output = play(tmp_path, PLAY, "--check", entry="where_it_decides", **given)
    assert code == 0, output
    assert "Would serve main with fusion off, on, on, off in turn" in " ".join(output.split())
