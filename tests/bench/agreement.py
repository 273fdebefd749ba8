#!/usr/bin/env python3
"""Do we say what sglang.bench_serving 0.5.9 says? Interleaved pairs, the same work for both.

Against a server with fixed delays (the default), within two per cent:
    agreement.py --peer-python VENV/bin/python --peer-program .../sglang/bench_serving.py --model FOLDER
Against a real server, where the 95 % bootstrap interval of the median ratio must overlap 0.95 to 1.05:
    agreement.py ... --url http://127.0.0.1:30000 --pairs 9 --streams 1 8 32
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median

from client_cost import fast_server
from clients import Peer, Task, run_ours, run_peer
from heading import heading

FIGURES = ("output_tok_s", "ttft_ms", "tpot_ms")
EXACT_SHARE = 0.02
LOW, HIGH = 0.95, 1.05
FIXED_RATE, FIXED_TTFT = 50.0, 0.5


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median of paired ratios."""
    rng = random.Random(0)  # noqa: S311 - the same pairs must give the same interval
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return medians[100], medians[-101]


def served_by(url: str) -> str:
    """What the server says it is."""
    with urllib.request.urlopen(f"{url}/server_info") as page:  # noqa: S310 - the operator's own address
        info = json.load(page)
    return f"SGLang {info['version']} on {info['device']}, {info['model_path']}"


@contextmanager
def given_or_fixed(url: str | None, port: int) -> Iterator[str]:
    if url:
        yield url
        return
    with fast_server(port, FIXED_RATE, "--own-clock", "--ttft", str(FIXED_TTFT), cpu=None) as fixed:
        yield fixed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url")
    parser.add_argument("--port", type=int, default=31101)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=0, help="requests per stream (default: by streams)")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=128)
    options = parser.parse_args()
    peer = Peer(options.peer_python, options.peer_program, options.model)
    good = True
    server = (
        options.url
        or f"fixed delays: first token after {FIXED_TTFT} s, then {FIXED_RATE:.0f} tokens a second"
    )
    print(
        heading(
            __file__,
            peer=f"sglang.bench_serving 0.5.9, Python {peer.python_version()}",
            server=served_by(options.url) if options.url else server,
            work=f"{options.input_tokens} tokens in, {options.output_tokens} out, {options.pairs} pairs, interleaved",
            wanted="95 % bootstrap interval of the median ratio overlaps 0.95 to 1.05"
            if options.url
            else f"median ratio within {EXACT_SHARE:.0%}",
        )
    )
    print(
        f"{'streams':>7} {'figure':<14} {'ours':>9} {'peer':>9} {'ratio':>6} {'interval':<16} agrees  token totals"
    )
    with given_or_fixed(options.url, options.port) as url:
        for streams in options.streams:
            per_stream = options.requests or max(2, 16 // streams)
            pairs: list[tuple[dict[str, float], dict[str, float]]] = []
            for pair in range(options.pairs):
                # Fresh prompts for every run: a repeated prompt would come from the server's cache.
                seeds = 1000 * streams + 2 * pair
                one = Task(url, streams, per_stream, options.input_tokens, options.output_tokens, seed=seeds)
                other = replace(one, seed=seeds + 1)
                # A-B, B-A, ...: what drifts meanwhile hits both sides alike.
                runs = [
                    partial(run_ours, one),
                    partial(run_peer, other, peer),
                ]
                first = pair % 2
                answers = {first: runs[first](), 1 - first: runs[1 - first]()}
                pairs.append((answers[0], answers[1]))
            wanted = streams * per_stream * options.output_tokens
            totals = all(one["output_tokens"] == wanted for both in pairs for one in both)
            valid = all(ours["valid"] for ours, _ in pairs)
            good = good and totals and valid
            for figure in FIGURES:
                ratios = [ours[figure] / theirs[figure] for ours, theirs in pairs]
                low, high = interval(ratios)
                middle = median(ratios)
                agrees = low <= HIGH and high >= LOW if options.url else abs(middle - 1) <= EXACT_SHARE
                good = good and agrees
                print(
                    f"{streams:7d} {figure:<14} {median(ours[figure] for ours, _ in pairs):9.2f} "
                    f"{median(theirs[figure] for _, theirs in pairs):9.2f} {middle:6.3f} "
                    f"{f'{low:.3f} to {high:.3f}':<16} {'yes' if agrees else 'NO':<7} "
                    f"{'equal' if totals else 'DIFFER'} ({wanted}){'' if valid else ', ours INVALID'}",
                    flush=True,
                )
    print(f"agrees: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
