"""Every CUDA release set resolves on PyPI to the lock that the role installs, on a Python that the sets are for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "roles/sglang_runtime/files/locks"
CUDA = sorted(path.name.removesuffix("-cuda.in") for path in LOCKS.glob("*-cuda.in"))


def python() -> str:
    """3.12 (Ubuntu 24.04), which the locks were not resolved on; else 3.11 (Debian 12), which they were."""
    for version in ("3.12", "3.11"):
        command = [str(ROOT / "tools/find_python.sh"), version]
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.strip()
    pytest.fail(
        "wanted: Python 3.12 or 3.11 with venv, to resolve the CUDA release sets on; found: neither. "
        "Install one (apt-get install python3.12-venv or python3.11-venv, or pyenv)"
    )


def test_every_set_resolves_to_its_lock() -> None:
    """Metadata only: some 50 MB for all sets, and no wheel."""
    script = [sys.executable, str(ROOT / "tools/lock.py"), *CUDA, "--check", python()]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"^(\S+): (\d+) packages, 0 differ$", done.stdout, re.MULTILINE)
    assert [name for name, _ in told] == CUDA
    assert all(int(count) > 150 for _, count in told)
