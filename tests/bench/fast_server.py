#!/usr/bin/env python3
"""A server that streams as SGLang does (cumulative text and ids), fast enough to measure clients.

    fast_server.py --port 31100 --rate 20 [--ttft 0.02] [--own-clock] [--cpu 0]

--rate is tokens per second and stream (0: as fast as it can). With --own-clock each stream keeps its own
exact times (first token after --ttft, then one every 1/rate seconds); without, all move on one common tick.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import sys
import time
from functools import cache
from typing import Any

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
SYLLABLES = (
    "ba",
    "cu",
    "di",
    " fo",
    " ge",
    " ha",
    "ki",
    "lo",
    " mu",
    "né",
    "po",
    ' "qu"',
    "ra",
    "\n",
    " si",
    "to",
)


@cache
def rendered(tokens: int, prompt_tokens: int) -> tuple[bytes, ...]:
    """The events of an answer; made once for every shape."""
    events = []
    text = ""
    for count in range(1, tokens + 1):
        text += SYLLABLES[count % len(SYLLABLES)]
        meta: dict[str, Any] = {
            "id": "f" * 32,
            "finish_reason": {"type": "length", "length": tokens} if count == tokens else None,
            "prompt_tokens": prompt_tokens,
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        body = {"text": text, "output_ids": list(range(1000, 1000 + count)), "meta_info": meta}
        data = b"data: " + json.dumps(body).encode() + b"\n\n"
        events.append(b"%x\r\n%s\r\n" % (len(data), data))
    return tuple(events)


class Stream(asyncio.Protocol):
    """One connection: a request line, a body, and then events until all are sent."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = b""
        self.events: tuple[bytes, ...] = ()
        self.sent = 0
        self.first_at = 0.0
        self.blocked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False

    def connection_lost(self, _error: Exception | None) -> None:
        self.server.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, body = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        lines = head.decode("latin1").lower().split("\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
        if len(body) < length:
            return
        self.buffer = body[length:]
        if lines[0].split()[1] == "/generate":
            asked = json.loads(body[:length])
            self.events = rendered(asked["sampling_params"]["max_new_tokens"], len(asked["input_ids"]))
            self.sent = 0
            self.transport.write(HEAD)
            self.server.begin(self)
        else:
            answer = json.dumps(self.server.page(lines[0].split()[1])).encode()
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(answer), answer)
            )

    def send_next(self) -> bool:
        """One token; True after the last."""
        self.transport.write(self.events[self.sent])
        self.sent += 1
        self.server.tokens += 1
        if self.sent < len(self.events):
            return False
        self.transport.write(END)
        return True


class Server:
    def __init__(self, rate: float, ttft: float, own_clock: bool) -> None:
        self.rate, self.ttft, self.own_clock = rate, ttft, own_clock
        self.streams: dict[Stream, None] = {}
        self.tokens = 0
        self.work = asyncio.Event()

    def page(self, path: str) -> dict[str, Any]:
        if path == "/stats":
            used = resource.getrusage(resource.RUSAGE_SELF)
            return {"tokens": self.tokens, "cpu": used.ru_utime + used.ru_stime}
        model = {"model_path": "fake", "is_generation": True}
        return model | {"data": [{"id": "fake"}], "internal_states": [{}], "version": "0.5.9"}

    def begin(self, stream: Stream) -> None:
        now = asyncio.get_running_loop().time()
        stream.first_at = now + self.ttft
        if self.own_clock:
            asyncio.get_running_loop().call_at(stream.first_at, self.own_step, stream, stream.first_at)
        else:
            self.streams[stream] = None
            self.work.set()

    def own_step(self, stream: Stream, at: float) -> None:
        if not stream.transport.is_closing() and not stream.send_next():
            due = at + 1 / self.rate
            asyncio.get_running_loop().call_at(due, self.own_step, stream, due)

    async def tick(self) -> None:
        due = time.monotonic()
        while True:
            if not self.streams:
                self.work.clear()
                await self.work.wait()
                due = time.monotonic()
            now = time.monotonic()
            ready = [one for one in self.streams if not one.blocked and one.first_at <= now]
            for stream in ready:
                if stream.send_next():
                    self.streams.pop(stream, None)
            if self.rate <= 0:
                await asyncio.sleep(0 if ready else 0.001)
                continue
            due = max(due + 1 / self.rate, time.monotonic())
            await asyncio.sleep(due - time.monotonic())


async def run(options: argparse.Namespace) -> None:
    server = Server(options.rate, options.ttft, options.own_clock)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Stream(server), "127.0.0.1", options.port, backlog=4096)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.tick()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--ttft", type=float, default=0.02)
    parser.add_argument("--own-clock", action="store_true")
    parser.add_argument("--cpu", type=int, default=None)
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    gc.disable()
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
