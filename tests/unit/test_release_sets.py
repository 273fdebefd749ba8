"""The release sets: locks that are complete and hold together (tests/matrix asks PyPI whether they still resolve)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from local_play import play

LOCKS = ROOT / "roles/sglang_runtime/files/locks"
SETS = yaml.safe_load((ROOT / "roles/sglang_runtime/vars/main.yml").read_text())["__sglang_runtime_releases"]
CUDA = sorted(name for name, each in SETS.items() if "cuda" in each)
KERNELS = {"sgl-kernel", "sglang-kernel"}  # the name changed with 0.5.10


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in (line.split("==") for line in lines)
    }


@pytest.mark.parametrize("release", sorted(SETS))
def test_a_lock_is_complete_and_holds_the_sets_own_versions(release: str) -> None:
    for device in ("cpu", "cuda"):
        if device not in SETS[release]:
            continue
        locked = pins(LOCKS / f"{release}-{device}.txt")
        assert locked["sglang"] == release == SETS[release]["sglang"]
        assert locked["flashinfer-python"] == SETS[release]["flashinfer"]
        assert locked["torch"] == SETS[release][device]["torch"]
        assert {"transformers", "tokenizers", "huggingface-hub"} <= set(locked)
        assert "flashinfer-jit-cache" not in locked
        assert locked.get("flashinfer-cubin", locked["flashinfer-python"]) == locked["flashinfer-python"]
        assert (len(KERNELS & set(locked)) == 1) == (device == "cuda")


@pytest.mark.parametrize("release", CUDA)
def test_a_lock_holds_its_pins_and_one_release_of_the_toolkit(release: str) -> None:
    locked = pins(LOCKS / f"{release}-cuda.txt")
    assert pins(LOCKS / f"{release}-cuda.in").items() <= locked.items()
    role = yaml.safe_load((ROOT / "roles/cuda_toolkit/vars/main.yml").read_text())
    toolkit = role["__cuda_toolkit_releases"]["13.0"]["packages"]
    assert {name: locked[name] for name in toolkit if name in locked}.items() <= toolkit.items()


def test_the_recipe_without_a_network_brings_the_compiler() -> None:
    """Older sets hold none of it, and `cuda_toolkit` asks the same folder."""
    toolkit = yaml.safe_load((ROOT / "roles/cuda_toolkit/vars/main.yml").read_text())
    (release,) = toolkit["__cuda_toolkit_releases"].values()
    page = (ROOT / "docs/profiles.md").read_text()
    told = dict(re.findall(r"(nvidia-[a-z-]+)==([\d.]+)", page))
    assert told == release["packages"]


PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - ansible.builtin.include_role: {name: sglang_runtime}
"""


@pytest.mark.parametrize("headers", [True, False])
def test_a_finished_venv_gets_the_headers_that_it_lacks(tmp_path: Path, headers: bool) -> None:
    found: dict[str, Any] = {
        "venv_module": True,
        "headers": headers,
        "interpreter": "3.12",
        "python": "3.12.3",
    }
    found |= {
        "exists": True,
        "versions": {},
        "wrong": {},
        "leaving": [],
        "proved": "as wanted",
        "free_mib": 9,
    }
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(found)}'\n")
    python.chmod(0o755)
    given = {"sglang_runtime_python": str(python), "__sglang_runtime_digest": "as wanted"}
    code, output = play(tmp_path, PLAY, "--check", **given)
    assert code == 0, output
    assert ("Would install python3.12-dev." in output) is not headers
    assert ("changed=0" in output) is headers
