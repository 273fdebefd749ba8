"""What follows a failed probe, on a real server: roles, module and playbooks as they are, with a stand-in program."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hosts import Host, Run

ARGUMENTS = "/etc/sglang-sm120/main/arguments.yaml"
REPORT = "/var/lib/sglang-sm120/fusion_probe/report.json"
FUSION = "enable-flashinfer-allreduce-fusion: true"
FACTS = """
import importlib.metadata, json
packages = {n: {"version": importlib.metadata.version(n), "root": ""} for n in ("sglang", "flashinfer-python")}
print(json.dumps({"packages": packages}))
"""
# Fails in stage jit as long as the host has /srv/wrong.
BUILD = """
import json, os, sys
say = lambda **k: print(json.dumps(k), flush=True)
for stage in ("toolchain", "jit"):
    say(t="begin", stage=stage)
    if stage == "jit" and os.path.exists("/srv/wrong"):
        say(t="fail", stage=stage, cause="exception", text="a stand-in for a compiler that fails")
        sys.exit(3)
    say(t="end", stage=stage)
say(t="done")
"""


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    made: Host = make_host("probe", 11)
    made.variables = {
        "fusion_probe_ranks": 2,  # of a server on no GPU at all
        "__fusion_probe_program": {"facts.py": FACTS, "build.py": BUILD},
        "fusion_probe_artifacts_dir": str(made.folder / "artifacts"),
    }
    run = made.play("--tags", "gates,serve", sm120_gates_policy="off")
    assert run.rc == 0, run.stdout
    assert made.differing() == set()
    made.sh("touch /srv/wrong")
    return made


def probe(host: Host, playbook: str = "playbooks/probe.yml", **more: Any) -> Run:
    return host.play("--tags", "gates,probe,serve", playbook=playbook, **more)


def assert_refused(run: Run, *named: str, told: int = 2) -> None:
    """Serving tells it of the instance, and again at the play's end."""
    assert (run.rc, run.changed) == (2, 0), run.stdout
    assert len(run.failures()) == told
    assert [
        word for word in (*named, "stage jit", "playbooks/probe.yml") if word not in run.failures()[0]
    ] == []


def test_gates_that_the_play_opened_go_back_and_its_server_runs_again(host: Host) -> None:
    started = host.started()
    run = probe(host, "tests/integration/probe.yml", fusion_probe_on_failure="restore_gates")
    assert run.rc == 2, run.stdout
    assert "The gates are restored." in run.failures()[-1]
    assert "sglang-main.service: runs without fusion." in run.failures()[-1]
    assert host.differing() == set()
    assert host.started() != started
    assert (host.active(), host.generates()) == ("active", 4)


def test_gates_that_are_kept_leave_the_server_running_without_fusion(host: Host) -> None:
    run = probe(host, "tests/integration/probe.yml")
    assert run.rc == 2, run.stdout
    assert "The gates are as they were." in run.failures()[-1]
    assert len(host.differing()) == 6
    assert "fusion" not in host.read(ARGUMENTS)
    assert (host.active(), host.generates()) == ("active", 4)


def test_a_probe_that_finds_nothing_wrong_lets_fusion_on_again(host: Host) -> None:
    host.sh("rm /srv/wrong")
    run = probe(host, "tests/integration/probe.yml")
    assert run.rc == 0, run.stdout
    assert json.loads(host.read(REPORT))["verdict"] == "compiled"
    assert FUSION in host.read(ARGUMENTS)
    assert host.generates() == 4


def test_a_server_that_runs_with_fusion_is_served_without(host: Host) -> None:
    host.sh("touch /srv/wrong")
    started = host.started()
    run = probe(host, fusion_probe_reuse=False)  # what the stand-in answers is no part of a verdict's subject
    assert run.rc == 2, run.stdout
    said = run.failures()[-1]
    for words in (
        "Stage jit failed: a stand-in for a compiler that fails.",
        "The gates are as they were.",
        "sglang-main.service: runs without fusion.",
    ):
        assert words in said
    assert len(host.differing()) == 6
    assert host.started() != started
    assert "fusion" not in host.read(ARGUMENTS)
    assert host.generates() == 4
    (kept,) = (host.folder / "artifacts/probe").glob("fusion-probe-failed.json")
    assert json.loads(kept.read_text())["failure"]["stage"] == "jit"
    assert json.loads(host.read(REPORT))["verdict"] == "failed"


def test_a_later_run_does_not_serve_with_it(host: Host) -> None:
    started = host.started()
    assert_refused(host.play(playbook="playbooks/serve.yml"), "sm120_gates_policy is forced", "insist")
    demanded = {"sm120_gates_policy": "measured", "sglang_server_allreduce_fusion": "on"}
    assert_refused(host.play(playbook="playbooks/serve.yml", **demanded), "allreduce_fusion is on", "insist")
    measured = {"sm120_gates_policy": "measured", "sglang_promote_again": True}
    assert_refused(host.play(playbook="playbooks/promote.yml", **measured), told=1)
    run = host.play(playbook="playbooks/serve.yml", sm120_gates_policy="measured")
    assert (run.rc, run.changed) == (0, 0), run.stdout
    assert host.started() == started
    assert "fusion" not in host.read(ARGUMENTS)
