"""What a table of figures must say about itself: when, on what, beside what else."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def heading(program: str, **facts: object) -> str:
    """One block of text above a table. The load is of the last minute, before anything was measured."""
    lines = [
        f"{Path(program).name}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
        f"{os.cpu_count()} cores of {processor()}, Linux {platform.release()}, Python {platform.python_version()}",
        f"load before it began: {os.getloadavg()[0]:.2f}",
        *(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items()),
    ]
    return "\n".join(lines) + "\n"
