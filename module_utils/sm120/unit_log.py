"""A systemd unit's state, and what its present run has logged so far."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "NRestarts",
    "InvocationID",
    "Restart",
    "ControlGroup",
    "ActiveEnterTimestampMonotonic",
)
PROGRAM_SECONDS = 20
SILENT_SECONDS = 300  # journalctl searches a large journal for as long before its first line
# ExecMainCode, as waitid() gives it.
CLD_KILLED = 2
CLD_DUMPED = 3
RESTARTS = ("always", "on-failure", "on-abnormal", "on-abort")  # of Restart=, after a death by SIGKILL
BLOCK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class UnitState:
    """`systemctl show`, as far as it matters here."""

    load: str = "not-found"
    active: str = "inactive"
    sub: str = "dead"
    result: str = ""
    main_pid: int = 0
    exit_code: int = 0
    exit_status: int = 0
    restarts: int = 0
    invocation: str = ""
    restart: str = ""
    control_group: str = ""
    active_since_seconds: float = 0.0  # of the monotonic clock; 0 for never

    @property
    def exists(self) -> bool:
        return self.load not in ("not-found", "")

    @property
    def crashed(self) -> bool:
        """Failed, or about to be started again after a failure."""
        failed = self.active == "failed" and not self.stopped_on_request
        return failed or self.sub in ("auto-restart", "auto-restart-queued")

    @property
    def stopped_on_request(self) -> bool:
        """SGLang ends a SIGTERM by SIGKILL of its own tree, which systemd calls failed. After a crash it would have
        been started again by systemd at least once, where the unit says so."""
        killed = self.exit_code == CLD_KILLED and self.exit_status == signal.SIGKILL
        return self.sub == "failed" and killed and self.restart in RESTARTS and not self.restarts

    @property
    def ending(self) -> str:
        """How the main process ended, in words."""
        if self.exit_code in (CLD_KILLED, CLD_DUMPED):
            return f"killed by signal {self.exit_status}"
        return f"exit status {self.exit_status}"

    @property
    def running(self) -> bool:
        return self.active in ("active", "reloading", "activating") and not self.crashed


def parse_show(text: str) -> UnitState:
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(name: str) -> int:
        value = values.get(name, "0")
        return int(value) if value.isdigit() else 0

    return UnitState(
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        main_pid=number("MainPID"),
        exit_code=number("ExecMainCode"),
        exit_status=number("ExecMainStatus"),
        restarts=number("NRestarts"),
        invocation=values.get("InvocationID", ""),
        restart=values.get("Restart", ""),
        control_group=values.get("ControlGroup", ""),
        active_since_seconds=number("ActiveEnterTimestampMonotonic") / 1e6,
    )


def unit_state(unit: str) -> UnitState:
    """Raises OSError or subprocess.SubprocessError where systemd cannot be asked."""
    done = subprocess.run(
        ["systemctl", "show", unit, "--property=" + ",".join(PROPERTIES)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return parse_show(done.stdout)


def journal_command(unit: str, invocation: str = "", since: str | None = None, cursor: str = "") -> list[str]:
    command = ["journalctl", "--no-pager", "--quiet", "--output=cat", "--all"]
    if cursor:
        command.append(f"--after-cursor={cursor}")
    if since:
        command.append(f"--since={since}")
    if invocation:
        # The unit's own lines, or what systemd said about this run of it.
        return [*command, f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"]
    return [*command, f"--unit={unit}"]


def stream_command(command: list[str]) -> Iterator[bytes]:
    """A program's output in blocks, never all of it in memory.

    Raises subprocess.TimeoutExpired when it has said nothing for SILENT_SECONDS.
    """
    # Without a buffer: one could hold what select() waits for.
    with subprocess.Popen(
        command, bufsize=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        if process.stdout is None:
            return
        try:
            while select.select([process.stdout], [], [], SILENT_SECONDS)[0]:
                if not (block := process.stdout.read(BLOCK_BYTES)):
                    return
                yield block
            raise subprocess.TimeoutExpired(command, SILENT_SECONDS)
        finally:
            process.kill()


def stream_file(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


CURSOR_MARK = b"-- cursor: "
CURSOR_BYTES = 4096


@dataclass
class JournalFollower:
    """What a unit's present run has logged since the last call, in blocks."""

    unit: str
    invocation: str
    cursor: str = ""

    def read(self) -> Iterator[bytes]:
        command = journal_command(self.unit, self.invocation, cursor=self.cursor)
        command.insert(1, "--show-cursor")
        held = b""
        for block in stream_command(command):
            held += block
            # The cursor comes last, after everything else: hold back what may be it.
            if len(held) > CURSOR_BYTES:
                yield held[:-CURSOR_BYTES]
                held = held[-CURSOR_BYTES:]
        text, mark, cursor = held.rpartition(CURSOR_MARK)
        if mark:
            self.cursor = cursor.decode().strip()
        yield text if mark else held


@dataclass
class FileFollower:
    """What was written to a log file since the last call; one that shrank or was replaced is read anew."""

    path: Path
    _offset: int = 0
    _inode: int = 0

    def read(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._offset = 0
                self._inode = status.st_ino
                file.seek(self._offset)
                for block in stream_file(file):
                    self._offset += len(block)
                    yield block
        except FileNotFoundError:
            return
