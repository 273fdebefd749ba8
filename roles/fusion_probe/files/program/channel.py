"""What a probe process tells its supervisor: one JSON object a line, on the stdout it was started with."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from typing import Any


class Channel:
    def __init__(self) -> None:
        # torch, FlashInfer and nvcc print on stdout: they get stderr (the log), the reports keep the pipe.
        self._pipe = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self.stage = "start"

    def send(self, kind: str, **values: Any) -> None:
        with self._lock:
            self._pipe.write(json.dumps({"t": kind, "stage": self.stage, **values}) + "\n")
            self._pipe.flush()

    def begin(self, stage: str) -> None:
        self.stage = stage
        self.send("begin")

    def end(self, **values: Any) -> None:
        self.send("end", **values)

    def beat(self, case: str) -> None:
        """Word before each step that may hang, so that a hang has a name."""
        self.send("beat", case=case)

    def fail(self, cause: str, text: str, **values: Any) -> None:
        self.send("fail", cause=cause, text=text, **values)


def die_with_parent() -> None:
    """A probe whose supervisor is gone must not spin on the GPUs for ever."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent or parent == 1:
        os._exit(70)


def read_config() -> dict[str, Any]:
    config: dict[str, Any] = json.load(sys.stdin)
    return config


def beat_while(channel: Channel, describe: Any, every_seconds: float = 10.0) -> Any:
    """Heartbeats from a thread while a long call runs; returns a function that ends them."""
    stop = threading.Event()

    def run() -> None:
        began = time.monotonic()
        while not stop.wait(every_seconds):
            channel.beat(f"{describe()}, {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end
