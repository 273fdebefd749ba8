"""Run our client and sglang.bench_serving with the same task, each in a process of its own, and read
their figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

OURS = """
import json, os, sys
task = json.loads(sys.argv[1])
if task["cpu"] is not None: os.sched_setaffinity(0, {task["cpu"]})
sys.path.insert(0, task["root"])
from module_utils.sm120.http import Client
from module_utils.sm120.ladder import Ladder
from module_utils.sm120.load import allow_open_files
from module_utils.sm120.throughput import Spec
allow_open_files(task["streams"])
spec = Spec(api="generate", concurrency=(task["streams"],), requests_per_stream=task["requests_per_stream"],
            input_tokens=task["input_tokens"], output_tokens=task["output_tokens"], repeats=1,
            warmup_requests=task["warmup"], seed=task["seed"], vocab_size=task["vocab"], goodput={},
            stall_seconds=120.0, timeout_seconds=600.0)
print(json.dumps(Ladder(Client(task["url"]), spec, ca_path=None, sample_gpus=False).rung(task["streams"])))
"""

# bench_serving has no figure of its own cost: note the process's CPU time where its own clock starts and
# stops.
PEER = """
import json, os, resource, sys
task = json.loads(sys.argv[1])
if task["cpu"] is not None: os.sched_setaffinity(0, {task["cpu"]})
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, task["streams"] + 256), hard), hard))
source = open(task["program"]).read()
begin = "    benchmark_start_time = time.perf_counter()\\n"
end = "    benchmark_duration = time.perf_counter()"
assert source.count(begin) == 1 and source.count(end) == 1, "another bench_serving than this knows"
source = source.replace(begin, begin + "    _note_cpu('begin')\\n")
source = source.replace(end, "    _note_cpu('end')\\n" + end)
noted = {}
def note(name):
    used = resource.getrusage(resource.RUSAGE_SELF)
    noted[name] = used.ru_utime + used.ru_stime
sys.argv = ["bench_serving.py", *task["arguments"]]
names = {"__name__": "__main__", "__file__": task["program"], "_note_cpu": note}
exec(compile(source, task["program"], "exec"), names)
print("CPU", noted["end"] - noted["begin"])
"""


@dataclass(frozen=True)
class Task:
    """The same work for both."""

    url: str
    streams: int
    requests_per_stream: int
    input_tokens: int
    output_tokens: int
    vocab: int = 2048
    warmup: int = 2
    seed: int = 1
    cpu: int | None = None

    @property
    def requests(self) -> int:
        return self.streams * self.requests_per_stream


@dataclass(frozen=True)
class Peer:
    """Where bench_serving 0.5.9 lies: a python with its requirements, its file, and a model folder
    with a tokenizer."""

    python: str
    program: str
    model: str

    def python_version(self) -> str:
        command = [self.python, "-c", "import platform; print(platform.python_version())"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_ours(task: Task) -> dict[str, float]:
    given = vars(task) | {"root": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", OURS, json.dumps(given)], capture_output=True, text=True, check=True
    )
    rung: dict[str, Any] = json.loads(done.stdout)
    return {
        "output_tokens": rung["output_tokens"],
        "output_tok_s": rung["output_tokens_per_second"],
        "ttft_ms": rung["ttft_ms"]["mean"],
        "tpot_ms": rung["tpot_ms"]["mean"],
        "itl_p99_ms": rung["itl_ms"]["p99"],
        "cpu_seconds": rung["client"]["cpu_seconds"],
        "valid": rung["valid"],
    }


def run_peer(task: Task, peer: Peer) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.jsonl"
        arguments = [
            *(
                "--backend",
                "sglang",
                "--base-url",
                task.url,
                "--model",
                peer.model,
                "--tokenizer",
                peer.model,
            ),
            *("--dataset-name", "random-ids", "--random-input-len", str(task.input_tokens)),
            *(
                "--random-output-len",
                str(task.output_tokens),
                "--random-range-ratio",
                "1.0",
                "--tokenize-prompt",
            ),
            *("--num-prompts", str(task.requests), "--max-concurrency", str(task.streams)),
            *("--warmup-requests", str(task.warmup), "--seed", str(task.seed), "--output-file", str(result)),
            "--disable-tqdm",
        ]
        given = {"program": peer.program, "arguments": arguments, "cpu": task.cpu, "streams": task.streams}
        quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [peer.python, "-c", PEER, json.dumps(given)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | quiet,
        )
        if done.returncode or not result.exists():
            sys.exit(f"bench_serving failed:\n{done.stderr[-2000:]}")
        figures = json.loads(result.read_text().splitlines()[-1])
    cpu = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("CPU "))
    return {
        "output_tokens": figures["total_output_tokens"],
        "output_tok_s": figures["output_throughput"],
        "ttft_ms": figures["mean_ttft_ms"],
        "tpot_ms": figures["mean_tpot_ms"],
        "itl_p99_ms": figures["p99_itl_ms"],
        "cpu_seconds": float(cpu.split()[1]),
    }
