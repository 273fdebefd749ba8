"""A real SGLang on the CPU, started anew for every fault."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SETTINGS = ("SGLANG_TEST_PYTHON", "SGLANG_TEST_MODEL")
# FlashInfer asserts it on import, GPU or not; the profile cpu of sglang_server preloads it too.
LIBCUDART = "lib/python3*/site-packages/nvidia/cu13/lib/libcudart.so.13"
BASE = (
    *("--load-format", "dummy", "--device", "cpu", "--host", "127.0.0.1", "--max-total-tokens", "65536"),
    *("--max-running-requests", "64", "--random-seed", "1", "--grammar-backend", "none", "--enable-metrics"),
)


class Server:
    """One server process with its log; its children die with its group."""

    def __init__(self, log: Path, port: int, model: str, *arguments: str) -> None:
        self.log, self.port = log, port
        self.url = f"http://127.0.0.1:{port}"
        venv = Path(os.environ["SGLANG_TEST_PYTHON"]).parent.parent
        environment = os.environ | {
            "PYTHONPATH": os.environ.get("SGLANG_TEST_PYTHONPATH", ""),
            "LD_PRELOAD": " ".join(map(str, venv.glob(LIBCUDART))),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [os.environ["SGLANG_TEST_PYTHON"], "-m", "sglang.launch_server", "--model-path", model]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*command, "--port", str(port), *BASE, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def child(self, name: str) -> int:
        """The process id of a child by the beginning of its name, as /proc shows it."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                text = (entry / "stat").read_text()
                parent = int(text[text.rfind(")") + 2 :].split()[1])
                if parent == self.process.pid and text[text.find("(") + 1 :].startswith(name):
                    return int(entry.name)
        raise LookupError(name)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


def free_port() -> int:
    """Not any free port: SGLang derives others from it, up to ten thousand higher."""
    for port in range(21000 + os.getpid() % 10000, 50000):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise LookupError("no free port from 21000 to 50000")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    missing = [name for name in SETTINGS if not os.environ.get(name)]
    if missing:
        pytest.skip(
            f"needs a real SGLang: set {', '.join(missing)} (tests/integration/real_server/README.md)"
        )
    started: list[Server] = []

    def start(*arguments: str, model: str | None = None, port: int | None = None) -> Server:
        log = tmp_path / f"server-{len(started)}.log"
        server = Server(log, port or free_port(), model or os.environ["SGLANG_TEST_MODEL"], *arguments)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def clock() -> Callable[[], float]:
    begun = time.monotonic()
    return lambda: time.monotonic() - begun
