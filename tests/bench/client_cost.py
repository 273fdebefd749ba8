#!/usr/bin/env python3
"""What a measurement costs the client: CPU per 1,000 tokens, ours against sglang.bench_serving 0.5.9.

Server on one core, client on another, the same work for both, both runs in one sitting and in turn, three times.

    client_cost.py --peer-python VENV/bin/python --peer-program .../sglang/bench_serving.py --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from clients import Peer, Task, run_ours, run_peer
from heading import heading

HERE = Path(__file__).resolve().parent
WANTED_RATIO = 0.25
RATE = 20.0
HELD_SHARE = 0.9
REPEATS = 3  # in turn; medians are told


@contextmanager
def fast_server(port: int, rate: float, *options: str, cpu: int | None = 0) -> Iterator[str]:
    command = [
        sys.executable,
        str(HERE / "fast_server.py"),
        "--port",
        str(port),
        "--rate",
        str(rate),
        *options,
    ]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            if server.stdout is None or "ready" not in server.stdout.readline():
                sys.exit("the fast server did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=31100)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    options = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        sys.exit("wanted two cores, one for the server and one for the client")
    peer = Peer(options.peer_python, options.peer_program, options.model)
    good = True
    print(heading(__file__, peer=f"sglang.bench_serving 0.5.9, Python {peer.python_version()}"))
    print(
        "streams rate | CPU ms per 1,000 tokens: ours peer ratio | tok/s: ours peer | ITL p99 ms: ours peer"
    )
    for rate in (RATE, 0.0):
        for streams in options.streams:
            per_stream = max(1, 256 // streams)
            with fast_server(options.port, rate) as url:
                task = Task(url, streams, per_stream, 32, 128, cpu=1)
                turns = []
                for _ in range(REPEATS):
                    theirs = run_peer(task, peer)
                    time.sleep(1)
                    turns.append((run_ours(task), theirs))
            wanted = task.requests * task.output_tokens
            # At full speed the client is the bottleneck, and rightly says so.
            exact = all(ours["output_tokens"] == wanted and (ours["valid"] or not rate) for ours, _ in turns)
            ours, theirs = (
                {name: median(one[name] for one in side) for name in side[0]}
                for side in zip(*turns, strict=True)
            )
            cost = [1e6 * one["cpu_seconds"] / wanted for one in (ours, theirs)]
            ratio = cost[0] / cost[1]
            # On a busy machine tokens pile up and come in lumps: cheaper to read, and no measure of anything.
            held = (
                not rate or min(one["output_tok_s"] for one in (ours, theirs)) >= HELD_SHARE * rate * streams
            )
            print(
                f"{streams:7d} {rate or 'max':>4} | {cost[0]:.1f} {cost[1]:.1f} {ratio:.2f} | "
                f"{ours['output_tok_s']:.0f} {theirs['output_tok_s']:.0f} | "
                f"{ours['itl_p99_ms']:.1f} {theirs['itl_p99_ms']:.1f} | exact {exact}"
                + ("" if held else " | the machine was too busy to hold the rate: not comparable"),
                flush=True,
            )
            if rate:
                good = good and exact and held and ratio <= WANTED_RATIO
    print(json.dumps({"wanted_ratio": WANTED_RATIO, "reached": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
