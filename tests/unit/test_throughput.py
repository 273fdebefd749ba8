"""The load, its figures and the module over a fake server."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sglang_throughput
from ansible.module_utils.sm120 import ladder, load
from ansible.module_utils.sm120.gpu_power import parse, summarise
from ansible.module_utils.sm120.http import Client
from ansible.module_utils.sm120.load import Driver, LimitError, Limits, Outcome, allow_open_files
from ansible.module_utils.sm120.rungs import join, say
from ansible.module_utils.sm120.sse import Stream
from ansible.module_utils.sm120.throughput import Spec, SpecError, check_vocab, measure, prompts, render
from ansible.module_utils.sm120.vocabulary import vocabulary_at, vocabulary_of
from fake_sglang import HEAD, Fake, chunk, event, page, serve, silence, stream, stream_reply

KEY = "k3y-0123456789"
LIMITS = Limits(stall_seconds=20, total_seconds=30)


def spec(**changes: Any) -> Spec:
    values: dict[str, Any] = {
        "api": "generate",
        "concurrency": (2,),
        "requests_per_stream": 2,
        "input_tokens": 4,
        "output_tokens": 6,
        "repeats": 1,
        "warmup_requests": 1,
        "seed": 1,
        "vocab_size": 100,
        "goodput": {},
        "stall_seconds": 20.0,
        "timeout_seconds": 30.0,
    }
    return Spec(**(values | changes))


def finished(started: float, times: list[float], end: float) -> Stream:
    """An answer with one token at each of `times`."""
    made = Stream(started)
    made.status, made.done, made.latency = 200, True, end - started
    for count, at in enumerate(times, start=1):
        made.times.append(at)
        made.counts.append(count)
        made.last_count = count
    made.usage = {"completion_tokens": len(times), "prompt_tokens": 4, "cached_tokens": 0}
    return made


def test_figures_follow_bench_servings_formulas() -> None:
    # Two answers of three tokens: first token after 1 s and 2 s, then gaps of 0.5 s and of 1 s.
    outcome = Outcome(
        streams=[finished(0.0, [1.0, 1.5, 2.0], 2.0), finished(0.0, [2.0, 3.0, 4.0], 4.0)],
        started=0.0,
        ended=4.0,
    )
    got = measure(spec(output_tokens=3, requests_per_stream=1), 2, outcome)
    assert got["valid"], got["invalid_because"]
    assert (got["completed"], got["failed"]) == (2, 0)
    assert got["output_tokens_per_second"] == 6 / 4
    assert got["total_tokens_per_second"] == (6 + 8) / 4
    assert got["requests_per_second"] == 0.5
    assert got["mean_concurrency"] == (2 + 4) / 4
    assert got["ttft_ms"]["mean"] == 1500
    assert got["tpot_ms"]["mean"] == pytest.approx(((2 - 1) / 2 + (4 - 2) / 2) / 2 * 1000)
    assert got["itl_ms"] == {"mean": 750, "p50": 750, "p90": 1000, "p95": 1000, "p99": 1000}
    assert got["e2e_ms"]["p50"] == 3000


def test_an_event_with_several_tokens_shares_its_gap() -> None:
    one = Stream(0.0)
    one.times.extend([1.0, 2.0])
    one.counts.extend([1, 5])
    one.last_count, one.done, one.latency = 5, True, 2.0
    one.usage = {"completion_tokens": 5, "prompt_tokens": 4, "cached_tokens": 0}
    got = measure(spec(output_tokens=5, requests_per_stream=1), 1, Outcome(streams=[one], started=0, ended=2))
    assert got["itl_ms"]["p50"] == 250
    assert got["tpot_ms"]["mean"] == 250


def test_one_output_token_has_no_time_per_further_token() -> None:
    outcome = Outcome(streams=[finished(0.0, [1.0], 1.0)], started=0, ended=1)
    got = measure(spec(output_tokens=1, requests_per_stream=1), 1, outcome)
    assert got["valid"]
    assert got["tpot_ms"] is None
    assert got["itl_ms"] is None


def test_goodput_counts_requests_within_every_limit() -> None:
    streams = [finished(0.0, [1.0, 1.5, 2.0], 2.0), finished(0.0, [2.0, 3.0, 4.0], 4.0)]
    outcome = Outcome(streams=streams, started=0.0, ended=4.0)
    one = spec(output_tokens=3, requests_per_stream=1, goodput={"ttft_ms": 1500.0, "tpot_ms": 600.0})
    assert measure(one, 2, outcome)["goodput_requests_per_second"] == 0.25
    none = spec(output_tokens=3, requests_per_stream=1, goodput={"e2e_ms": 100.0})
    assert measure(none, 2, outcome)["goodput_requests_per_second"] == 0


def test_a_short_answer_makes_the_measurement_invalid() -> None:
    outcome = Outcome(streams=[finished(0.0, [1.0], 1.0)], started=0, ended=1)
    got = measure(spec(output_tokens=3, requests_per_stream=1), 1, outcome)
    assert not got["valid"]
    assert got["errors"] == {"1 tokens instead of 3": 1}
    assert got["output_tokens"] == 0


def test_a_busy_client_makes_the_measurement_invalid() -> None:
    outcome = Outcome(streams=[finished(0.0, [1.0], 1.0)], started=0, ended=1, cpu_seconds=0.95)
    got = measure(spec(output_tokens=1, requests_per_stream=1), 1, outcome)
    assert not got["valid"]
    assert "95 % of a core" in got["invalid_because"][0]


def test_cached_prompts_are_noted() -> None:
    answer = finished(0.0, [1.0], 1.0)
    answer.usage["cached_tokens"] = 4
    got = measure(
        spec(output_tokens=1, requests_per_stream=1), 1, Outcome(streams=[answer], started=0, ended=1)
    )
    assert got["valid"]
    assert "cache" in got["notes"][0]


def test_prompts_repeat_with_the_seed_and_differ_between_repeats() -> None:
    first = list(prompts(spec(), "8/0", 5))
    assert first == list(prompts(spec(), "8/0", 5))
    assert first != list(prompts(spec(), "8/1", 5))
    assert first != list(prompts(spec(seed=2), "8/0", 5))
    many = [i for ids in prompts(spec(vocab_size=30, input_tokens=50), "x", 50) for i in ids]
    assert (min(many), max(many)) == (10, 29)


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_requests_ask_for_exact_greedy_answers(api: str) -> None:
    client = Client("http://h:1/base", KEY)
    head, _, body = render(spec(api=api), client.address, client.headers(), [11, 12]).partition(b"\r\n\r\n")
    value = json.loads(body)
    assert f"Bearer {KEY}".encode() in head
    assert b"POST /base/" in head
    assert value["stream"] is True
    asked = value["sampling_params"] if api == "generate" else value
    assert asked["temperature"] == 0.0
    assert asked["ignore_eos"] is True
    assert 6 in (asked.get("max_new_tokens"), asked.get("max_tokens"))


def test_the_vocabulary_is_never_exceeded() -> None:
    assert check_vocab(None, 500) == 500
    assert check_vocab(400, 500) == 400
    assert check_vocab(400, None) == 400
    for given, model in ((501, 500), (None, None), (3, 500)):
        with pytest.raises(SpecError, match="vocab_size"):
            check_vocab(given, model)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"vocab_size": 7}, 7),
        ({"text_config": {"vocab_size": 8}}, 8),
        ({"thinker_config": {"text_config": {"vocab_size": 9}}}, 9),
        ({"vocab_size": "x"}, None),
        ({}, None),
    ],
)
def test_vocabulary_of_a_config(config: dict[str, Any], size: int | None) -> None:
    assert vocabulary_of(config) == size


@pytest.mark.parametrize(
    ("text", "size"), [('{"llm_config": {"vocab_size": 7}}', 7), ("null", None), ("[1]", None), ("{", None)]
)
def test_vocabulary_in_a_folder(tmp_path: Path, text: str, size: int | None) -> None:
    (tmp_path / "config.json").write_text(text)
    assert vocabulary_at(str(tmp_path)) == size
    assert vocabulary_at(str(tmp_path / "none")) is None


def run(fake: Fake, requests: int = 6, concurrency: int = 3, **changes: Any) -> Outcome:
    client = Client(fake.url)
    one = spec(**changes)
    sent = [render(one, client.address, {}, ids) for ids in prompts(one, "t", requests)]
    limits = Limits(one.stall_seconds, one.timeout_seconds)
    return Driver(client.address).run(sent, concurrency, limits)


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_the_driver_answers_all_and_counts_exactly(api: str) -> None:
    with serve(Fake()) as fake:
        fake.routes["/generate"] = stream_reply()
        fake.routes["/v1/completions"] = stream_reply(api="completions")
        outcome = run(fake, api=api)
    assert [one.error for one in outcome.streams] == [None] * 6
    assert sum(one.last_count for one in outcome.streams) == 36
    assert outcome.stopped is None


def test_never_more_in_flight_than_asked() -> None:
    flying = {"now": 0, "most": 0}
    lock = threading.Lock()
    together = threading.Barrier(3)  # nobody passes until three are in flight

    def counted(_fake: Fake, sock: socket.socket, body: Any) -> None:
        with lock:
            flying["now"] += 1
            flying["most"] = max(flying["most"], flying["now"])
        *events, end = stream(body["sampling_params"]["max_new_tokens"], prompt=len(body["input_ids"]))
        sock.sendall(HEAD + b"".join(chunk(one) for one in events))
        together.wait(20)
        time.sleep(0.03)  # time for a fourth
        with lock:  # before the end mark: after it the client may send at once
            flying["now"] -= 1
        sock.sendall(chunk(end) + b"0\r\n\r\n")

    with serve(Fake()) as fake:
        fake.routes["/generate"] = counted
        outcome = run(fake, requests=12, concurrency=3)
    assert len(outcome.streams) == 12
    assert flying["most"] == 3


def test_silence_after_200_ends_at_the_stall_limit() -> None:
    def begin(_fake: Fake, sock: socket.socket, body: Any) -> None:
        sock.sendall(HEAD + chunk(event(1, 6)))
        silence(_fake, sock, body)

    with serve(Fake()) as fake:
        fake.routes["/generate"] = begin
        outcome = run(fake, requests=2, concurrency=2, stall_seconds=2.0)
        got = measure(spec(requests_per_stream=1), 2, outcome)
    assert outcome.stopped is not None
    assert outcome.stalled_seconds >= 2
    assert got["failed"] == 2
    assert not got["valid"]
    assert got["tokens_received"] == 2


def test_an_endless_answer_ends_at_the_time_limit() -> None:
    def trickle(_fake: Fake, sock: socket.socket, _body: Any) -> None:
        sock.sendall(HEAD)
        while True:
            sock.sendall(chunk(event(1, 6)))
            time.sleep(0.05)

    with serve(Fake()) as fake:
        fake.routes["/generate"] = trickle
        outcome = run(fake, requests=2, concurrency=2, timeout_seconds=0.4)
    assert outcome.stopped is not None
    assert len(outcome.streams) == 2


def test_a_reset_in_mid_stream_is_one_failed_request() -> None:
    answer = stream_reply()

    def break_second(fake: Fake, sock: socket.socket, body: Any) -> None:
        if len(fake.bodies("/generate")) == 2:
            sock.sendall(HEAD + chunk(event(1, 6)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()
        else:
            answer(fake, sock, body)

    with serve(Fake()) as fake:
        fake.routes["/generate"] = break_second
        outcome = run(fake, requests=4, concurrency=1)
    assert len(outcome.streams) == 4
    assert sum(one.error is not None for one in outcome.streams) == 1


def test_nobody_listening_is_an_error_per_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{unused.getsockname()[1]}")
    outcome = Driver(client.address).run([b"x", b"y"], 1, LIMITS)
    assert [one.error is not None for one in outcome.streams] == [True, True]


def test_tls_streams_are_counted_too(self_signed: tuple[Path, Path]) -> None:
    with serve(Fake(), tls=self_signed) as fake:
        fake.routes["/generate"] = stream_reply()
        client = Client(f"https://localhost:{fake.port}", ca_path=str(self_signed[0]))
        sent = [render(spec(), client.address, {}, [10, 11]) for _ in range(3)]
        outcome = Driver(client.address, ca_path=str(self_signed[0])).run(sent, 2, LIMITS)
    assert [(one.error, one.last_count) for one in outcome.streams] == [(None, 6)] * 3


def test_the_soft_limit_is_raised_and_a_hard_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (64, 500)}
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _which, new: limits.update(now=new))
    assert allow_open_files(100) == 100 + load.SPARE_FILES
    assert limits["now"] == (100 + load.SPARE_FILES, 500)
    with pytest.raises(LimitError, match="hard limit is 500"):
        allow_open_files(1024)


def test_repeats_become_medians_and_sums() -> None:
    quick = Outcome(streams=[finished(0, [0.5, 1.0], 1.0)], started=0, ended=1)
    slow = Outcome(streams=[finished(0, [1.0, 4.0], 4.0)], started=0, ended=4)
    one = spec(output_tokens=2, requests_per_stream=1)
    runs = [
        measure(one, 1, outcome) | {"gpu": None, "power_watts": None, "tokens_per_joule": None}
        for outcome in (quick, slow, quick)
    ]
    warmup = {"requests": 1, "tokens_requested": 2, "tokens_received": 2, "failed": 0, "error": None}
    rung = join(1, 6, warmup, runs)
    assert rung["output_tokens"] == 6
    assert (rung["tokens_requested"], rung["tokens_received"]) == (8, 8)
    assert rung["output_tokens_per_second"] == 2.0
    assert rung["spread"]["output_tokens_per_second"] == 0.75
    assert [one["output_tokens_per_second"] for one in rung["series"]] == [2.0, 0.5, 2.0]
    assert rung["power_watts"] is None
    assert rung["valid"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"vocab_size": 64}')
    return str(tmp_path)


def test_module_measures_and_keeps_the_key_to_itself(run_module: Any, model: str) -> None:
    with serve(Fake(model)) as fake:
        fake.routes["/generate"] = stream_reply()
        code, out = run_module(
            sglang_throughput.main,
            url=fake.url,
            api_key=KEY,
            concurrency=[1, 3],
            requests_per_stream=2,
            input_tokens=5,
            output_tokens=4,
            repeats=2,
            warmup_requests=1,
            sample_gpus=False,
        )
        asked = fake.bodies("/generate")
        keys = {headers.get("authorization") for _path, headers, _body in fake.seen}
    assert code == 0
    assert out["valid"]
    assert [rung["concurrency"] for rung in out["rungs"]] == [1, 3]
    for rung in out["rungs"]:
        assert rung["output_tokens"] == rung["completed"] * 4
        assert rung["completed"] == rung["concurrency"] * 2 * 2
        assert rung["power_watts"] is None
        assert rung["client"]["cpu_seconds"] > 0
    assert out["tokens_requested"] == out["tokens_received"] == 4 * len(asked)
    assert len({json.dumps(body["input_ids"]) for body in asked}) == len(asked)
    assert max(i for body in asked for i in body["input_ids"]) < 64
    assert out["method"]["vocab_size"] == 64
    assert keys == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(out)
    assert "s3cret" not in json.dumps(out)


def test_one_seed_gives_every_rung_and_every_run_its_own_prompts(run_module: Any, model: str) -> None:
    def prompts_of(concurrency: int, run: str) -> list[str]:
        with serve(Fake(model)) as fake:
            fake.routes["/generate"] = stream_reply()
            given = {"seed": 7, "run": run, "concurrency": [concurrency], "repeats": 2, "warmup_requests": 1}
            _, out = run_module(
                sglang_throughput.main, url=fake.url, requests_per_stream=1, input_tokens=20, output_tokens=2,
                sample_gpus=False, **given,
            )  # fmt: skip
            assert (out["method"]["seed"], out["method"]["run"]) == (7, run)
            return sorted(json.dumps(body["input_ids"]) for body in fake.bodies("/generate"))

    calls = [prompts_of(streams, run) for run in ("one", "two") for streams in (1, 2, 4)]
    sent = [prompt for call in calls for prompt in call]
    assert len(sent) == 2 * sum(2 * streams + 1 for streams in (1, 2, 4))
    assert len(set(sent)) == len(sent)
    # The other side of a comparison sends the same.
    assert prompts_of(4, "one") == calls[2]


def test_module_says_each_rung_in_a_line(run_module: Any, model: str) -> None:
    with serve(Fake(model)) as fake:
        fake.routes["/generate"] = stream_reply()
        fake.routes["/server_info"] = page({"max_running_requests": 2})
        _, out = run_module(
            sglang_throughput.main, url=fake.url, concurrency=[1, 3], repeats=2, requests_per_stream=1,
            input_tokens=5, output_tokens=4, sample_gpus=False,
        )  # fmt: skip
    first, second = out["msg"].split("\n")
    rate = out["rungs"][0]["output_tokens_per_second"]
    assert first.startswith(f"1 stream: {rate:.1f} output tok/s (median of 2, spread ")
    assert first.endswith(", 2 answered, 0 failed")
    assert "TTFT p50" in first
    assert "Note: the server runs at most 2 requests at once" in second


class StandIn:
    """A sampler on which every card is at full load and far below its limit."""

    missing = None

    def start(self) -> None: ...

    def stop(self) -> dict[str, Any]:
        lines = "0, 125, 600, 100, 1, 2\n1, 140, 600, 99, 1, 2\n" * 4
        return summarise(parse(lines)) or {}


@pytest.mark.parametrize(
    ("answer", "stall_seconds", "note"),
    [(stream_reply(), 20.0, ladder.LOW_POWER_NOTE), (silence, 0.5, ladder.STALL_NOTE)],
    ids=["slow", "stalled"],
)
def test_cards_that_wait_are_noted(
    answer: Any, stall_seconds: float, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "Sampler", StandIn)
    with serve(Fake()) as fake:
        fake.routes["/generate"] = answer
        one = spec(warmup_requests=0, stall_seconds=stall_seconds, repeats=2)
        rung = ladder.Ladder(Client(fake.url), one, ca_path=None, sample_gpus=True).rung(2)
    assert rung["notes"] == [note]
    assert rung["valid"] == (answer is not silence)
    assert rung["power_watts"] == 265
    assert note in say(rung)
    assert ("INVALID" in say(rung)) == (answer is silence)


@pytest.mark.parametrize(
    "wrong",
    [
        {"output_tokens": -1},
        {"output_tokens": 0},
        {"input_tokens": 0},
        {"concurrency": [0]},
        {"concurrency": [2, 2]},
        {"concurrency": []},
        {"repeats": 0},
        {"requests_per_stream": 0},
        {"warmup_requests": -1},
        {"stall_seconds": 0},
        {"timeout_seconds": 0},
        {"goodput": {"speed": 1}},
        {"goodput": {"ttft_ms": "fast"}},
        {"vocab_size": 65},
        {"vocab_size": 0},
    ],
)
def test_module_refuses_before_it_sends_anything(run_module: Any, model: str, wrong: dict[str, Any]) -> None:
    with serve(Fake(model)) as fake:
        code, out = run_module(sglang_throughput.main, url=fake.url, **wrong)
        assert fake.bodies("/generate") == []
    assert code == 1
    assert next(iter(wrong)) in out["msg"]


def test_module_wants_the_vocabulary_when_it_cannot_be_read(run_module: Any) -> None:
    with serve(Fake("/not/here")) as fake:
        code, out = run_module(sglang_throughput.main, url=fake.url)
    assert code == 1
    assert "vocab_size" in out["msg"]


def test_module_says_that_the_key_is_wrong(run_module: Any) -> None:
    with serve(Fake()) as fake:
        fake.routes["/model_info"] = page({"error": "Unauthorized"}, 401)
        code, out = run_module(sglang_throughput.main, url=fake.url, api_key=KEY)
    assert code == 1
    assert "401" in out["msg"]
    assert KEY not in json.dumps(out)


def test_module_sends_no_load_in_check_mode(run_module: Any, model: str) -> None:
    with serve(Fake(model)) as fake:
        code, out = run_module(sglang_throughput.main, check=True, url=fake.url)
        assert fake.seen == []
    assert (code, out["changed"], out["rungs"]) == (0, False, [])


def test_module_returns_an_invalid_rung_rather_than_failing(run_module: Any, model: str) -> None:
    with serve(Fake(model)) as fake:
        fake.routes["/generate"] = stream_reply(1)
        code, out = run_module(
            sglang_throughput.main, url=fake.url, concurrency=[2], repeats=1, sample_gpus=False
        )
    assert code == 0
    assert not out["valid"]
    assert out["rungs"][0]["invalid_because"]
    assert out["tokens_received"] < out["tokens_requested"]
