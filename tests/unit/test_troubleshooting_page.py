"""docs/troubleshooting.md is made from the diagnosis catalogue."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_catalogue_says() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_troubleshooting.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert made.stdout.count("\n### ") > 90
