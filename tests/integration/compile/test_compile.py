"""FlashInfer's whole communication module for SM120, compiled by the role with the pip toolkit on a host with no GPU.

`make test-compile` runs this: it takes minutes of nvcc.
"""

from __future__ import annotations

from typing import Any

import hosts
import pytest
from hosts import Host

BUILD, COMPUTE = ["toolchain", "jit"], ["nccl", "workspace", "numbers", "graph", "speed"]


@pytest.fixture(scope="module")
def host(make_host: Any) -> Host:
    """A host with runtime and gates as delivered; no toolkit yet."""
    made: Host = make_host("compile", 6)
    made.variables["fusion_probe_artifacts_dir"] = str(made.folder / "artifacts")
    made.variables["fusion_probe_ranks"] = 2  # the demo's server is on no GPU, and would not be probed
    assert made.differing() == set()
    return made


def stages(report: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in report["stages"]}


def test_closed_gates_end_the_probe_and_open_ones_compile(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hosts, "RUN_TIMEOUT_SECONDS", 2400
    )  # six minutes of nvcc, on a machine that may be busy
    closed = host.play(playbook="playbooks/probe.yml")
    assert closed.rc == 2, closed.stdout
    (failed,) = [
        event["event_data"]["res"]
        for event in closed.events
        if event["event"] == "runner_on_failed" and event["event_data"]["task_action"] == "fusion_probe"
    ]
    assert (failed["failure"]["stage"], failed["failure"]["cause"]) == ("jit", "gate_closed")
    assert "fusion.jit" in failed["failure"]["text"]
    assert "[9, 10]" in failed["failure"]["text"]
    assert stages(failed) == {
        **dict(zip(BUILD, ("passed", "failed"), strict=True)),
        **dict.fromkeys(COMPUTE, "not_run"),
    }

    assert host.play(playbook="playbooks/gates.yml").rc == 0
    opened = host.play(playbook="playbooks/probe.yml")
    assert opened.rc == 0, opened.stdout
    (report,) = opened.results("fusion_probe")
    assert report["verdict"] == "compiled"  # which is not passed
    assert stages(report) == {**dict.fromkeys(BUILD, "passed"), **dict.fromkeys(COMPUTE, "not_run")}
    (jit,) = (stage for stage in report["stages"] if stage["name"] == "jit")
    assert (jit["facts"]["warm"], jit["facts"]["aot"]) == (False, False)
    assert "/120a/cached_ops/trtllm_comm/" in jit["facts"]["library"]
    assert host.sh(f"head -c 4 {jit['facts']['library']}") == "\x7fELF"
    assert jit["facts"]["bytes"] > 1_000_000

    again = host.play(playbook="playbooks/probe.yml")
    assert (again.rc, again.changed) == (0, 0), again.stdout
