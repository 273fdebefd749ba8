"""What any process on this machine, and so in its containers too, could be seen to hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def watched_processes(*secrets: str, where: tuple[str, ...] = ("cmdline",)) -> Iterator[set[str]]:
    """Texts of /proc/PID/`where` that held one of the secrets meanwhile."""
    caught: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            for path in (process / name for process in Path("/proc").glob("[0-9]*") for name in where):
                try:
                    text = path.read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if any(secret in text for secret in secrets):
                    caught.add(text)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield caught
    finally:
        done.set()
        thread.join()
