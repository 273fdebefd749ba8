"""A play on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def play(place: Path, text: str, *options: str, **variables: Any) -> tuple[int, str]:
    """Run a play on this machine; (exit code, what it printed)."""
    (place / "play.yml").write_text(text)
    (place / "given.json").write_text(json.dumps({"ansible_python_interpreter": sys.executable, **variables}))
    program = Path(sys.executable).with_name("ansible-playbook")
    command = [str(program), "-i", "localhost,", "-c", "local", "-e", f"@{place / 'given.json'}", *options]
    done = subprocess.run(
        [*command, str(place / "play.yml")],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
