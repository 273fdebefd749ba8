"""Every release as a host of its own: applied, applied again and reverted by the real role, by one play."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet
import pytest
import versions

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
wheels = importlib.import_module("wheels")

PAIRS = [
    *versions.PINS.items(),
    *((versions.ALONE_UNDER, each) for each in versions.FLASHINFER if each not in versions.PINS.values()),
    *versions.MIXED,
]
DECOYS = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/model_hook.py")
# What FlashInfer needs to be asked for the specification of its communication module.
ASKED = re.compile(r"flashinfer/(jit/\w+|compilation_context|version|_build_meta)\.py")


@dataclass
class Host:
    """A pair of releases, and what was seen of it after each run."""

    sglang: str
    flashinfer: str
    folder: Path
    functions: dict[str, str] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    differing: list[set[str]] = field(default_factory=list)
    seen_functions: list[dict[str, str]] = field(default_factory=list)
    marker_left: list[bool] = field(default_factory=list)
    called: list[dict[str, Any]] = field(default_factory=list)

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

    def look(self, seen: fleet.Play) -> None:
        self.changed.append(seen.changed[self.folder.name])
        self.facts.append(seen.facts[self.folder.name])
        self.differing.append(wheels.differing(self.site))
        self.seen_functions.append(self.functions_of_jit_comm())
        self.marker_left.append(self.marker.exists())


def call_jit(folder: Path, hosts: list[Host]) -> None:
    """Call gen_trtllm_comm_module() of every host's FlashInfer."""
    roots = {str(host.site / "flashinfer"): host for host in hosts}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("call_jit.py")), str(folder / "jit")],
        input=json.dumps(list(roots)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for root, answers in json.loads(done.stdout).items():
        roots[root].called.append(answers)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Host]:
    """Apply, apply again, revert; the answers are looked at by one test for each pair."""
    folder = tmp_path_factory.mktemp("matrix")
    hosts = {}
    for sglang, flashinfer in PAIRS:
        name = f"sglang-{sglang}-flashinfer-{flashinfer}"
        host = Host(sglang, flashinfer, folder / name)
        wheels.unpack("sglang", sglang, host.site, lambda path: path in DECOYS)
        wheels.unpack("flashinfer", flashinfer, host.site, lambda path: ASKED.fullmatch(path) is not None)
        host.functions = host.functions_of_jit_comm()
        hosts[sglang, flashinfer] = host
    call_jit(folder, list(hosts.values()))
    for entry in ("main", "main", "revert"):
        for host in hosts.values():
            host.marker.parent.mkdir(parents=True, exist_ok=True)
            host.marker.write_text("x")
        told = {host.folder.name: {**fleet.variables(host.folder), "entry": entry} for host in hosts.values()}
        seen = fleet.play(folder, told)
        assert seen.rc == 0, seen.output
        for host in hosts.values():
            host.look(seen)
        call_jit(folder, list(hosts.values()))
    return hosts
