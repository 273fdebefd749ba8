"""States and their evidence, over a fake server, a made-up /proc and recorded systemd answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang_health
from ansible.module_utils.sm120 import health, health_signs, listeners, processes
from ansible.module_utils.sm120.answer_check import judge
from ansible.module_utils.sm120.health import Checker, Question
from ansible.module_utils.sm120.http import Client
from ansible.module_utils.sm120.processes import Process
from ansible.module_utils.sm120.unit_log import FileFollower, UnitState, journal_command, parse_show
from fake_sglang import VERSIONS, Fake, outlives_its_scheduler, page, serve, silence, speaking
from story import STORY

KEY = "k3y-0123456789"


def answer(text: str = "Paris, of course", ids: list[int] | None = None, count: int = 32, **meta: Any) -> Any:
    return {
        "text": text,
        "output_ids": list(range(100, 100 + count)) if ids is None else ids,
        "meta_info": {"completion_tokens": count, "finish_reason": {"type": "length"}, **meta},
    }


@pytest.fixture(autouse=True)
def no_local_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake server is this process: its children are pytest's."""
    monkeypatch.setattr(health_signs, "listener_pid", lambda _port: None)
    monkeypatch.setattr(health_signs, "dead_children", lambda _pid: [])
    monkeypatch.setattr(health_signs, "stopped_children", lambda _pid: [])
    monkeypatch.setattr(health, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(health, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(health, "LOG_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(health, "BUSY_AFTER_SECONDS", 0.1)


@pytest.fixture
def every_503_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own wait is 20 s; here any 503 counts as coming after it."""
    monkeypatch.setattr(health, "OWN_WORD_SECONDS", 0.0)


def check(fake: Fake, *, unit: str | None = None, log: Path | None = None, **asked: Any) -> health.Verdict:
    question = Question(**({"health_timeout_seconds": 30.0, "generate_timeout_seconds": 30.0} | asked))
    return Checker(Client(fake.url, KEY), question, unit=unit, log=log).check()


def unit_is(monkeypatch: pytest.MonkeyPatch, *states: UnitState) -> None:
    """The unit goes through `states`, one per look, and stays in the last."""
    waiting = list(states)
    monkeypatch.setattr(
        health_signs, "unit_state", lambda _u: waiting.pop(0) if len(waiting) > 1 else waiting[0]
    )


RUNNING = UnitState("loaded", "active", "running", "success", 4242, invocation="")
FAILED = UnitState("loaded", "failed", "failed", "signal", 0, 2, 9, 0, "")


def test_a_stop_on_request_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGKILL of its own, and systemd, which starts again what crashed, did not."""
    crash = "Restart=on-failure\nNRestarts=3\n"
    text = "LoadState=loaded\nActiveState=failed\nSubState=failed\nResult=signal\nExecMainCode=2\nExecMainStatus=9\n"
    for more, status in (
        ("Restart=on-failure\n", "stopped"),
        ("Restart=no\n", "crashed"),
        (crash, "crashed"),
    ):
        unit_is(monkeypatch, parse_show(text + more))
        with serve(Fake()) as fake:
            assert check(fake, unit="sglang-main.service").status == status


def test_healthy_is_a_checked_generation() -> None:
    with serve(Fake("/models/m")) as fake:
        fake.routes["/generate"] = page(answer())
        got = check(fake)
        body = fake.bodies("/generate")[0]
    assert (got.status, got.version, got.model) == ("healthy", "0.5.9", "/models/m")
    assert got.evidence["generation"]["completion_tokens"] == 32
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (answer(text="  "), "empty"),
        (answer(count=1), "1 tokens instead of 32"),
        (answer(ids=[7] * 32), "repeated 32 times"),
        (answer(text="a\ufffd\ufffdb\ufffd"), "not text"),
        (answer(output_token_logprobs=[[-1.0, 5, None], [None, 6, None]]), "NaN"),
        (answer(text="London"), "does not match"),
        (answer(finish_reason={"type": "abort"}), "aborted"),
        ({"text": "x"}, "meta_info"),
    ],
)
def test_wrong_text_is_degraded(reply: Any, says: str) -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page(reply)
        got = check(fake, expect_text="Paris" if "London" in json.dumps(reply) else None)
    assert got.status == "degraded"
    assert says in got.reason


def test_random_text_of_a_dummy_model_is_healthy() -> None:
    # What a model with random weights really said (two tokens in turn), and random tokens.
    for one in (answer(text="opuis" * 16, ids=[773, 369] * 16), answer(text="jx b\ufffd qz" * 8)):
        assert judge(one, tokens_wanted=32, check="strict")[0] == []


def test_the_text_of_a_dummy_model_may_be_left_out_of_the_check() -> None:
    stuck = answer(text="", ids=[7] * 32)
    assert judge(stuck, tokens_wanted=32, check="strict")[0] != []
    assert judge(stuck, tokens_wanted=32, check="count")[0] == []
    assert judge(answer(count=3), tokens_wanted=32, check="count")[0] != []
    assert judge(answer(count=3), tokens_wanted=32, check="off")[0] == []


def test_an_error_answer_to_a_generation_is_degraded() -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page({"error": {"message": f"boom {KEY}"}}, 500)
        got = check(fake)
    assert got.status == "degraded"
    assert "500" in got.reason
    assert KEY not in got.reason


def test_nobody_listening_is_stopped() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fake = Fake()
        fake.port = unused.getsockname()[1]
        assert check(fake).status == "stopped"


def test_an_active_unit_that_does_not_listen_yet_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    unit_is(monkeypatch, RUNNING)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        fake = Fake()
        fake.port = unused.getsockname()[1]
        got = check(fake, unit="u")
    assert got.status == "starting"
    assert got.evidence["unit"]["main_pid"] == 4242


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (UnitState("not-found"), "stopped"),
        (UnitState("loaded", "inactive", "dead"), "stopped"),
        (FAILED, "crashed"),
        (UnitState("loaded", "activating", "auto-restart", "exit-code"), "crashed"),
    ],
)
def test_the_units_word_comes_first(monkeypatch: pytest.MonkeyPatch, state: UnitState, status: str) -> None:
    unit_is(monkeypatch, state)
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page(answer())
        assert check(fake, unit="u").status == status
        assert fake.seen == []


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process of the unit that listens on nothing."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def groups_are(monkeypatch: pytest.MonkeyPatch, groups: dict[int, str]) -> None:
    monkeypatch.setattr(listeners, "control_groups", lambda pid, _proc: [groups.get(pid, "/")])


def test_another_process_on_the_units_port_is_not_its_health(
    monkeypatch: pytest.MonkeyPatch, sleeper: int
) -> None:
    unit_is(monkeypatch, replace(RUNNING, main_pid=sleeper, control_group="/system.slice/u.service"))
    groups_are(monkeypatch, {sleeper: "/system.slice/u.service", os.getpid(): "/system.slice/other.service"})
    for reply in (page(answer()), page(answer(text=" ")), page({"error": "Unauthorized"}, 401)):
        with serve(Fake("/m")) as fake:
            fake.routes["/generate"] = reply
            got = check(fake, unit="u.service")
        assert got.status == "degraded"
        stranger = got.evidence["stranger"]
        assert (stranger["pid"], stranger["unit"]) == (os.getpid(), "other.service")
        assert f"(pid {os.getpid()}, other.service), no process of this unit" in got.reason


@pytest.mark.parametrize("main", ["listens", "is above it", "is in its group"])
def test_a_unit_whose_own_process_listens_is_healthy(
    monkeypatch: pytest.MonkeyPatch, sleeper: int, main: str
) -> None:
    pid = {"listens": os.getpid(), "is above it": os.getppid(), "is in its group": sleeper}[main]
    unit_is(monkeypatch, replace(RUNNING, main_pid=pid, control_group="/system.slice/u.service"))
    ours = {pid: "/system.slice/u.service"}
    if main == "is in its group":
        ours[os.getpid()] = "/system.slice/u.service/payload"
    groups_are(monkeypatch, ours)
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page(answer())
        got = check(fake, unit="u.service")
    assert got.status == "healthy"
    assert "stranger" not in got.evidence


def test_a_listener_that_cannot_be_seen_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch, sleeper: int
) -> None:
    unit_is(monkeypatch, replace(RUNNING, main_pid=sleeper, control_group="/system.slice/u.service"))
    groups_are(monkeypatch, {sleeper: "/system.slice/u.service"})
    monkeypatch.setattr(listeners, "opened", lambda _pid, _proc: iter(()))
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page(answer())
        assert check(fake, unit="u.service").status == "healthy"


def test_strangers_are_looked_for_once_and_only_where_something_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(health_signs, "stranger", lambda *given: asked.append(given))
    unit_is(monkeypatch, replace(RUNNING, control_group="/g"))
    with serve(Fake()) as fake:
        fake.routes["/health"] = page(b"", 503)
        assert check(fake, unit="u").status == "warming"
        fake.routes["/health"] = page(b"")
        fake.routes["/generate"] = page(answer())
        assert (check(fake).status, asked) == ("healthy", [])
        assert check(fake, unit="u").status == "healthy"
        assert asked == [("127.0.0.1", fake.port, 4242, "/g")]


def test_503_at_once_is_warming() -> None:
    with serve(Fake()) as fake:
        fake.routes["/health"] = page(b"", 503)
        assert check(fake).status == "warming"


def test_health_that_never_answers_is_hung() -> None:
    with serve(Fake()) as fake:
        fake.routes["/health"] = silence
        assert check(fake, health_timeout_seconds=0.4).status == "hung"


def slow_503(_fake: Fake, sock: socket.socket, _body: Any) -> None:
    time.sleep(1.5)
    sock.sendall(page(b"", 503))


@pytest.mark.usefixtures("every_503_is_slow")
def test_503_after_the_servers_own_wait_is_hung_unless_tokens_flow() -> None:
    counter = {"tokens": 100}

    def metrics(_fake: Fake, sock: socket.socket, _body: Any) -> None:
        counter["tokens"] += counter.get("step", 0)
        sock.sendall(page(b'sglang:generation_tokens_total{m="x"} %d.0\n' % counter["tokens"]))

    with serve(Fake()) as fake:
        fake.routes["/health"] = slow_503
        fake.routes["/metrics"] = metrics
        assert check(fake).status == "hung"
        counter["step"] = 5
        got = check(fake)
    assert got.status == "healthy"
    assert got.reason.startswith("busy")
    assert got.evidence["work"]["tokens"] == 5


def test_health_well_and_generation_silent_is_hung() -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = silence
        got = check(fake, generate_timeout_seconds=0.4)
    assert got.status == "hung"
    assert "/health is well" in got.reason


def test_endless_silence_after_200_is_hung() -> None:
    def begin(fake: Fake, sock: socket.socket, body: Any) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
        silence(fake, sock, body)

    with serve(Fake()) as fake:
        fake.routes["/generate"] = begin
        got = check(fake, generate_timeout_seconds=0.6)
    assert got.status == "hung"


def break_off(_fake: Fake, sock: socket.socket, _body: Any) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    sock.close()


def end_early(_fake: Fake, sock: socket.socket, _body: Any) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{")
    sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("end", [break_off, end_early])
def test_an_end_in_mid_answer_is_degraded_when_the_server_lives_on(
    end: Callable[[Fake, socket.socket, Any], None],
) -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = end
        got = check(fake)
    assert got.status == "degraded"
    assert "broke off" in got.reason


@pytest.mark.parametrize("end", [break_off, end_early])
def test_an_end_in_mid_answer_is_a_crash_when_nobody_is_left(
    end: Callable[[Fake, socket.socket, Any], None],
) -> None:
    def die(fake: Fake, sock: socket.socket, body: Any) -> None:
        assert fake.server is not None
        # Closing alone leaves it listening for as long as the server's own thread waits in poll().
        fake.server.socket.shutdown(socket.SHUT_RDWR)
        fake.server.socket.close()
        end(fake, sock, body)

    with serve(Fake()) as fake:
        fake.routes["/generate"] = die
        got = check(fake)
    assert got.status == "crashed"


def test_a_parent_that_outlives_its_scheduler_is_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    unit_is(monkeypatch, RUNNING)
    monkeypatch.setattr(
        health_signs, "dead_children", lambda _pid: [Process(77, 4242, "Z", "sglang::schedul")]
    )
    with serve(Fake()) as fake:
        fake.routes["/health"] = silence
        begun = time.monotonic()
        got = check(fake, unit="u")
    assert got.status == "crashed"
    assert "pid 77" in got.reason
    assert time.monotonic() - begun < 15  # long before /health's own limit


@pytest.mark.usefixtures("every_503_is_slow")
def test_a_stopped_scheduler_is_hung_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unit_is(monkeypatch, RUNNING)
    monkeypatch.setattr(
        health_signs, "stopped_children", lambda _pid: [Process(78, 4242, "T", "sglang::schedul")]
    )
    with serve(Fake()) as fake:
        fake.routes["/health"] = slow_503
        got = check(fake, unit="u")
    assert got.status == "hung"
    assert "pid 78" in got.reason


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_from_warming_to_healthy(version: str) -> None:
    asked = {"times": 0}

    def warming(_fake: Fake, sock: socket.socket, _body: Any) -> None:
        asked["times"] += 1
        sock.sendall(page(b"", 503 if asked["times"] < 2 else 200))

    with serve(speaking(version)) as fake:
        fake.routes["/health"] = warming
        # /model_info answers 200 while the server warms up: it must not pass for readiness.
        checker = Checker(Client(fake.url, KEY), Question(), unit=None, log=None)
        assert checker.check().status == "warming"
        got = checker.check()
    assert (got.status, got.version, got.model) == ("healthy", version, "/models/m")
    assert "s3cret" not in json.dumps(got.evidence)


@pytest.mark.usefixtures("every_503_is_slow")
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_with_a_frozen_scheduler_is_hung(version: str) -> None:
    with serve(speaking(version)) as fake:
        fake.routes["/health"] = page(b"", 503)
        fake.routes["/server_info"] = silence  # while /model_info goes on to answer
        got = check(fake)
    assert got.status == "hung"
    assert (got.version, got.diagnosis) == (None, None)


@pytest.mark.usefixtures("every_503_is_slow")
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_whose_scheduler_was_killed_is_crashed(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    log.write_text("[x] server_args=ServerArgs()\n[x] The server is fired up and ready to roll!\n")

    def killed(fake: Fake, sock: socket.socket, body: Any) -> None:
        if outlives_its_scheduler(version):
            monkeypatch.setattr(health_signs, "listener_pid", lambda _port: 4242)
            dead = [Process(77, 4242, "Z", "sglang::schedul")]
            monkeypatch.setattr(health_signs, "dead_children", lambda _pid: dead)
            silence(fake, sock, body)
            return
        with log.open("a") as file:
            file.write(
                "[x] Subprocess scheduler_0 (pid=77) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
                "[x] SIGQUIT received. signum=None, frame=None. It usually means one child failed.\n"
            )
        assert fake.server is not None
        fake.server.socket.close()

    with serve(speaking(version)) as fake:
        checker = Checker(Client(fake.url, KEY), Question(), unit=None, log=log)
        assert checker.check().status == "healthy"
        fake.routes["/health"] = killed
        got = checker.wait(30)
    assert got.status == "crashed"
    assert ("pid 77" if outlives_its_scheduler(version) else "crashed with exit code -9") in got.reason


def unused_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


def test_waiting_ends_when_the_process_that_logged_died_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "server.log"
    log.write_text("[x] server_args=ServerArgs()\n[x] Load weight begin. avail mem=94.00 GB\n")
    writers = [{51, 52}, {51}, set()]
    monkeypatch.setattr(
        health_signs, "writers_of", lambda _log: writers.pop(0) if len(writers) > 1 else writers[0]
    )
    checker = Checker(Client(f"http://127.0.0.1:{unused_port()}"), Question(), unit=None, log=log)
    begun = time.monotonic()
    got = checker.wait(60)
    assert got.status == "crashed"
    assert "51" in got.reason
    assert time.monotonic() - begun < 30  # of the 60 s it might have waited


def test_waiting_ends_when_the_listener_is_gone_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[int | None] = [4242, None]
    monkeypatch.setattr(
        health_signs, "listener_pid", lambda _port: listeners.pop(0) if len(listeners) > 1 else listeners[0]
    )
    got = Checker(Client(f"http://127.0.0.1:{unused_port()}"), Question(), unit=None, log=None).wait(60)
    assert got.status == "crashed"
    assert "4242" in got.reason


@pytest.mark.parametrize(("user", "status"), [(0, "crashed"), (1000, "starting")])
def test_a_log_that_nobody_writes_any_more_tells_root_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, status: str
) -> None:
    log = tmp_path / "server.log"
    log.write_text("[x] server_args=ServerArgs()\n[x] Load weight begin. avail mem=94.00 GB\n")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    checker = Checker(Client(f"http://127.0.0.1:{unused_port()}"), Question(), unit=None, log=log)
    assert checker.check().status == "starting"  # written this moment
    os.utime(log, (time.time() - 10, time.time() - 10))
    assert checker.check().status == status
    with log.open("a"):  # someone has it open: a server that is silent for a while
        os.utime(log, (time.time() - 10, time.time() - 10))
        assert checker.check().status == "starting"


def test_waiting_ends_with_the_crash_in_the_log_and_names_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    first, last = STORY.split("RuntimeError", 1)
    log.write_text(first)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    checker = Checker(Client(f"http://127.0.0.1:{port}"), Question(), unit=None, log=log)
    assert checker.check().status == "starting"
    with log.open("a") as file:
        file.write("RuntimeError" + last)
    begun = time.monotonic()
    got = checker.wait(60)
    assert got.status == "crashed"
    assert time.monotonic() - begun < 30  # of the 60 s it might have waited
    assert got.diagnosis is not None
    assert got.diagnosis["signature"] == "gate.jit_closed"
    assert got.diagnosis["layer"] == "layer 3"


def test_a_log_that_ends_with_an_exception_is_a_crash(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "/v/x.py", line 1, in main\n'
        "OSError: Can't load the configuration of '/no/such/model'. If you were trying\n"
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    checker = Checker(Client(f"http://127.0.0.1:{port}"), Question(), unit=None, log=log)
    os.utime(log, (time.time() + 60, time.time() + 60))
    assert checker.check().status == "starting"  # it may still say more
    os.utime(log, (time.time() - 10, time.time() - 10))
    got = checker.check()
    assert got.status == "crashed"
    assert got.diagnosis is not None
    assert got.diagnosis["signature"] == "model.no_path"


def test_waiting_ends_when_the_unit_was_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_signs.Watch, "read_log", lambda _self: None)
    before = UnitState("loaded", "active", "running", "success", 1, invocation="aaa")
    after = UnitState("loaded", "active", "running", "success", 2, restarts=1, invocation="bbb")
    unit_is(monkeypatch, before, before, after)
    with serve(Fake()) as fake:
        fake.routes["/health"] = page(b"", 503)
        checker = Checker(Client(fake.url), Question(), unit="u", log=None)
        got = checker.wait(30)
    assert got.status == "crashed"
    assert "started anew" in got.reason


def test_waiting_ends_when_the_server_becomes_healthy() -> None:
    asked = {"times": 0}

    def warming(_fake: Fake, sock: socket.socket, _body: Any) -> None:
        asked["times"] += 1
        sock.sendall(page(b"", 503 if asked["times"] < 2 else 200))

    with serve(Fake()) as fake:
        fake.routes["/health"] = warming
        fake.routes["/generate"] = page(answer())
        got = Checker(Client(fake.url), Question(), unit=None, log=None).wait(30)
    assert got.status == "healthy"
    assert asked["times"] == 2


def test_waiting_ends_at_its_limit() -> None:
    with serve(Fake()) as fake:
        fake.routes["/health"] = page(b"", 503)
        got = Checker(Client(fake.url), Question(), unit=None, log=None).wait(1)
    assert got.status == "warming"
    assert "waited 1 s" in got.reason


@pytest.mark.parametrize(("running_seconds", "limit", "waits"), [(0, 3, 3), (2, 3, 1), (500, 3, 1)])
def test_what_was_started_long_ago_is_not_waited_for_from_the_beginning(
    monkeypatch: pytest.MonkeyPatch, running_seconds: float, limit: float, waits: float
) -> None:
    monkeypatch.setattr(health, "GRACE_SECONDS", 1.0)
    since = time.monotonic() - running_seconds if running_seconds else 0.0
    unit_is(monkeypatch, replace(RUNNING, active_since_seconds=since))
    with serve(Fake()) as fake:
        fake.routes["/health"] = page(b"", 503)
        got = Checker(Client(fake.url), Question(), unit="u.service", log=None).wait(limit)
    assert f"waited {waits} s" in got.reason


def test_a_wrong_key_is_said(run_module: Any) -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = page({"error": "Unauthorized"}, 401)
        code, out = run_module(sglang_health.main, url=fake.url, api_key=KEY)
    assert code == 1
    assert "401" in out["msg"]
    assert "sglang_server_api_key" in out["msg"]
    assert KEY not in json.dumps(out)


def test_the_message_names_unit_and_url(run_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unit_is(monkeypatch, FAILED)
    _, out = run_module(sglang_health.main, url="http://127.0.0.1:9", unit="sglang-main.service")
    assert out["status"] == "crashed"
    assert "sglang-main.service" in out["msg"]
    assert "http://127.0.0.1:9" in out["msg"]


def test_module_returns_what_it_promises(run_module: Any) -> None:
    with serve(Fake("/m")) as fake:
        fake.routes["/generate"] = page(answer())
        code, out = run_module(sglang_health.main, url=fake.url, api_key=KEY)
    assert code == 0
    assert (out["status"], out["changed"], out["diagnosis"]) == ("healthy", False, None)
    assert (out["version"], out["model"]) == ("0.5.9", "/m")
    assert KEY not in json.dumps(out)


@pytest.mark.parametrize(
    "wrong",
    [
        {"health_timeout_seconds": 20},
        {"timeout_seconds": 0},
        {"generate_timeout_seconds": 0},
        {"generate_tokens": 0},
        {"prompt": ""},
        {"expect_text": "("},
        {"expect_text": "Paris", "text_check": "off"},
        {"url": "nonsense"},
    ],
)
def test_module_refuses_what_cannot_be(run_module: Any, wrong: dict[str, Any]) -> None:
    code, out = run_module(sglang_health.main, **wrong)
    assert code == 1
    assert next(iter(wrong)) in out["msg"]


def test_check_mode_does_not_wait(run_module: Any) -> None:
    with serve(Fake()) as fake:
        fake.routes["/health"] = page(b"", 503)
        code, out = run_module(sglang_health.main, check=True, url=fake.url, wait=True, timeout_seconds=600)
    assert (code, out["status"]) == (0, "warming")


def test_systemd_show_is_read() -> None:
    text = (
        "LoadState=loaded\nActiveState=activating\nSubState=auto-restart\nResult=signal\nMainPID=0\n"
        "ExecMainCode=2\nExecMainStatus=9\nNRestarts=3\nInvocationID=abc\nControlGroup=/system.slice/u.service\n"
    )
    state = parse_show(text)
    assert state.crashed
    assert not state.running
    assert (state.exit_status, state.restarts, state.invocation) == (9, 3, "abc")
    assert state.control_group == "/system.slice/u.service"
    assert not parse_show("LoadState=not-found\n").exists


def test_the_journal_is_asked_for_one_run_of_the_unit() -> None:
    command = journal_command("u.service", "abc", cursor="c1")
    assert command[-3:] == ["_SYSTEMD_INVOCATION_ID=abc", "+", "INVOCATION_ID=abc"]
    assert "--after-cursor=c1" in command
    assert journal_command("u.service", since="-1h")[-2:] == ["--since=-1h", "--unit=u.service"]


def test_a_log_is_followed_and_a_new_one_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = FileFollower(path)
    assert list(follower.read()) == []
    path.write_text("one\n")
    assert list(follower.read()) == [b"one\n"]
    with path.open("a") as file:
        file.write("two\n")
    assert list(follower.read()) == [b"two\n"]
    path.write_text("x\n")
    assert list(follower.read()) == [b"x\n"]


def test_processes_are_read_from_proc(tmp_path: Path) -> None:
    for pid, name, state, parent in (
        (10, "python (x) y", "S", 1),
        (11, "sglang::schedul", "Z", 10),
        (12, "sglang::detoken", "T", 10),
        (13, "bash", "Z", 12),
        (20, "sglang::schedul", "Z", 2),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {state} {parent} 0 0\n")
    assert [p.pid for p in processes.descendants(10, tmp_path)] == [11, 12, 13]
    assert [p.pid for p in processes.dead_children(10, tmp_path)] == [11]
    assert [p.pid for p in processes.stopped_children(10, tmp_path)] == [12]
    assert processes.read_process(99, tmp_path) is None


def test_writers_of_a_file_are_found_and_readers_are_not(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x")
    with log.open():
        assert processes.writers_of(log) == set()
    with log.open("a"):
        assert processes.writers_of(log) == {os.getpid()}
    assert processes.writers_of(tmp_path / "none") == set()
