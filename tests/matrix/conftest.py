"""Every release as a host of its own: applied, applied again and reverted by the real role, in three runs of one play."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
wheels = importlib.import_module("wheels")

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    *versions.PINS.items(),
    *((versions.ALONE_UNDER, flashinfer) for flashinfer in versions.FLASHINFER),
    *versions.MIXED,
]
DECOYS = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/model_hook.py")


@dataclass
class Host:
    """A pair of releases, and what was seen of it after each run."""

    sglang: str
    flashinfer: str
    folder: Path
    pristine: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    differing: list[set[str]] = field(default_factory=list)
    seen_functions: list[dict[str, str]] = field(default_factory=list)
    marker_left: list[bool] = field(default_factory=list)

    @property
    def site(self) -> Path:
        return self.folder / "site"

    @property
    def marker(self) -> Path:
        cache = self.folder / "home/.cache/flashinfer"
        return cache / self.flashinfer / "120a/cached_ops/trtllm_comm/marker"

    def functions_of_jit_comm(self) -> dict[str, str]:
        """Text of every function of FlashInfer's jit/comm.py."""
        text = (self.site / "flashinfer/jit/comm.py").read_text()
        return {
            part.partition("(")[0]: hashlib.sha256(part.encode()).hexdigest()
            for part in re.split(r"^def ", text, flags=re.MULTILINE)[1:]
        }

    def variables(self) -> dict[str, str]:
        return {
            "sm120_gates_sglang_root": str(self.site / "sglang"),
            "sm120_gates_flashinfer_root": str(self.site / "flashinfer"),
            "sm120_gates_state_dir": str(self.folder / "state"),
            "sm120_gates_cache_workspace_base": str(self.folder / "home"),
            "told": str(self.folder / "told.json"),
        }

    def look(self) -> None:
        self.facts.append(json.loads((self.folder / "told.json").read_text()))
        self.differing.append(wheels.differing(self.site))
        self.seen_functions.append(self.functions_of_jit_comm())
        self.marker_left.append(self.marker.exists())


def _run(folder: Path, entry: str) -> str:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(folder / "hosts.json"), "-e", f"entry={entry}"),
            str(Path(__file__).with_name("play.yml")),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_FORKS": str(os.cpu_count() or 2),
            "ANSIBLE_PIPELINING": "1",
            "ANSIBLE_NOCOLOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.rpartition("PLAY RECAP")[2]


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Host]]:
    """Apply, apply again, revert; the answers are looked at by one test for each pair."""
    folder = tmp_path_factory.mktemp("matrix")
    hosts = {}
    for sglang, flashinfer in PAIRS:
        name = f"sglang-{sglang}-flashinfer-{flashinfer}"
        host = Host(sglang, flashinfer, folder / name)
        wheels.unpack("sglang", sglang, host.site, lambda path: path in DECOYS)
        wheels.unpack("flashinfer", flashinfer, host.site)
        host.functions = host.functions_of_jit_comm()
        hosts[sglang, flashinfer] = host
    told = {host.folder.name: host.variables() for host in hosts.values()}
    common = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.json").write_text(json.dumps({"all": {"hosts": told, "vars": common}}))
    for entry in ("main", "main", "revert"):
        for host in hosts.values():
            host.marker.parent.mkdir(parents=True, exist_ok=True)
            host.marker.write_text("x")
        recap = _run(folder, entry)
        for host in hosts.values():
            line = re.search(rf"^{re.escape(host.folder.name)} .*changed=(\d+)", recap, re.MULTILINE)
            assert line is not None
            host.changed.append(int(line.group(1)))
            host.look()
    yield hosts
