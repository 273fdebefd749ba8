"""Closed-loop load from one thread: epoll, one buffer, one connection per request."""

from __future__ import annotations

import errno
import gc
import os
import resource
import select
import socket
import ssl
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .http import Address, tls_context
from .sse import Stream, StreamError

BUFFER_BYTES = 256 * 1024
# From this many streams on, one millisecond between polls lets several reads share a wake-up: a fifth of
# the CPU time, for time stamps at most that much late. Below it, every event is taken at once.
COALESCE_STREAMS = 32
COALESCE_SECONDS = 0.001
SPARE_FILES = 64


class LimitError(Exception):
    """The machine's limits do not allow this many streams; the message says what to do."""


def allow_open_files(streams: int) -> int:
    """Raise the soft limit as far as needed and return it, or refuse: lost connections would pass for
    a slow server."""
    needed = streams + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LimitError(
            f"{streams} streams need {needed} open files, this user's hard limit is {hard}. "
            f"Raise it (LimitNOFILE= of the ssh or login session, /etc/security/limits.conf: "
            f"'* hard nofile {max(needed, 4096)}') or ask for at most {max(hard - SPARE_FILES, 0)} streams."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return needed


@dataclass
class Limits:
    """When to give up: no byte from any stream for `stall_seconds`, or the whole run after
    `total_seconds`."""

    stall_seconds: float
    total_seconds: float


@dataclass
class Outcome:
    """What one closed-loop run saw."""

    streams: list[Stream] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0
    stalled_seconds: float = 0.0
    stopped: str | None = None
    cpu_seconds: float = 0.0
    lags: array[float] = field(default_factory=lambda: array("d"))

    @property
    def duration(self) -> float:
        return self.ended - self.started


class _Connection:
    __slots__ = ("handshaking", "only_reads", "out", "sock", "stream", "tls", "writing")

    def __init__(self, sock: socket.socket, out: bytes, stream: Stream, tls: bool) -> None:
        self.sock = sock
        self.out = out
        self.stream = stream
        self.tls = self.handshaking = tls
        self.writing = True
        self.only_reads = False

    def fail(self, error: Exception) -> bool:
        """This request has ended, badly."""
        self.stream.error = f"{type(error).__name__}: {error} (after {self.stream.last_count} tokens)"
        return True


def _resolve(address: Address) -> tuple[socket.AddressFamily, Any]:
    """The first address that takes a connection: localhost may be ::1 first where the server has
    127.0.0.1 only."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    for family, _kind, _protocol, _name, target in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            if probe.connect_ex(target) == 0:
                return family, target
    return found[0][0], found[0][4]


class Driver:
    """Keeps `concurrency` requests in flight until all are answered."""

    def __init__(self, address: Address, *, ca_path: str | None = None) -> None:
        self._address = address
        self._tls = tls_context(ca_path) if address.scheme == "https" else None
        self._family, self._target = _resolve(address)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)

    def run(self, requests: Iterable[bytes], concurrency: int, limits: Limits) -> Outcome:
        """Answer all of `requests`. The collector is off meanwhile: its pauses would be the server's
        latency."""
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        used = resource.getrusage(resource.RUSAGE_SELF)
        outcome = Outcome()
        try:
            with select.epoll() as poller:
                self._run(requests, concurrency, limits, poller, outcome)
        finally:
            if was_enabled:
                gc.enable()
        after = resource.getrusage(resource.RUSAGE_SELF)
        outcome.cpu_seconds = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        return outcome

    def _run(
        self,
        requests: Iterable[bytes],
        concurrency: int,
        limits: Limits,
        poller: select.epoll,
        outcome: Outcome,
    ) -> None:
        waiting = iter(requests)
        clock = time.perf_counter
        pause = COALESCE_SECONDS if concurrency >= COALESCE_STREAMS else 0.0
        live: dict[int, _Connection] = {}
        buffer, view = self._buffer, self._view

        def start_next() -> None:
            for request in waiting:
                connection = self._open(request, outcome)
                if connection is not None:
                    live[connection.sock.fileno()] = connection
                    poller.register(connection.sock, select.EPOLLIN | select.EPOLLOUT)
                    return

        outcome.started = heard = clock()
        for _ in range(concurrency):
            start_next()
        while live:
            events = poller.poll(1.0, 1 if pause else len(live))
            if pause and events:
                # The first to be ready is seldom alone: a server answers its whole batch at once.
                time.sleep(pause)
                events = poller.poll(0, len(live))
            woken = clock()
            for descriptor, mask in events:
                connection = live[descriptor]
                # Nearly every event is a token on a plain socket: no further call for it than must be.
                if mask == select.EPOLLIN and connection.only_reads:
                    try:
                        size = connection.sock.recv_into(buffer)
                        ended = size == 0 or connection.stream.feed(buffer, view, size, clock())
                    except BlockingIOError:
                        continue
                    except (OSError, StreamError) as error:
                        ended = connection.fail(error)
                else:
                    ended = self._serve(connection, mask, poller, clock)
                if ended:
                    poller.unregister(descriptor)
                    connection.sock.close()
                    del live[descriptor]
                    connection.stream.finish()
                    outcome.streams.append(connection.stream)
                    start_next()
            now = clock()
            if events:
                heard = now
                outcome.lags.append(now - woken + pause)
            if now - heard > limits.stall_seconds:
                outcome.stalled_seconds = now - heard
                outcome.stopped = f"no byte from any of {len(live)} streams for {now - heard:.0f} s"
            elif now - outcome.started > limits.total_seconds:
                outcome.stopped = f"not finished after {limits.total_seconds:.0f} s"
            if outcome.stopped:
                for connection in live.values():
                    connection.sock.close()
                    connection.stream.error = outcome.stopped
                    outcome.streams.append(connection.stream)
                live.clear()
        outcome.ended = clock()

    def _open(self, request: bytes, outcome: Outcome) -> _Connection | None:
        stream = Stream()
        plain = socket.socket(self._family, socket.SOCK_STREAM)
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.started = time.perf_counter()
        code = plain.connect_ex(self._target)
        if code not in (0, errno.EINPROGRESS):
            plain.close()
            stream.error = _connect_error(code)
            outcome.streams.append(stream)
            return None
        sock: socket.socket = plain
        if self._tls is not None:
            sock = self._tls.wrap_socket(
                plain, server_hostname=self._address.host, do_handshake_on_connect=False
            )
        return _Connection(sock, request, stream, self._tls is not None)

    def _serve(
        self,
        connection: _Connection,
        mask: int,
        poller: select.epoll,
        clock: Callable[[], float],
    ) -> bool:
        """Do what the socket is ready for. True when this request has ended, well or not."""
        try:
            if connection.handshaking and isinstance(connection.sock, ssl.SSLSocket):
                _handshake(connection, connection.sock, poller)
                return False
            if connection.writing and mask & select.EPOLLOUT:
                connection.out = connection.out[connection.sock.send(connection.out) :]
                if not connection.out:
                    connection.writing = False
                    connection.only_reads = not connection.tls
                    poller.modify(connection.sock, select.EPOLLIN)
            if mask & ~select.EPOLLOUT:  # data, an end or an error: reading tells which
                return self._receive(connection, clock)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except (OSError, StreamError) as error:
            return connection.fail(error)
        return False

    def _receive(self, connection: _Connection, clock: Callable[[], float]) -> bool:
        stream = connection.stream
        while True:
            size = connection.sock.recv_into(self._buffer)
            if size == 0:
                return True
            if stream.feed(self._buffer, self._view, size, clock()):
                return True
            # TLS may hold decrypted bytes that no poll will ever announce.
            if not isinstance(connection.sock, ssl.SSLSocket):
                return False


def _handshake(connection: _Connection, sock: ssl.SSLSocket, poller: select.epoll) -> None:
    try:
        sock.do_handshake()
    except ssl.SSLWantReadError:
        poller.modify(sock, select.EPOLLIN)
        return
    except ssl.SSLWantWriteError:
        poller.modify(sock, select.EPOLLOUT)
        return
    connection.handshaking = False
    poller.modify(sock, select.EPOLLIN | select.EPOLLOUT)


def _connect_error(code: int) -> str:
    text = os.strerror(code)
    if code == errno.EADDRNOTAVAIL:
        return (
            f"{text}: no free local port. Requests end faster than ports leave TIME_WAIT; "
            "ask for longer outputs or widen net.ipv4.ip_local_port_range"
        )
    return text
