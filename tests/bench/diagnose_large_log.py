#!/usr/bin/env python3
"""Diagnose a log of 1 GB: time and memory, with the story's crash in the middle of it.

python tests/bench/diagnose_large_log.py [FOLDER]      (needs 1 GB free there)
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZE = 1_000_000_000
LIMIT_SECONDS, LIMIT_MIB = 25.0, 100.0

DAILY = (
    "[2026-03-01 10:00:00 TP0] Decode batch, #running-req: 512, #token: 123456, token usage: 0.41, "
    "cuda graph: True, gen throughput (token/s): 3740.12, #queue-req: 0, \n"
    '[2026-03-01 10:00:00] INFO:     127.0.0.1:50814 - "POST /generate HTTP/1.1" 200 OK\n'
    "[2026-03-01 10:00:01 TP0] Prefill batch, #new-seq: 1, #new-token: 128, #cached-token: 0, "
    "token usage: 0.41, #running-req: 511, #queue-req: 3, \n"
)
# Clients' errors and aborts: every hundredth line looks bad and means nothing.
NOISE = '[2026-03-01 10:00:02] INFO:     127.0.0.1:5 - "POST /generate HTTP/1.1" 500 Internal Server Error\n'

WORKER = """
import resource, sys, time
sys.path.insert(0, sys.argv[2])
from module_utils.sm120.diagnosis import scan
from module_utils.sm120.diagnosis_catalogue import server_scanner
from module_utils.sm120.unit_log import stream_file
begun = time.monotonic()
with open(sys.argv[1], "rb") as file:
    scanner = scan(server_scanner(), stream_file(file))
cause = scanner.first_cause
print(time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
      cause.signature, cause.line_number)
"""


def write_log(path: Path, story: str) -> int:
    """Fill the file; returns the line at which the cause stands."""
    block = (DAILY * 33 + NOISE) * 100
    lines = block.count("\n")
    written = at = 0
    with path.open("w") as file:
        while written < SIZE // 2:
            file.write(block)
            written += len(block)
            at += lines
        file.write(story)
        cause = at + next(
            n for n, line in enumerate(story.splitlines(), 1) if line.startswith("RuntimeError")
        )
        while written < SIZE:
            file.write(block)
            written += len(block)
    return cause


def main() -> int:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from heading import heading
    from story import STORY

    print(heading(__file__), flush=True)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    with tempfile.NamedTemporaryFile(dir=folder, prefix="log-") as file:
        wanted = write_log(Path(file.name), STORY)
        done = subprocess.run(
            [sys.executable, "-c", WORKER, file.name, str(ROOT)], capture_output=True, text=True, check=True
        )
        seconds, mib, signature, line = done.stdout.split()
    result = {
        "seconds": round(float(seconds), 1),
        "limit_seconds": LIMIT_SECONDS,
        "mib": round(float(mib), 1),
        "limit_mib": LIMIT_MIB,
        "found": signature,
        "at_line": int(line),
        "cpu_seconds": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, 1),
    }
    print(json.dumps(result, indent=2))
    right = (signature, int(line)) == ("gate.jit_closed", wanted)
    return 0 if right and float(seconds) <= LIMIT_SECONDS and float(mib) <= LIMIT_MIB else 1


if __name__ == "__main__":
    sys.exit(main())
