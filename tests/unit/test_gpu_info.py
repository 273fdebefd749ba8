"""Facts and findings about GPUs, from recorded and documented outputs of nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_info
import pytest
import yaml
from ansible.module_utils.sm120 import smi
from ansible.module_utils.sm120.gpu_facts import gather
from ansible.module_utils.sm120.gpu_findings import Wanted, judge
from conftest import RunModule
from gpu_host import HEAD, PROPRIETARY, RTX_PRO_6000, Machine

EIGHT = {"gpus": 8, "card": RTX_PRO_6000, "capability": "12.0"}
EXPECTS_EIGHT = Wanted(gpus=8, capability="12.0")


def findings(machine: Machine, root: Path, wanted: Wanted | None = None) -> list[tuple[str, str]]:
    found = judge(gather(machine.build(root)), wanted or Wanted())
    for each in found:
        assert all(each[key] for key in ("wanted", "found", "fix")), each
    return [(each["severity"], each["subject"]) for each in found]


def test_the_recorded_h200(tmp_path: Path) -> None:
    facts = gather(Machine.recorded().build(tmp_path))
    first, second = facts["gpus"]
    assert first["name"] == "NVIDIA H200"
    assert (first["bus_id"], second["bus_id"]) == ("0000:00:06.0", "0000:00:07.0")
    assert first["compute_capability"] == "9.0"
    assert (first["memory_total_mib"], first["memory_free_mib"]) == (143771, 143156)
    assert first["bar1_mib"] == 262144
    assert (first["pcie_generation"], first["pcie_width"], first["pcie_width_max"]) == (5, 16, 16)
    assert (first["power_watts"], first["power_limit_min_watts"]) == (101.91, 200.0)
    assert first["power_limit_max_watts"] == 700.0
    assert first["ecc"] is True
    assert first["ecc_uncorrectable"] == 0
    assert first["virtualization"] == "Pass-Through"
    assert facts["driver"]["module_version"] == facts["driver"]["library_version"] == "580.159.04"
    assert facts["driver"]["flavour"] == "open"
    assert facts["driver"]["registry"] == "ForceP2P=0x11"
    assert facts["p2p"] == [{"from": 0, "to": 1, "status": "OK"}, {"from": 1, "to": 0, "status": "OK"}]
    assert {pair["status"] for pair in facts["topology"]} == {"NV18"}
    assert facts["host"]["limit_open_files"] == "1048576"


@pytest.mark.parametrize("count", [1, 2, 8])
def test_good_machines_have_no_errors_or_warnings(tmp_path: Path, count: int) -> None:
    machine = Machine(gpus=count, card=RTX_PRO_6000, capability="12.0")
    wanted = Wanted(gpus=count, capability="12.0")
    serious = [each for each in findings(machine, tmp_path, wanted) if each[0] != "note"]
    assert serious == []


def test_numa_follows_the_bus(tmp_path: Path) -> None:
    facts = gather(Machine(**EIGHT).build(tmp_path))  # type: ignore[arg-type]
    assert [gpu["numa_node"] for gpu in facts["gpus"]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(facts["p2p"]) == 56


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126.09\n"
LOST = "Unable to determine the device handle for GPU7: 0000:00:0D.0: Unknown Error\n"
XID = "[  812.5] NVRM: Xid (PCI:0000:00:07): {}, pid=4711, name=sglang::schedul, what happened\n"
GPU1 = "GPU 1 (0000:00:07.0)"

BROKEN: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "no GPU": ({"gpus": 0, "answers": {"query": (127, "")}, "module": ""}, ("error", "pci")),
    "no driver": (
        {"gpus": 0, "on_bus": 8, "answers": {"query": (127, "")}, "module": ""},
        ("error", "driver"),
    ),
    "driver not loaded": (
        {
            "gpus": 0,
            "on_bus": 8,
            "module": "",
            "answers": {"query": (9, "NVIDIA-SMI has failed because ...")},
        },
        ("error", "driver"),
    ),
    "nouveau bound": ({"bound": "nouveau"}, ("error", "0000:00:06.0")),
    "kernel and library differ": (
        {"gpus": 0, "on_bus": 8, "answers": {"query": (18, MISMATCH)}},
        ("error", "driver"),
    ),
    "proprietary modules on Blackwell": ({**EIGHT, "module": PROPRIETARY}, ("error", "driver")),
    "proprietary modules that see nothing": (
        {"gpus": 0, "on_bus": 8, "module": PROPRIETARY, "answers": {"query": (0, "No devices were found\n")}},
        ("error", "driver"),
    ),
    "nvidia-smi hangs": ({"gpus": 0, "on_bus": 8, "answers": {"query": (124, "")}}, ("error", "driver")),
    "a card is lost": ({**EIGHT, "gpus": 7, "on_bus": 8}, ("error", "gpus")),
    "fewer than wanted": ({**EIGHT, "gpus": 6}, ("error", "gpus")),
    "another capability": ({"gpus": 8}, ("warning", "GPU 0 (0000:00:06.0)")),
    "two models": ({**EIGHT, "changes": {1: {"Product Name": "NVIDIA RTX 6000 Ada"}}}, ("warning", "gpus")),
    "HMM left on": ({**EIGHT, "uvm_disable_hmm": "N"}, ("warning", "driver")),
    "small BAR1": ({**EIGHT, "changes": {1: {"BAR1 Memory Usage/Total": "256 MiB"}}}, ("warning", GPU1)),
    "narrow link": (
        {**EIGHT, "changes": {1: {"PCI/GPU Link Info/Link Width/Current": "8x"}}},
        ("warning", GPU1),
    ),
    "slow link at full clocks": (
        {**EIGHT, "changes": {1: {"PCI/GPU Link Info/PCIe Generation/Current": "1"}}},
        ("warning", GPU1),
    ),
    "uncorrectable ECC errors": (
        {**EIGHT, "changes": {1: {"ECC Errors/Volatile/DRAM Uncorrectable": "2"}}},
        ("error", GPU1),
    ),
    "remapping pending": ({**EIGHT, "changes": {1: {"Remapped Rows/Pending": "Yes"}}}, ("warning", GPU1)),
    "remapping failed": (
        {**EIGHT, "changes": {1: {"Remapped Rows/Remapping Failure Occurred": "Yes"}}},
        ("error", GPU1),
    ),
    "recovery wanted": ({**EIGHT, "changes": {1: {"GPU Recovery Action": "Reboot"}}}, ("error", GPU1)),
    "MIG": ({**EIGHT, "changes": {1: {"MIG Mode/Current": "Enabled"}}}, ("error", GPU1)),
    "persistence off": ({**EIGHT, "changes": {1: {"Persistence Mode": "Disabled"}}}, ("warning", GPU1)),
    "memory held by nobody": (
        {**EIGHT, "changes": {1: {"FB Memory Usage/Free": "40000 MiB"}}},
        ("error", GPU1),
    ),
    "lower power limit": (
        {**EIGHT, "changes": {1: {"GPU Power Readings/Current Power Limit": "300.00 W"}}},
        ("note", GPU1),
    ),
    "no peer access": ({**EIGHT, "p2p": "NS"}, ("warning", "p2p")),
    "Xid of the hardware": ({**EIGHT, "kernel_log": XID.format(79)}, ("error", "0000:00:07.0")),
    "Xid of a program": ({**EIGHT, "kernel_log": XID.format(31)}, ("note", "0000:00:07.0")),
    "Xid contained": ({**EIGHT, "kernel_log": XID.format(94)}, ("warning", "0000:00:07.0")),
    "Xid unheard of": ({**EIGHT, "kernel_log": XID.format(999)}, ("warning", "0000:00:07.0")),
    "kernel log closed": ({**EIGHT, "kernel_log": None}, ("note", "xid")),
    "foreign process": (
        {**EIGHT, "processes": "00000000:00:07.0, 4711, python3, train.py, 90000\n"},
        ("error", GPU1),
    ),
    "small foreign process": (
        {**EIGHT, "processes": "00000000:00:07.0, 4711, /usr/lib/xorg/Xorg, 4\n"},
        ("warning", GPU1),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_machines(tmp_path: Path, name: str) -> None:
    given, expected = BROKEN[name]
    good = findings(Machine(**EIGHT), tmp_path / "good", EXPECTS_EIGHT)  # type: ignore[arg-type]
    found = findings(Machine(**given), tmp_path / "broken", EXPECTS_EIGHT)
    assert expected in found
    assert expected not in good
    assert [each[0] for each in found] == sorted(
        (each[0] for each in found), key=["error", "warning", "note"].index
    )


def test_a_process_of_our_unit_is_not_foreign(tmp_path: Path) -> None:
    machine = Machine(**EIGHT, processes="00000000:00:07.0, 4711, sglang::scheduler, 90000\n")  # type: ignore[arg-type]
    host = machine.build(tmp_path)
    (tmp_path / "proc/4711").mkdir()
    (tmp_path / "proc/4711/cgroup").write_text("0::/system.slice/sglang-main.service\n")
    facts = gather(host)
    assert facts["processes"][0]["unit"] == "sglang-main.service"
    assert [each for each in judge(facts, EXPECTS_EIGHT) if each["severity"] == "error"] == []


def test_a_lost_card_is_named(tmp_path: Path) -> None:
    machine = Machine(**{**EIGHT, "gpus": 7, "on_bus": 8})  # type: ignore[arg-type]
    machine.answers = {"query": (15, machine.query() + LOST)}
    facts = gather(machine.build(tmp_path))
    assert len(facts["gpus"]) == 7
    assert facts["gpus"][0]["compute_capability"] == "12.0"
    texts = [each["found"] for each in judge(facts, Wanted())]
    assert any("0000:00:0d.0" in text for text in texts)


def test_a_mismatch_tells_both_versions(tmp_path: Path) -> None:
    machine = Machine(gpus=0, on_bus=2, answers={"query": (18, MISMATCH)})
    facts = gather(machine.build(tmp_path))
    assert facts["driver"]["module_version"] == "580.159.04"
    assert facts["driver"]["library_version"] == "580.126.09"


def test_too_small_a_disk(tmp_path: Path) -> None:
    wanted = Wanted(model_mib=10**9)
    assert ("error", "disk") in findings(Machine(), tmp_path, wanted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("00000000:06:00.0", "0000:06:00.0"), ("0000:0D:00", "0000:0d:00.0"), ("0D:00.1", "0000:0d:00.1")],
)
def test_bus_ids(text: str, expected: str) -> None:
    assert smi.bus_id(text) == expected


def test_matrix_with_spaces_for_tabs() -> None:
    text = " \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n\nLegend:\n"
    expected = [{"from": 0, "to": 1, "status": "NS"}, {"from": 1, "to": 0, "status": "NS"}]
    assert smi.gpu_pairs(smi.parse_matrix(text)) == expected
    assert smi.gpu_pairs(smi.parse_matrix(text.replace("\t", "   "))) == expected
    assert smi.parse_matrix("No devices were found\n") == {}


def test_module_runs_anywhere_and_changes_nothing(
    run_module: RunModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{HEAD}E\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, answer = run_module(gpu_info.main, check=True, wanted_gpus=8)
    assert code == 0
    assert answer["changed"] is False
    assert answer["driver"]["smi_exit"] == 9
    documented = yaml.safe_load(gpu_info.RETURN)
    assert set(documented) == set(answer) - {"changed", "invocation"}
    json.dumps(answer)
