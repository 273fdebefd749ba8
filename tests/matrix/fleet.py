"""Folders of unpacked wheels as hosts of one play on this machine: the role itself, on many of them at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Play:
    """What one ansible-playbook did: exit code, all it said, changes by host, and what the role told by host."""

    rc: int
    output: str
    changed: dict[str, int] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)


def variables(folder: Path) -> dict[str, Any]:
    """The role's variables for a host whose packages, state and cache lie in one folder."""
    return {
        "sm120_gates_sglang_root": str(folder / "site/sglang"),
        "sm120_gates_flashinfer_root": str(folder / "site/flashinfer"),
        "sm120_gates_state_dir": str(folder / "state"),
        "sm120_gates_cache_workspace_base": str(folder / "home"),
        "sm120_gates_cache_users": [],  # this machine may have a user sglang
    }


def play(folder: Path, hosts: dict[str, dict[str, Any]], **environment: str) -> Play:
    """Run the role's entry point `entry` of each host. Each goes its own way: what is edited differs."""
    inventory, record = folder / "hosts.json", folder / "record.jsonl"
    common = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    groups: dict[str, Any] = {"entry_main": {"hosts": {}}, "entry_revert": {"hosts": {}}}
    for name, told in hosts.items():
        groups[f"entry_{told['entry']}"]["hosts"][name] = told
    inventory.write_text(json.dumps({"all": {"children": groups, "vars": common}}))
    record.unlink(missing_ok=True)
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(inventory), str(Path(__file__).with_name("play.yml"))),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CALLBACK_PLUGINS": f"{ROOT}/playbooks/callback_plugins:{ROOT}/tests/plugins/callback",
            "ANSIBLE_FORKS": str((os.cpu_count() or 2) + 1),
            "ANSIBLE_STRATEGY": "free",
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_NOCOLOR": "1",
            "RECORD_TO": str(record),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    recap = done.stdout.rpartition("PLAY RECAP")[2]
    changed = re.findall(r"^(\S+) .*\bchanged=(\d+)", recap, re.MULTILINE)
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    facts = {line["host"]: line["facts"]["sm120_gates_facts"] for line in lines if "facts" in line}
    output = done.stdout[-6000:] + done.stderr[-2000:]
    return Play(done.returncode, output, {host: int(count) for host, count in changed}, facts)
