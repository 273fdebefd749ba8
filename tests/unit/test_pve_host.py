"""The Proxmox host: kernel parameters merged and taken back, and what a look at the host finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pve_host_cmdline
import pve_host_info
import pytest
from ansible.module_utils.sm120 import storage
from ansible.module_utils.sm120.pve_cmdline import check_parameters, edit, line_of, merge, split, unmerge
from ansible.module_utils.sm120.pve_host_scan import boot_loaders, findings, scan
from hypothesis import given, settings
from hypothesis import strategies as st
from pve_sysfs import bind, device, make

GRUB = """\
# a comment that names GRUB_CMDLINE_LINUX_DEFAULT="no"
GRUB_DEFAULT=0
GRUB_CMDLINE_LINUX_DEFAULT="quiet splash"
GRUB_CMDLINE_LINUX=""
"""
ADD = ["iommu=pt", "pcie_aspm=off"]
TWO_SIZES = ["hugepagesz=1G", "hugepages=4", "hugepagesz=2M", "hugepages=4"]
parameter = st.from_regex(r"[a-z][a-z_.]{0,8}(=[a-z0-9,]{1,6})?", fullmatch=True)


@pytest.mark.parametrize(
    ("line", "add", "remove", "after"),
    [
        ("quiet", ["iommu=pt"], [], "quiet iommu=pt"),
        ("quiet iommu=pt", ["iommu=pt"], [], "quiet iommu=pt"),
        ("iommu=soft quiet", ["iommu=pt"], [], "quiet iommu=pt"),
        ("iommu=off quiet", [], ["iommu=off"], "quiet"),
        ("console=tty0", ["console=ttyS0"], [], "console=tty0 console=ttyS0"),
        ("pcie-aspm=force", ["pcie_aspm=off"], [], "pcie_aspm=off"),
        # hugepages= counts pages of the size named before it: of two settings one would be misread
        (
            "hugepages=512 quiet",
            ["default_hugepagesz=1G", "hugepagesz=1G", "hugepages=64"],
            [],
            "quiet default_hugepagesz=1G hugepagesz=1G hugepages=64",
        ),
        # pages of two sizes are one row: whole, in order, and the same after a second run
        ("hugepages=512 quiet", TWO_SIZES, [], f"quiet {' '.join(TWO_SIZES)}"),
        (" ".join([*TWO_SIZES[2:], *TWO_SIZES[:2], "quiet"]), TWO_SIZES, [], f"quiet {' '.join(TWO_SIZES)}"),
        ('a="x y" b', ["c"], [], 'a="x y" b c'),
        ("", ["a", "b=1"], [], "a b=1"),
        ("intel_iommu=on", ["iommu=pt"], [], "intel_iommu=on iommu=pt"),
    ],
)
def test_parameters_are_merged_one_by_one(line: str, add: list[str], remove: list[str], after: str) -> None:
    assert merge(line, add, remove).line == after
    assert merge(after, add, remove).line == after


def test_a_row_of_pages_can_be_taken_back_and_made_shorter(run_module: Any, tmp_path: Path) -> None:
    path = tmp_path / "cmdline"
    path.write_text("quiet hugepages=4\n")
    host = Host(run_module, path, "plain")
    assert [host(add=TWO_SIZES)["changed"], host(add=TWO_SIZES)["changed"]] == [True, False]
    assert path.read_text() == f"quiet {' '.join(TWO_SIZES)}\n"
    host(add=TWO_SIZES[:2])
    assert path.read_text() == f"quiet {' '.join(TWO_SIZES[:2])}\n"
    host(state="absent")
    assert path.read_text() == "quiet hugepages=4\n"


@settings(deadline=None)  # a busy machine is no failure
@given(
    st.lists(parameter, unique=True),
    st.lists(parameter, unique=True, max_size=4),
    st.lists(parameter, max_size=3),
)
def test_a_merge_can_be_taken_back_under_others_hands(
    line: list[str], add: list[str], later: list[str]
) -> None:
    before = " ".join(line)
    merged = merge(before, add)
    new = [item for item in later if item not in split(merged.line) and item not in merged.removed]
    back = split(unmerge(" ".join([merged.line, *new]), merged.added, merged.removed))
    assert sorted(back) == sorted([*line, *new])
    assert [item for item in back if item in line and item not in merged.removed] == [
        item for item in line if item not in merged.removed
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GRUB, "quiet splash"),
        ("GRUB_CMDLINE_LINUX_DEFAULT=quiet\n", "quiet"),
        ("GRUB_CMDLINE_LINUX_DEFAULT='a b' # why\n", "a b"),
        ('GRUB_CMDLINE_LINUX_DEFAULT="a #b"\n', "a #b"),
        ('GRUB_CMDLINE_LINUX_DEFAULT="a"\nGRUB_CMDLINE_LINUX_DEFAULT="b"\n', "b"),
        ('#GRUB_CMDLINE_LINUX_DEFAULT="a"\n', ""),
        ("", ""),
    ],
)
def test_the_line_grub_takes_is_found_and_nothing_else_changes(text: str, line: str) -> None:
    assert line_of(text, "grub") == line
    after = edit(text, "grub", "new line")
    assert line_of(after, "grub") == "new line"
    different = [
        pair for pair in zip(text.splitlines(), after.splitlines(), strict=False) if pair[0] != pair[1]
    ]
    assert len(different) <= 1
    assert after.endswith("\n")


@pytest.mark.parametrize(
    "text",
    [
        'GRUB_CMDLINE_LINUX_DEFAULT="quiet \\\n splash"\n',
        'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\r\nGRUB_DEFAULT=0\r\n',
        "GRUB_CMDLINE_LINUX_DEFAULT=\"quiet\"' splash'\n",
        'GRUB_CMDLINE_LINUX_DEFAULT+=" splash"\n',
    ],
)
def test_a_line_that_cannot_be_edited_is_refused_and_not_doubled(
    run_module: Any, tmp_path: Path, text: str
) -> None:
    path = tmp_path / "grub"
    path.write_text(text, newline="")
    answer = Host(run_module, path, "grub")(add=ADD)
    assert answer["failed"] is True
    assert "line 1 " in answer["msg"]
    assert path.read_bytes() == text.encode()
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize(
    ("parameters", "severities"),
    [
        (["iommu=off"], ["error"]),
        (["amd_iommu=off", "iommu=off"], ["error", "error"]),
        (["amd_iommu=pt"], ["warning"]),
        (["amd_iommu=on"], ["warning"]),
        (["iommu=pt", "intel_iommu=on,sm_on", "amd_iommu=force_enable"], []),
    ],
)
def test_bad_values(parameters: list[str], severities: list[str]) -> None:
    assert [item.severity for item in check_parameters(parameters, "it")] == severities
    assert check_parameters(parameters, "it", parameters) == []
    assert all(item.severity == "error" for item in check_parameters(parameters, "it", wanted=True))


class Host:
    """Runs pve_host_cmdline on a file."""

    def __init__(self, run: Any, path: Path, kind: str) -> None:
        self.run_module, self.path, self.kind = run, path, kind
        self.records = path.parent / "records"

    def __call__(self, *, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {"path": str(self.path), "kind": self.kind, "record_dir": str(self.records), **args}
        _, answer = self.run_module(pve_host_cmdline.main, check=check, diff=True, **given)
        return dict(answer)


@pytest.fixture(params=["grub", "plain"])
def host(request: pytest.FixtureRequest, run_module: Any, tmp_path: Path) -> Host:
    path = tmp_path / "file"
    path.write_text(GRUB if request.param == "grub" else "root=ZFS=rpool/ROOT/pve-1 boot=zfs quiet")
    path.chmod(0o640)
    return Host(run_module, path, request.param)


def test_there_and_back_byte_for_byte(host: Host) -> None:
    first = host.path.read_bytes()
    planned = host(check=True, add=ADD)
    assert planned["changed"] is True
    assert (host.path.read_bytes(), host.records.exists()) == (first, False)
    done = host(add=ADD)
    assert (done["changed"], done["diff"]) == (True, planned["diff"])
    assert host(add=ADD)["changed"] is False
    assert set(ADD) <= set(split(line_of(host.path.read_text(), host.kind)))
    assert host.path.stat().st_mode & 0o777 == 0o640
    assert host(add=[*ADD, "nosmt"])["changed"] is True
    assert host(add=["iommu=pt"])["changed"] is True
    assert "pcie_aspm=off" not in host.path.read_text()
    assert host(state="absent")["changed"] is True
    assert host.path.read_bytes() == first
    assert host(state="absent")["changed"] is False
    assert list(host.records.iterdir()) == []


def test_what_a_user_added_since_stays(host: Host) -> None:
    host(add=ADD)
    host.path.write_text(host.path.read_text().replace("iommu=pt", "iommu=pt mitigations=off"))
    assert host(add=ADD)["changed"] is False
    host(state="absent")
    line = line_of(host.path.read_text(), host.kind)
    assert split(line)[-1] == "mitigations=off"
    assert not set(ADD) & set(split(line))


def test_a_replaced_value_comes_back(host: Host) -> None:
    host.path.write_text(host.path.read_text().replace("quiet", "quiet iommu=soft"))
    first = host.path.read_bytes()
    host(add=ADD)
    assert "iommu=soft" not in host.path.read_text()
    host.path.write_text(host.path.read_text().replace("quiet", "quiet nosmt"))
    host(state="absent")
    assert {"iommu=soft", "nosmt"} <= set(split(line_of(host.path.read_text(), host.kind)))
    assert host.path.read_bytes() != first


def test_file_restored_behind_our_back_is_merged_again(host: Host) -> None:
    first = host.path.read_bytes()
    host(add=ADD)
    host.path.write_bytes(first)
    assert host(add=ADD)["changed"] is True
    host(state="absent")
    assert host.path.read_bytes() == first


def test_values_that_do_not_exist_and_broken_records_are_refused(host: Host) -> None:
    first = host.path.read_bytes()
    assert host(add=["amd_iommu=pt"])["failed"] is True
    assert host(add=["iommu=off"])["failed"] is True
    assert host.path.read_bytes() == first
    host(add=ADD)
    after = host.path.read_bytes()
    record = next(host.records.iterdir())
    record.write_text(record.read_text().replace('"pristine_base64": "', '"pristine_base64": "AAAA'))
    assert host(state="absent")["failed"] is True
    assert host.path.read_bytes() == after


def test_owner_and_folder_are_on_disk_with_the_bytes_and_a_full_disk_is_told_as_it_is(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, write, seen = host.path.read_bytes(), storage.write_file, []

    def full_disk(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None = None) -> None:
        seen.append((path, owner))
        if path == host.path and len(seen) == 2:
            raise OSError(28, "No space left on device")
        write(path, data, mode, owner)

    monkeypatch.setattr(pve_host_cmdline, "write_file", full_disk)
    answer = host(add=ADD)
    assert answer["failed"] is True
    assert "No space left" in answer["msg"]
    assert "nothing was changed" not in answer["msg"]
    assert (host.path.read_bytes(), len(list(host.records.iterdir()))) == (first, 1)
    assert host(add=ADD)["changed"] is True
    assert seen[-1] == (host.path, (host.path.stat().st_uid, host.path.stat().st_gid))
    host(state="absent")
    assert host.path.read_bytes() == first


STATUS = "System currently booted with {}\nA1B2-C3D4 is configured with: {} (versions: 6.14.11-1-pve)\n"


@pytest.mark.parametrize(
    ("managed", "status", "names"),
    [
        (False, "", ["grub"]),
        (True, STATUS.format("uefi", "uefi"), ["systemd-boot"]),
        (True, STATUS.format("legacy bios", "grub"), ["grub"]),
        (True, STATUS.format("uefi", "grub"), ["grub"]),
        (True, STATUS.format("uefi", "uefi, grub"), ["systemd-boot", "grub"]),
    ],
)
def test_boot_loaders(tmp_path: Path, managed: bool, status: str, names: list[str]) -> None:
    if managed:
        (tmp_path / "etc/kernel").mkdir(parents=True)
        (tmp_path / "etc/kernel/proxmox-boot-uuids").write_text("A1B2-C3D4\n")
    found = boot_loaders(tmp_path, status)
    assert [item.name for item in found] == names
    assert all((("proxmox-boot-tool", "refresh") in item.refresh) is managed for item in found)


def test_a_boot_tool_that_hangs_is_told(
    run_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proxmox-boot-tool").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "proxmox-boot-tool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(pve_host_info, "TOOL_SECONDS", 1)
    code, told = run_module(pve_host_info.main)
    assert code == 1
    assert told["msg"].startswith(
        f"Wanted: an answer of {tmp_path}/proxmox-boot-tool status. Found: none in 1 s."
    )


def look(root: Path, **args: Any) -> list[tuple[str, str]]:
    seen = scan(root, ["10de:2bb5"], "")
    return [(item.subject, item.severity) for item in findings(seen, **{"count": 8, **args})]


def test_a_host_before_and_after(tmp_path: Path) -> None:
    make(tmp_path)
    assert look(tmp_path) == []
    after = look(tmp_path, after=True, active=["iommu=pt"])
    cards = ", ".join(f"0000:{0x11 + 16 * i:02x}:00.0" for i in range(8))
    assert after == [("kernel parameters", "error"), (cards, "error")]
    make(tmp_path, driver="vfio-pci", cmdline="quiet iommu=pt")
    assert look(tmp_path, after=True, active=["iommu=pt"]) == []
    seen = scan(tmp_path, ["10de:2bb5"], "")
    assert [card["bar_mib"] for card in seen["gpus"]] == [131168] * 8
    assert (seen["phys_bits"], seen["intel_iommu_needed"]) == (52, False)


def test_a_bar_without_an_address_does_not_count(tmp_path: Path) -> None:
    make(tmp_path, gpus=1)
    resource = tmp_path / "sys/bus/pci/devices/0000:11:00.0/resource"
    lines = resource.read_text().splitlines()
    lines[2] = f"0x{0:016x} 0x{(128 << 30) - 1:016x} 0x000000002014220c"
    resource.write_text("\n".join(lines) + "\n")
    assert [card["bar_mib"] for card in scan(tmp_path, ["10de:2bb5"], "")["gpus"]] == [96]


def test_what_is_wrong_with_a_host(tmp_path: Path) -> None:
    make(tmp_path, gpus=7, cmdline="amd_iommu=off iommu=pt")
    device(tmp_path, "0000:11:00.0", "10de:2bb5", "0x030200", 20, alive=False)
    device(tmp_path, "0000:21:00.1", "10de:22e8", "0x040300", 21)
    device(tmp_path, "0000:13:02.0", "15b3:101d", "0x020000", 22)
    (tmp_path / "etc/default/grub.d").mkdir(parents=True)
    (tmp_path / "etc/default/grub.d/50-cloud.cfg").write_text('GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n')
    (tmp_path / "etc/default/grub.d/60-ok.cfg").write_text(
        'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT nosmt"\n'
    )
    (tmp_path / "etc/modules").write_text("# loaded at boot\nvfio_virqfd\n")
    assert look(tmp_path) == [
        ("kernel parameters", "error"),
        ("GPUs", "error"),
        ("0000:11:00.0", "error"),
        ("0000:31:00.0", "error"),
        ("modules", "warning"),
        ("GRUB", "error"),
    ]
    assert ("0000:31:00.0", "warning") in look(tmp_path, accept_group_members=True)
    assert look(tmp_path, removable=["amd_iommu=off"])[0] == ("GPUs", "error")


@pytest.mark.parametrize(
    ("text", "place", "removable"),
    [
        ('GRUB_CMDLINE_LINUX_DEFAULT="quiet amd_iommu=off"\n', "/etc/default/grub", True),
        (
            'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_CMDLINE_LINUX="amd_iommu=off"\n',
            "line 2 of /etc/default/grub",
            False,
        ),
        ('# \nGRUB_CMDLINE_LINUX_DEFAULT="quiet" "amd_iommu=off"\n', "/etc/default/grub", False),
    ],
)
def test_what_the_next_boot_would_bring_is_looked_at(
    tmp_path: Path, text: str, place: str, removable: bool
) -> None:
    make(tmp_path)
    (tmp_path / "etc/default").mkdir(parents=True)
    (tmp_path / "etc/default/grub").write_text(text)
    found = findings(scan(tmp_path, ["10de:2bb5"], ""), count=8)
    assert [item.severity for item in found] == ["error"]
    assert place in f"{found[0].subject} {found[0].found}"
    assert (look(tmp_path, removable=["amd_iommu=off"]) == []) is removable


def test_a_file_beside_grubs_is_looked_at_too(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "etc/default/grub.d").mkdir(parents=True)
    (tmp_path / "etc/default/grub.d/x.cfg").write_text(
        'GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=off"\n'
    )
    assert look(tmp_path) == [("kernel parameters", "error")]


@pytest.mark.parametrize(
    ("changed", "cmdline", "iommu", "driver", "reboot"),
    [
        (True, "quiet", True, None, True),
        (True, "quiet iommu=pt", False, None, False),  # that is for the firmware
        (True, "quiet", False, None, True),
        (True, "quiet iommu=pt iommu=off", True, "vfio-pci", True),
        (False, "quiet", True, None, False),  # booted since: another boot brings the same
        (False, "quiet iommu=pt iommu=off", True, "vfio-pci", False),
        (True, "quiet iommu=pt", True, "nouveau", True),
        (False, "quiet iommu=pt", True, "nouveau", False),
        (True, "quiet iommu=pt", True, "vfio-pci", False),
    ],
)
def test_a_reboot_is_asked_for_only_where_it_changes_something(
    tmp_path: Path, changed: bool, cmdline: str, iommu: bool, driver: str | None, reboot: bool
) -> None:
    make(tmp_path, cmdline=cmdline, iommu=iommu, driver=driver)
    (tmp_path / "etc/default").mkdir(parents=True)
    (tmp_path / "etc/default/grub").write_text('GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"\n')
    booted = (tmp_path / "etc/default/grub").stat().st_mtime + (-60 if changed else 60)
    (tmp_path / "proc/stat").write_text(f"cpu 1 2\nbtime {int(booted)}\n")
    found = findings(scan(tmp_path, ["10de:2bb5"], ""), count=8, active=["iommu=pt"], after=True)
    assert any(item.reboot for item in found) is reboot
    assert bool(found) is not (cmdline == "quiet iommu=pt" and iommu and driver == "vfio-pci")


def test_iommu_off_and_a_foreign_driver(tmp_path: Path) -> None:
    make(tmp_path, gpus=1, iommu=False)
    assert look(tmp_path, count=1, after=True) == [("0000:11:00.0", "error")]
    make(tmp_path, gpus=1)
    bind(tmp_path, "0000:11:00.0", "nouveau")
    assert look(tmp_path, count=1, after=True) == [("0000:11:00.0", "error")]


def test_old_intel_kernels_need_the_iommu_switched_on(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "proc/cpuinfo").write_text("vendor_id\t: GenuineIntel\n")
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.5.13-6-pve\n")
    assert scan(tmp_path, [], "")["intel_iommu_needed"] is True
    (tmp_path / "proc/sys/kernel/osrelease").write_text("6.8.12-1-pve\n")
    assert scan(tmp_path, [], "")["intel_iommu_needed"] is False
