"""A play on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# What modules of a play on this machine run by: the system's Python, which has the standard library only, as on a host.
HOST_PYTHON = shutil.which("python3", path="/usr/bin") or sys.executable


def play(
    place: Path, text: str, *options: str, stand_ins: Path | None = None, **variables: Any
) -> tuple[int, str]:
    """Run a play on this machine, programs of `stand_ins` before its own; (exit code, what it printed)."""
    (place / "play.yml").write_text(text)
    (place / "given.json").write_text(json.dumps({"ansible_python_interpreter": HOST_PYTHON, **variables}))
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", "localhost,", "-c", "local", "-e", f"@{place / 'given.json'}", *options]
    path = f"{stand_ins}:{os.environ['PATH']}" if stand_ins else os.environ["PATH"]
    done = subprocess.run(
        [*command, str(place / "play.yml")],
        cwd=ROOT,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "playbooks/callback_plugins"),  # it is not beside them
            "ANSIBLE_NOCOLOR": "1",
            "PATH": path,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
