"""The cheap signs of a server's life: unit, processes, log. Looked at every second while slower
questions wait."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .diagnosis import Finding
from .diagnosis_catalogue import server_scanner
from .http import Address
from .listeners import Holder, listener_pid, stranger
from .processes import Process, dead_children, stopped_children, writers_of
from .unit_log import FileFollower, JournalFollower, UnitState, unit_state

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
FRESH_LOG_SECONDS = 120
QUIET_LOG_SECONDS = 5
WORK_LINES = (b"Decode batch", b"Prefill batch")


@dataclass
class Signs:
    """One look."""

    unit: UnitState | None = None
    pid: int | None = None
    dead: list[Process] = field(default_factory=list)
    stopped: list[Process] = field(default_factory=list)
    restarted: bool = False
    ended: str | None = None

    def evidence(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.unit is not None:
            found["unit"] = {
                "active": self.unit.active,
                "sub": self.unit.sub,
                "result": self.unit.result,
                "exit_code": self.unit.exit_code,
                "exit_status": self.unit.exit_status,
                "main_pid": self.unit.main_pid,
                "restarts": self.unit.restarts,
            }
        if self.pid:
            found["process"] = {
                "pid": self.pid,
                "dead_children": [f"{p.name} (pid {p.pid})" for p in self.dead],
                "stopped_children": [f"{p.name} (pid {p.pid})" for p in self.stopped],
            }
        return found


class Watch:
    """Looks at one server again and again. The log is read only when asked for: a healthy server's may
    be large."""

    def __init__(
        self, address: Address, unit: str | None, log: Path | None, secrets: tuple[str | None, ...]
    ) -> None:
        self._address = address
        self._unit = unit
        self._log = log
        self._secrets = secrets
        self._follower: JournalFollower | FileFollower | None = FileFollower(log) if log else None
        self._invocation = ""
        self._alive: set[int] = set()
        self.scanner = server_scanner(secrets)
        self.work_lines = 0
        self.log_read = False
        self._fatal_before: Finding | None = None

    def look(self) -> Signs:
        signs = Signs()
        if self._unit:
            signs.unit = unit_state(self._unit)
            signs.pid = signs.unit.main_pid or None
            signs.restarted = self._note_invocation(signs.unit.invocation)
        elif self._address.host in LOCAL_HOSTS:
            signs.pid = listener_pid(self._address.port)
            signs.ended = self._note_processes(signs.pid)
        if signs.pid:
            signs.dead = dead_children(signs.pid)
            signs.stopped = stopped_children(signs.pid)
        return signs

    def active_seconds(self, clock: Callable[[], float]) -> float:
        """For how long the unit is active, by the monotonic clock; 0 without one."""
        unit = unit_state(self._unit) if self._unit else None
        return (
            clock() - unit.active_since_seconds
            if unit and unit.active_since_seconds and unit.running
            else 0.0
        )

    def stranger(self) -> Holder | None:
        """Who answers in place of the unit's server; None where it is that server, or where it cannot be told."""
        if not self._unit:
            return None
        unit = unit_state(self._unit)  # as it is now: it may have been started anew
        return stranger(self._address.host, self._address.port, unit.main_pid, unit.control_group)

    def _note_processes(self, listener: int | None) -> str | None:
        """Without a unit: what tells that the server ended, which may have left no word. Its processes are the one that
        listens and those that write its log."""
        writers = writers_of(self._log) if self._log else set()
        now = writers | ({listener} if listener else set())
        if now:
            self._alive = now
            return None
        if self._alive:
            gone = ", ".join(map(str, sorted(self._alive)))
            return f"the server's process ended (pid {gone})"
        # Only root sees every process, and so that there is none.
        quiet = QUIET_LOG_SECONDS < self._log_age_seconds() < FRESH_LOG_SECONDS
        if self._log and quiet and os.geteuid() == 0:
            return f"no process writes {self._log} any more"
        return None

    def _note_invocation(self, invocation: str) -> bool:
        """True when the unit was started anew since the first look: what ran before has ended."""
        if not invocation:
            return False
        if not self._invocation:
            self._invocation = invocation
            if self._follower is None and self._unit:
                self._follower = JournalFollower(self._unit, invocation)
        return invocation != self._invocation

    def read_log(self) -> None:
        """Take in what was logged since the last call."""
        if self._follower is None:
            return
        first, self.log_read = not self.log_read, True
        try:
            for block in self._follower.read():
                self.work_lines += sum(block.count(line) for line in WORK_LINES)
                self.scanner.feed(block)
        except (OSError, subprocess.SubprocessError):
            # No journal here, or not ours to read: the other signs must do.
            self._follower = None
        if first:
            self._fatal_before = self.scanner.fatal

    def log_is_fresh(self) -> bool:
        """A log file that was written to lately belongs to a server on its way."""
        return self._log_age_seconds() < FRESH_LOG_SECONDS

    def last_word(self) -> Finding | None:
        """A fatal line that came while we watched, or the exception that a log file ended with, once nothing has been
        written after it for a while."""
        if self.scanner.fatal is not None and self.scanner.fatal is not self._fatal_before:
            return self.scanner.fatal
        return self.scanner.last_cause if self._log_age_seconds() > QUIET_LOG_SECONDS else None

    def _log_age_seconds(self) -> float:
        try:
            return time.time() - self._log.stat().st_mtime if self._log else math.inf
        except OSError:
            return math.inf

    def log_evidence(self) -> dict[str, Any]:
        fatal = self.scanner.fatal
        return {
            "read": self.log_read,
            "starts": self.scanner.starts,
            "ready": self.scanner.ready,
            "fatal_line": fatal.line if fatal else None,
        }

    def diagnosis(self) -> dict[str, Any] | None:
        """The first cause in the log, as the answer shows it."""
        cause = self.scanner.first_cause
        return cause.as_dict() if cause else None
