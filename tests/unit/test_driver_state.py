"""Whose driver it is, what is refused, what is left to do: judged from a made-up host's files and answers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nvidia_driver_info
import pytest
from ansible.module_utils.sm120 import driver_facts
from ansible.module_utils.sm120.apt_state import QUERY, Package
from ansible.module_utils.sm120.driver_state import NONE, OURS, THEIRS, Wanted, default_packages, judge
from ansible.module_utils.sm120.gpu_facts import Host
from conftest import RunModule
from gpu_host import PROPRIETARY, RTX_PRO_6000, Machine

KERNEL = "6.8.0-45-generic"
OS = 'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n'
NAMES = default_packages("ubuntu2404", "580")
VERSION = "580.159.04-1ubuntu1"
NO_SMI: dict[str, tuple[int, str]] = {"query": (127, "")}
OPTIONS = {"nvidia_uvm": {"uvm_disable_hmm": 1}}


@dataclass
class Guest:
    """A machine of `gpu_host` with a package manager and modules on disk."""

    machine: Machine = field(default_factory=lambda: Machine(card=RTX_PRO_6000, capability="12.0"))
    packages: dict[str, tuple[str, str]] = field(default_factory=dict)  # {name: (version, want)}
    disk: tuple[str, str] | None = None  # (version, license)
    record: dict[str, list[str]] | None = None
    os: str = OS
    built: bool = True
    nouveau: bool = False
    space: dict[str, int] = field(default_factory=dict)

    def said(self, argv: list[str]) -> tuple[int, str]:
        if argv == QUERY:
            rows = [
                f"{name}\t{version}\t{want}\tinstalled" for name, (version, want) in self.packages.items()
            ]
            return 0, "\n".join(rows)
        if argv[0] == "modinfo":
            if self.disk is None:
                return 1, "modinfo: ERROR: Module nvidia not found."
            return 0, self.disk[argv[-2] == "license"] + "\n"
        return self.machine.said(argv)

    def facts(self, root: Path) -> dict[str, Any]:
        host = Host(self.machine.build(root).root, self.said)
        (root / "etc").mkdir()
        (root / "etc/os-release").write_text(self.os)
        if self.built:
            (root / "lib/modules" / KERNEL / "build").mkdir(parents=True)
        if self.nouveau:
            (root / "sys/module/nouveau").mkdir(parents=True)
        record = root / "packages.json"
        if self.record is not None:
            record.write_text(json.dumps(self.record))
        return driver_facts.gather(host, record, root / "initramfs.done", OPTIONS, self.space, KERNEL)


WANTED = Wanted(options=OPTIONS)
BARE = Machine(
    card=RTX_PRO_6000, module="", uvm_disable_hmm="", answers=NO_SMI, bound="vfio-none", gpus=0, on_bus=2
)
OURS_RECORD = {"requested": list(NAMES), "installed": list(NAMES), "held": list(NAMES)}
OURS_PACKAGES = dict.fromkeys(NAMES, (VERSION, "hold"))


def fields(found: list[dict[str, str]]) -> str:
    assert all(each[key] for each in found for key in ("wanted", "found", "fix"))
    return " | ".join(" ".join(each.values()) for each in found)


def test_a_bare_guest_gets_everything(tmp_path: Path) -> None:
    packages = {"linux-image-generic": ("6.8", "install"), "linux-image-6.8.0-45-generic": ("6.8", "install")}
    judged = judge(Guest(BARE, packages=packages, built=False).facts(tmp_path), WANTED)
    assert (judged["owner"], judged["manage"], judged["problems"]) == (NONE, True, [])
    assert judged["missing"] == [*NAMES, f"linux-headers-{KERNEL}", "linux-headers-generic"]
    assert (judged["packages_due"], judged["loaded"], judged["reboot"]) == (True, False, [])


@pytest.mark.parametrize(
    ("image", "headers"),
    [
        ("linux-image-virtual", ["linux-headers-virtual"]),
        ("linux-image-generic-hwe-24.04", ["linux-headers-generic-hwe-24.04"]),
        ("linux-image-cloud-amd64", ["linux-headers-cloud-amd64"]),
        ("linux-image-extra-virtual", []),  # depends on linux-image-generic
        ("linux-image-extra-virtual-hwe-24.04", []),
        ("linux-image-uc-generic", []),
        ("linux-image-unsigned-6.8.0-151-generic", []),
        ("linux-image-6.8.0-151-generic", []),
        ("linux-image-amd64-dbg", []),
    ],
)
def test_headers_are_asked_for_by_names_that_exist(image: str, headers: list[str]) -> None:
    known = {image: Package("6.8.0-151.151", "install", "installed")}
    assert driver_facts.header_packages(known, "6.8.0-151-generic", built=True) == headers


@pytest.mark.parametrize(
    ("distribution", "branch", "some"),
    [
        ("ubuntu2404", "580", "nvidia-dkms-580-open"),
        ("ubuntu2404", "580.159.04", "libnvidia-compute-580"),
        ("ubuntu2204", "595", "nvidia-dkms-open"),
        ("debian12", "580", "nvidia-kernel-open-dkms"),
        ("debian13", "595", "nvidia-driver-cuda"),
    ],
)
def test_names_of_packages(distribution: str, branch: str, some: str) -> None:
    names = default_packages(distribution, branch)
    assert some in names
    assert not [name for name in names if "dkms" in name and "open" not in name]


def test_ours_and_whole_needs_nothing(tmp_path: Path) -> None:
    guest = Guest(packages=OURS_PACKAGES, disk=("580.159.04", "Dual MIT/GPL"), record=OURS_RECORD)
    judged = judge(guest.facts(tmp_path), WANTED)
    assert (judged["owner"], judged["problems"], judged["errors"]) == (OURS, [], [])
    assert (judged["packages_due"], judged["settings_due"], judged["reboot"]) == (False, False, [])


def test_ours_of_another_branch_or_no_longer_held_is_put_right(tmp_path: Path) -> None:
    guest = Guest(packages=OURS_PACKAGES, disk=("580.159.04", "Dual MIT/GPL"), record=OURS_RECORD)
    facts = guest.facts(tmp_path)
    assert judge(facts, replace(WANTED, branch="580.163.01"))["missing"] == list(NAMES)
    facts["packages"][NAMES[0]] = replace(facts["packages"][NAMES[0]], want="install")
    judged = judge(facts, WANTED)
    assert (judged["missing"], judged["packages_due"]) == ([], True)


@pytest.mark.parametrize("version", ["580.159.04", "595.58.03"])
def test_a_good_driver_of_somebody_else_is_left_alone(tmp_path: Path, version: str) -> None:
    machine = Machine(card=RTX_PRO_6000, capability="12.0", uvm_disable_hmm="N")
    machine.module = machine.module.replace("580.159.04", version)
    judged = judge(Guest(machine, packages={"cuda-drivers": (version, "install")}).facts(tmp_path), WANTED)
    assert (judged["owner"], judged["manage"], judged["problems"]) == (THEIRS, False, [])
    assert (judged["packages_due"], judged["packages"], judged["reboot"]) == (False, [], [])


def test_the_recorded_h200_without_any_package_is_left_alone(tmp_path: Path) -> None:
    packages = {
        "cuda-compat-13-0": ("580.95.05-0ubuntu1", "install"),
        "cuda-driver-dev-13-0": ("13.0.96-1", "install"),
    }
    judged = judge(Guest(Machine.recorded(), packages).facts(tmp_path), WANTED)
    assert (judged["owner"], judged["manage"], judged["problems"], judged["errors"]) == (
        THEIRS,
        False,
        [],
        [],
    )


def test_proprietary_modules_that_run_an_older_card_are_left_alone(tmp_path: Path) -> None:
    judged = judge(Guest(Machine(module=PROPRIETARY)).facts(tmp_path), WANTED)
    assert (judged["owner"], judged["problems"]) == (THEIRS, [])


def test_adopting_holds_and_sets_up_and_installs_nothing(tmp_path: Path) -> None:
    machine = Machine(card=RTX_PRO_6000, capability="12.0", uvm_disable_hmm="N")
    guest = Guest(machine, packages={"nvidia-dkms-580-open": (VERSION, "install"), "gcc": ("12", "install")})
    judged = judge(guest.facts(tmp_path), replace(WANTED, adopt=True))
    assert (judged["manage"], judged["missing"], judged["packages"]) == (True, [], ["nvidia-dkms-580-open"])
    assert judged["packages_due"] is True
    assert [reason for reason in judged["reboot"] if "uvm_disable_hmm" in reason]


MISMATCH = (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.163\n")
PARTS = {"nvidia-dkms-580": (VERSION, "install"), "nvidia-driver-580": (VERSION, "install")}
REFUSED: dict[str, tuple[Guest, Wanted, tuple[str, ...]]] = {
    "proprietary and loaded": (
        Guest(
            Machine(gpus=0, on_bus=2, module=PROPRIETARY, answers={"query": (6, "No devices were found")}),
            PARTS,
        ),
        WANTED,
        ("open", "580.159.04", "apt-get purge nvidia-dkms-580 nvidia-driver-580"),
    ),
    "proprietary on disk": (
        Guest(
            replace(BARE, answers={"query": (9, "NVIDIA-SMI has failed")}), PARTS, ("580.159.04", "NVIDIA")
        ),
        WANTED,
        ("open", "580.159.04"),
    ),
    "another library": (
        Guest(Machine(gpus=0, on_bus=2, answers={"query": MISMATCH})),
        WANTED,
        ("580.159.04", "580.163", "reboot"),
    ),
    "parts of a driver": (
        Guest(BARE, {"libcuda1": (VERSION, "install")}),
        WANTED,
        ("libcuda1", "nvidia-smi"),
    ),
    "an older branch": (
        Guest(),
        replace(WANTED, branch="590"),
        ("590", "580.159.04", "nvidia_driver_branch: '580'"),
    ),
    "settings without adopting": (Guest(), replace(WANTED, power_limit_watts=450), ("nvidia_driver_adopt",)),
    "a power limit too high": (
        Guest(packages=OURS_PACKAGES, disk=("580.159.04", "Dual MIT/GPL"), record=OURS_RECORD),
        replace(WANTED, power_limit_watts=700),
        ("300", "600", "700"),
    ),
    "no card": (Guest(replace(BARE, on_bus=0)), WANTED, ("PCI", "none")),
    "a full disk": (Guest(BARE, space={"/usr": 2**40}), WANTED, ("/usr", str(2**40))),
    "an unknown distribution": (Guest(BARE, os="ID=gentoo\n"), WANTED, ("gentoo", "nvidia_driver_packages")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    guest, wanted, named = REFUSED[case]
    judged = judge(guest.facts(tmp_path), wanted)
    assert judged["problems"], case
    assert [text for text in named if text not in fields(judged["problems"])] == [], judged["problems"]


def test_a_held_package_that_is_not_there_is_refused(tmp_path: Path) -> None:
    facts = Guest(BARE).facts(tmp_path)
    facts["packages"] |= {NAMES[0]: driver_facts.Package("", "hold", "not-installed")}
    assert f"apt-mark unhold {NAMES[0]}" in fields(judge(facts, WANTED)["problems"])


def test_what_only_a_reboot_brings(tmp_path: Path) -> None:
    machine = Machine(card=RTX_PRO_6000, capability="12.0", uvm_disable_hmm="N")
    guest = Guest(machine, OURS_PACKAGES, ("580.163.01", "Dual MIT/GPL"), OURS_RECORD, nouveau=True)
    wanted = replace(WANTED, options={**OPTIONS, "nvidia": {"NVreg_RegistryDwords": "ForceP2P=0x12"}})
    reasons = judge(guest.facts(tmp_path), wanted)["reboot"]
    assert [
        word
        for word in ("nouveau", "580.163.01", "uvm_disable_hmm", "ForceP2P=0x11")
        if word not in str(reasons)
    ] == []
    assert len(reasons) == 4


def test_settings_are_due_when_a_card_lost_them(tmp_path: Path) -> None:
    machine = Machine(card=RTX_PRO_6000, changes={1: {"Persistence Mode": "Disabled"}}, capability="12.0")
    guest = Guest(machine, OURS_PACKAGES, ("580.159.04", "Dual MIT/GPL"), OURS_RECORD)
    assert judge(guest.facts(tmp_path), WANTED)["settings_due"] is True


def test_the_module_asks_this_host_and_changes_nothing(
    tmp_path: Path, run_module: RunModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "nvidia-driver-580\t580.159.04-1ubuntu1\tinstall\tinstalled"
    programs, state = tmp_path / "bin", tmp_path / "state"
    programs.mkdir()
    state.mkdir()
    for name, does in {"dpkg-query": f"echo '{said}'", "nvidia-smi": "exit 9"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    code, told = run_module(nvidia_driver_info.main, branch="580", state_dir=str(state), adopt=True)
    assert (code, told["changed"]) == (0, False)
    assert (told["owner"], told["packages"]) == (THEIRS, ["nvidia-driver-580"])
    assert list(state.iterdir()) == []
