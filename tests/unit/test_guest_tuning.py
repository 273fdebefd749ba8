"""The running kernel's settings are recorded, set, and put back: on a folder in the place of /proc/sys."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "roles" / "guest_tuning" / "files" / "sysctl.py"


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    for name, value in {
        "vm/swappiness": "60",
        "kernel/numa_balancing": "1",
        "net/ipv4/tcp_rmem": "4096\t131072\t6",
    }.items():
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / name).write_text(value + "\n")
    script = SCRIPT.read_text()
    assert (
        script.count("/proc/sys/") == script.count('"/proc/sys/"') == 1
    )  # or this kernel's own would be set
    (tmp_path / "sysctl.py").write_text(script.replace('"/proc/sys/"', repr(f"{tmp_path}/proc/")))
    return tmp_path


def call(kernel: Path, action: str, **values: Any) -> dict[str, list[str]]:
    named = {name.replace("__", "."): value for name, value in values.items()}
    asked = json.dumps({"values": named, "record": str(kernel / "state/live.json")})
    command = [sys.executable, "-I", str(kernel / "sysctl.py"), action, asked]
    changed: dict[str, list[str]] = json.loads(subprocess.check_output(command))["changed"]
    return changed


def now(kernel: Path) -> dict[str, str]:
    return {path.name: path.read_text().strip() for path in (kernel / "proc").rglob("*") if path.is_file()}


def test_set_kept_and_put_back(kernel: Path) -> None:
    before = now(kernel)
    assert call(kernel, "look", vm__swappiness=0) == {"vm.swappiness": ["60", "0"]}
    assert (now(kernel), (kernel / "state").exists()) == (before, False)
    assert call(kernel, "apply", vm__swappiness=0, kernel__numa_balancing=0, kernel__absent=1).keys() == {
        "vm.swappiness",
        "kernel.numa_balancing",
    }
    assert call(kernel, "apply", vm__swappiness=0, kernel__numa_balancing=0, kernel__absent=1) == {}
    assert (kernel / "state/live.json").stat().st_mode & 0o777 == 0o600
    # Another value, and one setting that is no longer asked for.
    assert call(kernel, "apply", vm__swappiness=10) == {
        "vm.swappiness": ["0", "10"],
        "kernel.numa_balancing": ["0", "1"],
    }
    assert call(kernel, "restore") == {"vm.swappiness": ["10", "60"]}
    assert now(kernel) == before
    assert not (kernel / "state/live.json").exists()
    assert call(kernel, "restore") == {}


def test_values_of_several_numbers_are_compared_as_such(kernel: Path) -> None:
    assert call(kernel, "apply", net__ipv4__tcp_rmem="4096 131072 6") == {}


def test_a_slash_within_dots_stands_for_a_dot(kernel: Path) -> None:
    vlan = kernel / "proc/net/ipv4/conf/enp3s0.200/forwarding"
    vlan.parent.mkdir(parents=True)
    vlan.write_text("0\n")
    assert call(kernel, "apply", **{"net.ipv4.conf.enp3s0/200.forwarding": 1}) != {}
    assert vlan.read_text() == "1\n"
    call(kernel, "restore")
    assert call(kernel, "apply", **{"net/ipv4/conf/enp3s0.200/forwarding": 1}) != {}
    assert vlan.read_text() == "1\n"
