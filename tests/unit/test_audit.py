"""playbooks/audit.yml by ansible-runner on this machine: it fails where the gates cannot be trusted, and only there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RunModule
from gates_driver import Gates
from test_scanner import keep_only_unpacked

GATE_IDS = {"fusion.header_guard", "fusion.jit", "fusion.workspace_multicast", "fusion.runtime"}


@dataclass
class Audit:
    rc: int
    told: dict[str, dict[str, Any]]
    message: dict[str, str]
    table: dict[str, list[str]]

    def ids(self, host: str) -> set[str]:
        return {gate["id"] for gate in self.told[host]["gates"]}

    def after(self, host: str, gate: str) -> list[str]:
        """The lines of the table about a gate: its own, and those that are indented beneath it."""
        lines = self.table[host]
        first = next(number for number, line in enumerate(lines) if line.split()[1:2] == [gate])
        rest = lines[first + 1 :]
        beneath = next(number for number, line in enumerate(rest) if not line.startswith(" "))
        return [lines[first], *(line.strip() for line in rest[:beneath])]


@pytest.fixture
def hosts(make_site: Any, run_module: RunModule, tmp_path: Path) -> Callable[[str], Gates]:
    """A host of this name, with gates closed as delivered."""

    def make(name: str) -> Gates:
        site = make_site("0.5.9", "0.6.3", f"{name}/site")
        keep_only_unpacked(site)
        return Gates(run_module, site)

    return make


def audit(folder: Path, *gates: Gates) -> Audit:
    told = {
        each.site.parent.name: {
            "sm120_gates_sglang_root": str(each.site / "sglang"),
            "sm120_gates_flashinfer_root": str(each.site / "flashinfer"),
            "sm120_gates_state_dir": str(each.state_dir),
        }
        for each in gates
    }
    common = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": sys.executable,
    }
    (folder / "hosts.json").write_text(json.dumps({"gpu_hosts": {"hosts": told, "vars": common}}))
    # The runner as a process of its own: it forks, and this one may have threads.
    programs = Path(sys.executable).parent
    command = [str(programs / "ansible-runner"), "run", str(folder), "--quiet"]
    command += ["--project-dir", str(ROOT), "--playbook", "playbooks/audit.yml", "--ident", "run"]
    command += ["--inventory", str(folder / "hosts.json")]
    command += ["--cmdline", f"-e audit_artifacts_dir={folder}/audits"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    events = [
        json.loads(path.read_text())
        for path in (folder / "artifacts/run/job_events").glob("*.json")
        if not path.stem.endswith("-partial")
    ]
    return Audit(
        done.returncode,
        {path.parent.name: json.loads(path.read_text()) for path in folder.glob("audits/*/audit.json")},
        {
            event["event_data"]["host"]: str(event["event_data"]["res"]["msg"])
            for event in events
            if event["event"] == "runner_on_failed"
        },
        {
            event["event_data"]["host"]: event["event_data"]["res"]["msg"]
            for event in events
            if event["event"] == "runner_on_ok" and event["event_data"]["task"] == "Show the table"
        },
    )


def test_pristine_and_fully_open_pass(hosts: Callable[[str], Gates], tmp_path: Path) -> None:
    pristine, opened = hosts("pristine"), hosts("opened")
    opened.apply()
    seen = audit(tmp_path, pristine, opened)
    assert (seen.rc, seen.message) == (0, {})
    assert {name: told["features"]["allreduce_fusion"] for name, told in seen.told.items()} == {
        "pristine": "closed",
        "opened": "open",
    }
    for told in seen.told.values():
        assert (told["consistent"], told["crossed"], told["problems"]) == (True, [], [])
        assert {gate["id"] for gate in told["gates"]} >= GATE_IDS

    # The table: layer, gate, state, file:line as they are on the disk, what would change and why.
    path = pristine.site / "sglang/srt/layers/communicator.py"
    lines = path.read_text().splitlines()
    closed = "        (_is_sm90_supported or _is_sm100_supported)"
    opens = "(_is_sm90_supported or _is_sm100_supported or _is_sm120_supported)"
    head, why, now, to = seen.after("pristine", "fusion.runtime")
    assert head.split() == ["runtime", "fusion.runtime", "closed", f"{path}:{lines.index(closed) + 1}"]
    assert why == "why: the predicate asked in every layer answers yes on SM90 and SM100 only"
    assert now.split(":", 1)[1].strip() == closed.strip()
    assert to.split(":", 1)[1].strip() == opens
    for name, state in (("pristine", "closed"), ("opened", "open")):
        table = seen.table[name]
        assert table[0].startswith(f"{name}: flashinfer 0.6.3, sglang 0.5.9; digest ")
        assert table[1].split() == ["layer", "gate", "state", "where"]
        rows = [line.split() for line in table if line.split()[1:2] and line.split()[1] in seen.ids(name)]
        assert [row[1] for row in rows] == [gate["id"] for gate in seen.told[name]["gates"]]
        for row, gate in zip(rows, seen.told[name]["gates"], strict=True):
            where = f"{gate['path']}:{gate['line']}" if gate["line"] else gate["path"]
            assert row == [gate["layer"], gate["id"], gate["state"], where]
        assert f"features: allreduce_fusion {state}, moe_autotune {state}; layers agree" in table
    (opened_head,) = seen.after("opened", "fusion.runtime")
    number = int(opened_head.rpartition(":")[2])
    assert (opened.site / "sglang/srt/layers/communicator.py").read_text().splitlines()[
        number - 1
    ].strip() == opens


def test_drift_and_layers_that_do_not_agree_fail(
    hosts: Callable[[str], Gates], make_site: Any, tmp_path: Path
) -> None:
    """A line too many; FlashInfer installed anew beneath an opened SGLang, which is the crash of old; and SGLang."""
    drifted, kernels, callers = hosts("drifted"), hosts("kernels"), hosts("callers")
    path = drifted.site / "sglang/srt/layers/communicator.py"
    truth = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(path.read_text() + "# a note\n")
    for gates, anew in ((kernels, (None, "0.6.3")), (callers, ("0.5.9", None))):
        gates.apply()
        make_site(*anew, f"{gates.site.parent.name}/site")
        keep_only_unpacked(gates.site)
    seen = audit(tmp_path, drifted, kernels, callers)
    assert seen.rc == 2
    assert set(seen.message) == {"drifted", "kernels", "callers"}

    states = {gate["id"]: gate["state"] for gate in seen.told["drifted"]["gates"]}
    assert [gate for gate, state in states.items() if state == "drifted"] == ["fusion.runtime"]
    assert str(path) in seen.message["drifted"]
    assert "--force-reinstall --no-deps sglang==0.5.9" in seen.message["drifted"]

    head, why, expected, found = seen.after("drifted", "fusion.runtime")
    assert head.split() == ["runtime", "fusion.runtime", "drifted", str(path)]
    assert why.startswith("why: ")
    assert expected == f"expected: {truth}"
    assert found == f"found:    {hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert any(line.endswith("layers DO NOT AGREE") for line in seen.table["kernels"])

    (jit,) = (each for each in seen.told["kernels"]["crossed"] if each["closed"] == ["fusion.jit"])
    assert {"fusion.runtime", "fusion.auto_enable"} <= set(jit["open"])
    assert "No supported CUDA architectures found" in jit["text"]
    (half,) = seen.told["callers"]["crossed"]
    assert {"fusion.header_guard", "fusion.jit"} <= set(half["open"])
    assert {"fusion.runtime", "fusion.auto_enable"} <= set(half["closed"])
    for name in ("kernels", "callers"):
        assert not seen.told[name]["consistent"]
        assert f"site.yml --tags gates --limit {name}" in seen.message[name]
        assert seen.told[name]["notes"]  # advice, which is no reason for a failure
        assert not any(note in seen.message[name] for note in seen.told[name]["notes"])


def test_a_missing_file_is_an_error(make_site: Any, run_module: RunModule) -> None:
    site = make_site("0.5.9", "0.6.3")
    answer = Gates(run_module, site).info(scan=True)
    assert any("is missing" in problem for problem in answer["problems"])
    assert answer["conditions"] == []
    keep_only_unpacked(site)
    assert Gates(run_module, site).info(scan=True)["conditions"] != []
    (site / "sglang/srt/server_args.py").unlink()
    assert "server_args.py" in Gates(run_module, site).info(scan=True)["problems"][0]
