"""Real processes under the supervisor: they end, all of them, and nobody else does."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120.probe_run import (
    Account,
    DriverSilent,
    Job,
    gpu_table,
    run_group,
    wait_memory_free,
)
from ansible.module_utils.sm120.probe_watch import Watch

pytestmark = pytest.mark.once

PROGRAM = """
import json, os, subprocess, sys, time
rank, config = int(sys.argv[1]), json.load(sys.stdin)
say = lambda **k: print(json.dumps(k), flush=True)
say(t="begin", stage="nccl")
todo = config["ranks"][rank]
print("log of", rank, file=sys.stderr)
if todo == "hang":
    child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, 0))  # as ninja starts its compilers
    say(t="beat", case=f"child {child.pid}")
    time.sleep(600)
if todo == "orphan":
    child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: os.setpgid(0, 0), stdout=subprocess.DEVNULL)
    say(t="beat", case=f"child {child.pid}")
    os._exit(9)
if todo == "crash":
    os._exit(9)
if todo == "noise":
    print("not a report", flush=True)
    time.sleep(600)
if todo == "wait":
    say(t="beat", case="waiting for the others")
    time.sleep(600)
say(t="end", stage="nccl", home=os.environ.get("HOME", ""), secret=os.environ.get("SECRET", ""))
say(t="done")
"""


def run(folder: Path, *todo: str, step_factor: float = 1.0, **limits: float) -> tuple[Watch, dict[str, Any]]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    job = Job(
        name="test",
        command=(sys.executable, "-u", str(program)),
        ranks=len(todo),
        config={"ranks": todo},
        environment={"HOME": "/given", "PATH": os.environ["PATH"]},
        account=Account.of(getpass.getuser()),
        work=folder,
        logs=folder,
        limit_seconds=60,
    )
    watch = Watch(len(todo), ("nccl",), time.monotonic(), limits, step_factor)
    return watch, run_group(job, watch, lambda text: None)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_all_ranks_end_well_with_the_given_environment_only(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the session")
    watch, found = run(tmp_path, *["good"] * ranks)
    assert not watch.failures
    assert watch.stages["nccl"].status == "passed"
    assert watch.stages["nccl"].facts == {"home": "/given", "secret": ""}
    assert found["pids_left"] == []
    assert (tmp_path / f"test-rank{ranks - 1}.log").read_text() == f"log of {ranks - 1}\n"


def test_a_hang_is_ended_with_its_children_and_nobody_else(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        try:
            watch, found = run(tmp_path, "wait", "hang", step_factor=0.05)
            first = watch.first_failure()
            assert first is not None
            assert (first.cause, first.rank) == ("hang", 1)
            child = int(watch.ranks[1].case.split()[1])
            assert not any(alive(pid) for pid in [*found["pids"], child])
            assert found["pids_left"] == []
            assert alive(bystander.pid)
        finally:
            bystander.kill()


def test_what_a_crashed_rank_left_behind_ends_too(tmp_path: Path) -> None:
    watch, _ = run(tmp_path, "orphan")
    child = int(watch.ranks[0].case.split()[1])
    assert [failure.cause for failure in watch.failures] == ["crash"]
    assert not alive(child)


def test_a_crash_ends_the_others(tmp_path: Path) -> None:
    watch, found = run(tmp_path, "wait", "crash")
    first = watch.first_failure()
    assert first is not None
    assert (first.cause, first.rank, first.stage) == ("crash", 1, "nccl")
    assert not any(alive(pid) for pid in found["pids"])
    assert found["tails"][str(tmp_path / "test-rank1.log")] == "log of 1\n"


def test_what_is_no_report_fails_loudly(tmp_path: Path) -> None:
    watch, _ = run(tmp_path, "noise")
    assert [failure.cause for failure in watch.failures] == ["crash"]


def test_nvidia_smi_is_read_as_a_table(tmp_path: Path) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\n"
        "echo '0, GPU-aaa, NVIDIA H200, 580.159.04, 12, 143771'\n"
        "echo '1, GPU-bbb, NVIDIA H200, 580.159.04, 0, 143771'\n"
    )
    fake.chmod(0o755)
    found = gpu_table({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert [(gpu["index"], gpu["uuid"], gpu["used_mib"]) for gpu in found] == [
        (0, "GPU-aaa", 12),
        (1, "GPU-bbb", 0),
    ]


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 9\n", None])
def test_no_driver_means_no_gpus(tmp_path: Path, script: str | None) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert gpu_table({"PATH": str(tmp_path)}) == []


@pytest.mark.parametrize("code", [6, 9])
def test_a_driver_that_does_not_answer_is_not_taken_for_a_host_without_gpus(
    tmp_path: Path, code: int
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho no word\nexit {code}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(DriverSilent, match=f"exit {code}: no word"):
        gpu_table({"PATH": str(tmp_path)}, must_answer=True)
    (tmp_path / "nvidia-smi").unlink()
    assert gpu_table({"PATH": str(tmp_path)}, must_answer=True) == []


def table(*used: int) -> list[dict[str, Any]]:
    return [{"index": i, "uuid": f"GPU-{i}", "used_mib": mib} for i, mib in enumerate(used)]


def test_memory_that_comes_back_is_free_and_what_stays_is_named() -> None:
    readings = iter([table(9000, 0), table(10, 0)])
    assert wait_memory_free(table(0, 0), lambda: next(readings), 30) == []
    held = wait_memory_free(table(0, 500), lambda: table(0, 900), 0)
    assert len(held) == 1
    assert "GPU-1" in held[0]
