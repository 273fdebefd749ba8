"""Every fault gives the right state within its time, on a real server. Run once for each SGLang version."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from conftest import free_port  # noqa: E402

from module_utils.sm120.health import AccessDenied, Checker, Question, Verdict  # noqa: E402
from module_utils.sm120.http import Client  # noqa: E402

KEY = "k3y-of-the-test-0123456789"
READY_SECONDS = 240
DUMMY = Question(text_check="count")


def checker(server: Any, question: Question = DUMMY, key: str | None = None) -> Checker:
    return Checker(Client(server.url, key), question, unit=None, log=server.log)


def ready(launch: Callable[..., Any], *arguments: str, key: str | None = None) -> Any:
    server = launch(*arguments)
    got = checker(server, key=key).wait(READY_SECONDS)
    assert got.status == "healthy", got
    return server


def ends(server: Any) -> Callable[[], float]:
    """Ask a while later how many seconds ago the server's process ended; negative while it runs."""
    ended: list[float] = []
    threading.Thread(
        target=lambda: (server.process.wait(), ended.append(time.monotonic())), daemon=True
    ).start()
    return lambda: time.monotonic() - ended[0] if ended else -1.0


def crashed_in_time(server: Any, signature: str) -> None:
    """The wait ends within ten seconds of the process, or before it, and names the cause."""
    seconds_ago = ends(server)
    got = checker(server).wait(READY_SECONDS)
    late = seconds_ago()
    assert got.status == "crashed", got
    assert got.diagnosis is not None
    assert got.diagnosis["signature"] == signature
    assert late < 10


def timed(check: Callable[[], Verdict]) -> tuple[Verdict, float]:
    begun = time.monotonic()
    return check(), time.monotonic() - begun


def test_healthy_then_stopped(launch: Callable[..., Any]) -> None:
    server = ready(launch)
    # A dummy's text may be anything, but what this one says must not pass for a fault.
    got, seconds = timed(checker(server, Question()).check)
    assert (got.status, got.evidence["generation"]["completion_tokens"]) == ("healthy", 32)
    assert got.version
    assert seconds < 10
    server.stop()
    got, seconds = timed(Checker(Client(server.url), DUMMY, unit=None, log=None).check)
    assert got.status == "stopped"
    assert seconds < 3


def test_a_stopped_scheduler_is_hung_and_recovers(launch: Callable[..., Any]) -> None:
    server = ready(launch)
    scheduler = server.child("sglang::schedul")
    os.kill(scheduler, signal.SIGSTOP)
    got, seconds = timed(checker(server).check)
    assert got.status == "hung"
    assert str(scheduler) in got.reason
    assert seconds < 30
    os.kill(scheduler, signal.SIGCONT)
    assert checker(server).wait(30).status == "healthy"


def test_a_killed_scheduler_is_a_crash(launch: Callable[..., Any]) -> None:
    server = ready(launch)
    os.kill(server.child("sglang::schedul"), signal.SIGKILL)
    got, seconds = timed(lambda: checker(server).wait(60))
    assert got.status == "crashed"
    assert seconds < 10


def test_a_slow_first_answer_is_waited_for(launch: Callable[..., Any]) -> None:
    server = ready(launch)
    scheduler = server.child("sglang::schedul")
    os.kill(scheduler, signal.SIGSTOP)
    threading.Timer(8, os.kill, (scheduler, signal.SIGCONT)).start()
    got, seconds = timed(lambda: checker(server).wait(60))
    assert got.status == "healthy"
    assert 7 < seconds < 30


@pytest.mark.parametrize(
    ("arguments", "model", "signature"),
    [
        (("--no-such-argument",), None, "arguments.refused"),
        ((), "/no/such/model", "model.no_path"),
    ],
)
def test_a_start_that_fails_ends_the_wait_and_names_the_cause(
    launch: Callable[..., Any], arguments: tuple[str, ...], model: str | None, signature: str
) -> None:
    crashed_in_time(launch(*arguments, model=model), signature)


def test_no_memory_for_the_cache_is_named(launch: Callable[..., Any]) -> None:
    """Others take memory while it starts: the dummy's weights are less than a machine's memory sways by."""
    server = launch("--mem-fraction-static", "0.0001")
    taken: list[bytes] = []

    def take() -> None:
        while server.process.poll() is None and len(taken) < 100:
            taken.append(b"x" * (20 << 20))
            time.sleep(0.2)

    thread = threading.Thread(target=take)
    thread.start()
    crashed_in_time(server, "memory.kv_pool")
    thread.join()


def test_a_taken_port_is_named(launch: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        server = launch(port=taken.getsockname()[1])
        # The other listener accepts and never answers: the log and the end of the process must tell.
        crashed_in_time(server, "network.port_in_use")


def test_the_key_opens_and_is_nowhere_told(launch: Callable[..., Any]) -> None:
    server = ready(launch, "--api-key", KEY, key=KEY)
    with pytest.raises(AccessDenied):
        checker(server, key="wrong").check()
    got = checker(server, key=KEY).check()
    assert got.status == "healthy"
    assert (
        KEY in server.log.read_text()
    )  # SGLang prints it itself; that is what makes the next line worth asking
    assert KEY not in json.dumps([got.reason, got.evidence, got.diagnosis])


def test_tokens_asked_for_are_the_growth_of_the_servers_counter(launch: Callable[..., Any]) -> None:
    from module_utils.sm120.ladder import Ladder
    from module_utils.sm120.throughput import Spec

    server = ready(launch)

    def counted() -> float:
        with urllib.request.urlopen(f"{server.url}/metrics") as page:  # noqa: S310 - loopback
            lines = page.read().decode().splitlines()
        return sum(
            float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("sglang:generation_tokens_total")
        )

    before = counted()
    asked = 0
    for api in ("generate", "completions"):
        spec = Spec(api, (1, 8), 2, 16, 24, 2, 2, 7, 2048, {}, 60.0, 300.0)
        ladder = Ladder(Client(server.url), spec, ca_path=None, sample_gpus=False)
        for rung in (ladder.rung(one) for one in spec.concurrency):
            assert rung["valid"], rung["invalid_because"]
            assert rung["output_tokens"] == rung["completed"] * 24 == rung["concurrency"] * 2 * 2 * 24
            assert rung["tokens_received"] == rung["tokens_requested"]
            asked += rung["tokens_requested"]
    assert counted() - before == asked
