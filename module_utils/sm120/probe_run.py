"""Start the probe's processes as the service user, listen, end all of them, see memory free."""

from __future__ import annotations

import json
import os
import pwd
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .probe_watch import Failure, Watch

POLL_SECONDS = 0.25
END_SECONDS = 20.0
MEMORY_WAIT_SECONDS = 45.0
MEMORY_SLACK_MIB = 64  # what a driver may keep for itself
LOG_TAIL_BYTES = 3000


@dataclass(frozen=True)
class Account:
    """The user that runs the server, and so the probe."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    @classmethod
    def of(cls, name: str) -> Account:
        entry = pwd.getpwnam(name)
        groups = tuple(os.getgrouplist(name, entry.pw_gid))
        return cls(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)

    def process_options(self) -> dict[str, Any]:
        if os.geteuid() == self.uid:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": list(self.groups)}


@dataclass(frozen=True)
class Job:
    """`command RANK` for each rank, with the config on its stdin."""

    name: str
    command: tuple[str, ...]
    ranks: int
    config: Mapping[str, Any]
    environment: Mapping[str, str]
    account: Account
    work: Path  # working folder, writable by the account
    logs: Path  # not writable by the account: this process opens the logs
    limit_seconds: float


@dataclass
class Process:
    rank: int
    popen: subprocess.Popen[bytes]
    reports: IO[bytes]
    pending: bytes = b""
    closed: bool = False
    told: bool = False


def run_group(job: Job, watch: Watch, announce: Callable[[str], None]) -> dict[str, Any]:
    """Run a job until all ranks are done or one failed. Returns pids, logs and leftovers."""
    logs = [job.logs / f"{job.name}-rank{rank}.log" for rank in range(job.ranks)]
    processes: list[Process] = []
    selector = selectors.DefaultSelector()
    try:
        for rank in range(job.ranks):
            processes.append(_start(job, rank, logs[rank]))
            selector.register(processes[-1].reports, selectors.EVENT_READ, processes[-1])
        while True:
            for key, _events in selector.select(POLL_SECONDS):
                _listen(key.data, selector, watch)
            now = time.monotonic()
            _reap(processes, watch, now)
            watch.check(now, job.limit_seconds)
            while watch.news:
                announce(watch.news.pop(0))
            if watch.over(now):
                break
    finally:
        left = end_processes(processes)
        selector.close()
    return {
        "name": job.name,
        "pids": [process.popen.pid for process in processes],
        "pids_left": left,
        "logs": [str(log) for log in logs],
        "tails": {str(log): tail(log) for log in logs} if watch.failures else {},
    }


def _start(job: Job, rank: int, log: Path) -> Process:
    reports, write_end = os.pipe()
    try:
        with log.open("wb") as sink, tempfile.TemporaryFile() as config:
            config.write(json.dumps(job.config).encode())
            config.seek(0)
            popen = subprocess.Popen(
                [*job.command, str(rank)],
                stdin=config,
                stdout=write_end,
                stderr=sink,
                cwd=job.work,
                env=dict(job.environment),
                start_new_session=True,  # its pid names the session that ninja and nvcc stay in
                **job.account.process_options(),
            )
    except BaseException:
        os.close(reports)
        raise
    finally:
        os.close(write_end)
    os.set_blocking(reports, False)
    return Process(rank, popen, os.fdopen(reports, "rb", buffering=0))


def _listen(process: Process, selector: selectors.BaseSelector, watch: Watch) -> None:
    chunk = process.reports.read(1 << 16)
    now = time.monotonic()
    if not chunk:
        if chunk is not None:
            selector.unregister(process.reports)
            process.closed = True
        return
    *lines, process.pending = (process.pending + chunk).split(b"\n")
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            watch.feed(process.rank, message, now)
        else:
            text = f"rank {process.rank} wrote something else than a report: {line[:200]!r}"
            watch.fail(Failure(watch.ranks[process.rank].stage, "crash", text, process.rank), now)


def _reap(processes: Sequence[Process], watch: Watch, now: float) -> None:
    for process in processes:
        if process.closed and not process.told:
            code = exit_code(process.popen.pid)
            if code is not None:
                process.told = True
                watch.exited(process.rank, code, now)


def exit_code(pid: int) -> int | None:
    """How a child ended, leaving it unreaped: its pid names its session until everything in there is gone."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def session_members(session: int) -> list[int]:
    """Living processes of a session, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, _parent, _group, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it ended meanwhile
        if int(sid) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


def end_processes(processes: Sequence[Process]) -> list[int]:
    """SIGKILL to all that our children started; returns the pids that did not go away.

    A rank that spins in a kernel takes no other signal. The session is what holds them together: ninja gives each
    compiler a process group of its own. Leaders are unreaped until then, so their numbers are still theirs.
    """
    end = time.monotonic() + END_SECONDS
    while True:
        living = [pid for process in processes for pid in session_members(process.popen.pid)]
        if not living or time.monotonic() > end:
            break
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    for process in processes:
        if process.popen.pid not in living:
            process.popen.wait()
        process.reports.close()
    return living


def tail(path: Path) -> str:
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - LOG_TAIL_BYTES))
        return log.read().decode("utf-8", "replace")


class DriverSilent(Exception):
    """nvidia-smi is there and does not tell the GPUs; the message is what it says instead."""


def gpu_table(environment: Mapping[str, str], *, must_answer: bool = False) -> list[dict[str, Any]]:
    """What nvidia-smi says of each GPU; empty where it is not there, or has no answer and need not have one."""
    fields = "index,uuid,name,driver_version,memory.used,memory.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env=dict(environment)
        )
        silence = f"exit {done.returncode}: {(done.stdout + done.stderr).strip()}" if done.returncode else ""
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        silence = "no answer in 60 s"
    if silence and must_answer:
        raise DriverSilent(silence)
    if silence:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [
        {
            "index": int(row[0]),
            "uuid": row[1],
            "name": row[2],
            "driver": row[3],
            "used_mib": int(row[4]),
            "total_mib": int(row[5]),
        }
        for row in rows
        if len(row) == 6
    ]


def wait_memory_free(
    before: Sequence[Mapping[str, Any]], read: Callable[[], list[dict[str, Any]]], wait_seconds: float
) -> list[str]:
    """GPUs that still hold more than before the probe, after waiting; empty when all is free again."""
    limit = {gpu["uuid"]: int(gpu["used_mib"]) + MEMORY_SLACK_MIB for gpu in before}
    end = time.monotonic() + wait_seconds
    while True:
        held = [
            f"GPU {gpu['index']} ({gpu['uuid']}): {gpu['used_mib']} MiB used, "
            f"wanted {limit[gpu['uuid']]} at most"
            for gpu in read()
            if gpu["uuid"] in limit and int(gpu["used_mib"]) > limit[gpu["uuid"]]
        ]
        if not held or time.monotonic() > end:
            return held
        time.sleep(1)
