"""Find in a log of any size what went wrong first. The signatures are data (diagnosis_catalogue); this
is the search."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .redact import redact
from .signature import CAPTURING, CAUSE, LOADING, POOLING, SERVING, WARNING, Signature

MAX_LINE_BYTES = 16384
SHOWN_CHARACTERS = 400
TRACEBACK_LINES = 500
REMEMBERED_LINES = 4096
LAST_LINES = 60
# A client's request that ended badly says nothing about the server's health.
_ACCESS_LOG = b' HTTP/1.1" '
# Most of a large log, in two texts: batches of the scheduler, and requests that ended well.
_DAILY_PART, _DAILY_END = b" batch, #", b'" 200 OK'

_SYSLOG_PREFIX = re.compile(rb"^(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8} \S+ \S+: |\d{4}-\d\d-\d\dT\S+ \S+ \S+: )")
_FRAME = re.compile(rb'File "([^"]+)", line (\d+), in (\S+)')
# Ids, ports, times: what differs between two lines that say the same. Numbers that mean something (errno,
# exit codes, architectures) are shorter.
_COUNTERS = re.compile(rb"[0-9a-f-]{8,}|\d{4,}|\d+\.\d+")
_TRACEBACK = b"Traceback (most recent call last)"
# "module.Class: text" or a bare class name; not "INFO: ..." and not a log line in brackets.
_LAST_LINE = re.compile(rb"^(?!INFO|WARNING|ERROR|DEBUG|CRITICAL)[A-Za-z_][\w.]*(?::|\s*$)")
# A refused argument ends a run before it has logged anything else.
_START = re.compile(rb"server_args=ServerArgs\(|\.py: error: ")
# What systemd says before the program's first line.
_STARTED = re.compile(rb"^Started ")
_STAGES = (
    (b"Load weight begin", LOADING),
    (b"Load weight end", POOLING),
    (b"ready to roll", SERVING),
)
_CAPTURE = re.compile(rb"Capture .*begin")
_FATAL_TRACEBACK = re.compile(
    rb"Scheduler hit an exception|DetokenizerManager hit an exception|died|Initialization failed"
)
# Ends of a client or of an orderly stop; a traceback of these says nothing about the server.
_ORDINARY_END = re.compile(
    rb"^(?:KeyboardInterrupt|SystemExit|GeneratorExit|asyncio\.exceptions\.CancelledError|"
    rb"ConnectionResetError|BrokenPipeError|starlette\.requests\.ClientDisconnect)\b"
)


@dataclass
class Finding:
    signature: str
    role: str
    layer: str
    line: str
    line_number: int
    meaning: str
    advice: str
    fatal: bool
    source: str
    frame: str | None = None
    count: int = 1
    last_line_number: int = 0

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class _Traceback:
    begun: int
    fatal: bool
    frame: str | None = None
    lines: int = 0


@dataclass
class _Start:
    """What was found since the server was last started: an old crash must not pass for today's."""

    known: Finding | None = None
    unknown: Finding | None = None
    unknown_fatal: Finding | None = None
    fatal: Finding | None = None

    def first_cause(self, ready: bool) -> Finding | None:
        """An exception that nobody knows counts when the server did not come up or did not outlive it."""
        unknown = self.unknown_fatal or (self.unknown if self.fatal or not ready else None)
        if self.known and unknown:
            return min(self.known, unknown, key=lambda one: one.line_number)
        return self.known or unknown


@dataclass
class Scanner:
    """Feed it blocks of a log in order, then ask."""

    signatures: Sequence[Signature]
    triggers: Sequence[bytes]
    source: str = "log"
    secrets: tuple[str | None, ...] = ()
    starts: int = 0
    ready: bool = False
    findings: dict[str, Finding] = field(default_factory=dict)
    _start: _Start = field(default_factory=_Start)
    _failed_start: _Start | None = None
    _announced: bool = False
    _stage: str | None = None
    _seen: dict[tuple[str | None, bytes], Signature | None] = field(default_factory=dict)
    _tail: bytes = b""
    _line_number: int = 0
    _traceback: _Traceback | None = None

    def feed(self, data: bytes) -> None:
        data = self._tail + data
        end = data.rfind(b"\n")
        if end < 0:
            # A line without an end must not grow in memory for ever.
            self._tail = data[:MAX_LINE_BYTES] if len(data) > 4 * MAX_LINE_BYTES else data
            return
        self._tail = data[end + 1 :]
        self._block(data[: end + 1])

    def close(self) -> None:
        """The log ends here, perhaps without a newline."""
        if self._tail:
            self._block(self._tail + b"\n")
            self._tail = b""
        self._traceback = None

    @property
    def first_cause(self) -> Finding | None:
        current = self._start.first_cause(self.ready)
        under_way = not self.ready and self._start.fatal is None
        if current is None and self._failed_start is not None and under_way:
            return self._failed_start.first_cause(ready=False)
        return current

    @property
    def last_cause(self) -> Finding | None:
        """What the log ends with, when that is a cause or an exception: hardly anything was logged
        after it."""
        found = self._start.known or self._start.unknown
        near = found is not None and self._line_number - found.last_line_number <= LAST_LINES
        return found if near else None

    @property
    def fatal(self) -> Finding | None:
        """The first line since the last start that no server outlives."""
        return self._start.fatal

    def _block(self, block: bytes) -> None:
        lines = block.split(b"\n")
        lines.pop()  # nothing follows the last newline
        at = 0
        for found in self._interesting(lines):
            at = self._read_traceback(lines, at)
            if found < at:
                continue
            self._line(lines[found][:MAX_LINE_BYTES], self._line_number + found + 1)
            at = found + 1
        self._read_traceback(lines, at)
        self._line_number += len(lines)

    def _interesting(self, lines: list[bytes]) -> list[int]:
        """Which lines hold a trigger, in order. What a server logs all day is left out first, line by line; the rest is
        searched as one text, far faster than line by line."""
        rest = [
            place
            for place, line in enumerate(lines)
            if not (_DAILY_PART in line or line.endswith(_DAILY_END))
        ]
        text = b"\n".join([lines[place] for place in rest])
        begins = list(itertools.accumulate((len(lines[place]) + 1 for place in rest), initial=0))
        found: set[int] = set()
        for trigger in self.triggers:
            at = text.find(trigger)
            while at >= 0:
                nth = bisect.bisect_right(begins, at) - 1
                found.add(rest[nth])
                at = text.find(trigger, begins[nth + 1])
        return sorted(found)

    def _read_traceback(self, lines: list[bytes], at: int) -> int:
        """While a traceback is open, every line counts, with or without a trigger."""
        while self._traceback and at < len(lines):
            self._traceback_line(lines[at][:MAX_LINE_BYTES], self._line_number + at + 1)
            at += 1
        return at

    def _traceback_line(self, line: bytes, number: int) -> None:
        current = self._traceback
        if current is None:
            return
        current.lines += 1
        if current.lines > TRACEBACK_LINES or _TRACEBACK in line:
            # Too long to be one, or another process's that begins in the middle of it.
            self._traceback = None
            self._line(line, number)
            return
        bare = _SYSLOG_PREFIX.sub(b"", line)
        frame = _FRAME.search(bare)
        if frame:
            path, at, name = (part.decode("utf-8", "replace") for part in frame.groups())
            current.frame = f"{path}:{at} in {name}"
        elif current.frame is not None and _LAST_LINE.match(bare):
            self._traceback = None
            if not self._match(line, number, current.frame) and not _ORDINARY_END.match(bare):
                self._unknown(bare, number, current)
        elif bare[:1] not in (b" ", b"\t", b""):
            self._match(line, number, None)

    def _line(self, line: bytes, number: int) -> None:
        announced = _STARTED.search(_SYSLOG_PREFIX.sub(b"", line)) is not None
        if announced or _START.search(line):
            # The announcement and the program's own first line are one start.
            if not self._announced:
                self._begin()
            self._announced = announced
        self._note_stage(line)
        self._match(line, number, None)
        if _TRACEBACK in line:
            self._traceback = _Traceback(number, bool(_FATAL_TRACEBACK.search(line)))

    def _note_stage(self, line: bytes) -> None:
        for mark, stage in _STAGES:
            if mark in line:
                self._stage = stage
        if _CAPTURE.search(line):
            self._stage = CAPTURING
        if self._stage == SERVING:
            self.ready = True

    def _begin(self) -> None:
        if self._start.first_cause(self.ready) is not None:
            self._failed_start = self._start
        self._start = _Start()
        self.starts += 1
        self.ready = False
        self._stage = None

    def _known(self, bare: bytes) -> Signature | None:
        """The signature of a line; what was looked up once is remembered, but for numbers that only count."""
        text = bare[bare.find(b"] ") + 1 :] if bare[:1] == b"[" else bare
        key = (self._stage, _COUNTERS.sub(b"#", text))
        if key not in self._seen:
            if len(self._seen) >= REMEMBERED_LINES:
                self._seen.clear()
            self._seen[key] = next((one for one in self.signatures if one.matches(bare, self._stage)), None)
        return self._seen[key]

    def _match(self, line: bytes, number: int, frame: str | None) -> bool:
        bare = _SYSLOG_PREFIX.sub(b"", line)
        if _ACCESS_LOG in bare:
            return False
        signature = self._known(bare)
        if signature is None:
            return False
        self._record(
            Finding(
                signature=signature.name,
                role=signature.role,
                layer=signature.layer,
                line=self._shown(line),
                line_number=number,
                meaning=signature.meaning,
                advice=signature.advice,
                fatal=signature.fatal,
                source=self.source,
                frame=frame,
            )
        )
        return True

    def _unknown(self, line: bytes, number: int, traceback: _Traceback) -> None:
        finding = Finding(
            signature=f"unknown:{line.split(b':', 1)[0].decode('utf-8', 'replace')[:60]}",
            role=CAUSE if traceback.fatal else WARNING,
            layer="unknown",
            line=self._shown(line),
            line_number=number,
            meaning="An exception that the catalogue does not know.",
            advice=f"Read the log from line {traceback.begun} on; the last frame is {traceback.frame}.",
            fatal=False,
            source=self.source,
            frame=traceback.frame,
        )
        if traceback.fatal:
            self._start.unknown_fatal = self._start.unknown_fatal or finding
        self._start.unknown = self._start.unknown or finding
        self._keep(finding)

    def _record(self, finding: Finding) -> None:
        if finding.role == CAUSE:
            self._start.known = self._start.known or finding
        if finding.fatal:
            self._start.fatal = self._start.fatal or finding
        self._keep(finding)

    def _keep(self, finding: Finding) -> None:
        finding.last_line_number = finding.line_number
        seen = self.findings.get(finding.signature)
        if seen is None:
            if len(self.findings) < 500:
                self.findings[finding.signature] = finding
            return
        seen.count += 1
        seen.last_line_number = finding.line_number

    def _shown(self, line: bytes) -> str:
        text = redact(line.decode("utf-8", "replace").strip(), self.secrets)
        return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def scan(scanner: Scanner, blocks: Iterable[bytes]) -> Scanner:
    """A whole log, block by block."""
    for block in blocks:
        scanner.feed(block)
    scanner.close()
    return scanner


def first_cause(scanners: Iterable[Scanner]) -> Finding | None:
    """Over several logs: a fault that the kernel saw explains what the server saw; otherwise the
    server's own."""
    causes = [cause for scanner in scanners if (cause := scanner.first_cause)]
    hardware = [cause for cause in causes if cause.source == "kernel" and cause.fatal]
    return hardware[0] if hardware else (causes[0] if causes else None)
