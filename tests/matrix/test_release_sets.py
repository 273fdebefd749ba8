"""Every CUDA release set resolves on PyPI for the Python of Ubuntu 24.04, to the lock that the role installs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "roles/sglang_runtime/files/locks"
CUDA = sorted(path.name.removesuffix("-cuda.in") for path in LOCKS.glob("*-cuda.in"))


def python_312() -> str | None:
    """A Python 3.12 to resolve on, where there is one."""
    found = subprocess.run([str(ROOT / "tools/find_python.sh"), "3.12"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else None


def test_every_set_resolves_to_its_lock_on_python_312() -> None:
    """Metadata only: some 50 MB for all sets, and no wheel."""
    python = python_312()
    if python is None:
        pytest.skip(
            "no Python 3.12 here (tools/find_python.sh 3.12): the CUDA release sets were not resolved"
        )
    script = [sys.executable, str(ROOT / "tools/lock.py"), *CUDA, "--check", python]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"^(\S+): (\d+) packages, 0 differ$", done.stdout, re.MULTILINE)
    assert [name for name, _ in told] == CUDA
    assert all(int(count) > 150 for _, count in told)
