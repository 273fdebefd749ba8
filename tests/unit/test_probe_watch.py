"""The supervisor's book-keeping with a clock of its own: limits, hangs, crashes, and who is to blame."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.sm120.probe_report import STAGES
from ansible.module_utils.sm120.probe_watch import (
    PEERS_SECONDS,
    STAGE_LIMIT_SECONDS,
    START_LIMIT_SECONDS,
    STEP_LIMIT_SECONDS,
    Watch,
)

GOOD = {"worst": 0.9, "rms": 0.7, "bias": 0.2, "error": 0.002, "problems": []}


def watch(
    ranks: int = 2,
    stages: tuple[str, ...] = ("nccl", "numbers"),
    planned: tuple[str, ...] = (),
    **limits: float,
) -> Watch:
    return Watch(ranks, stages, 0.0, limits, planned=planned)


def tell(w: Watch, now: float, kind: str, *, ranks: tuple[int, ...] | None = None, **values: Any) -> None:
    for rank in ranks if ranks is not None else tuple(w.ranks):
        w.feed(rank, {"t": kind, **values}, now)


def statuses(w: Watch) -> dict[str, str]:
    return {stage.name: stage.status for stage in w.stages.values()}


def test_every_stage_has_both_limits() -> None:
    assert set(STAGE_LIMIT_SECONDS) == set(STEP_LIMIT_SECONDS) == set(STAGES)
    assert all(STEP_LIMIT_SECONDS[name] < STAGE_LIMIT_SECONDS[name] for name in STAGES)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_good_run_passes_and_is_over_when_all_are_done(ranks: int) -> None:
    w = watch(ranks)
    tell(w, 1, "begin", stage="nccl")
    tell(w, 3, "end", stage="nccl", nccl="2.28.9")
    tell(w, 3, "begin", stage="numbers")
    tell(w, 4, "case", case="eager a", **GOOD)
    tell(w, 5, "end", stage="numbers")
    assert not w.over(5)
    tell(w, 5, "done")
    w.check(1e6, 10)
    assert w.over(5)
    assert statuses(w) == {"nccl": "passed", "numbers": "passed"}
    assert w.stages["nccl"].seconds == 2
    assert w.stages["nccl"].facts == {"nccl": "2.28.9"}
    assert w.cases() == [{"name": "eager a", "ok": True, **GOOD}]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_bad_rank_of_many_fails_the_case_and_is_named(ranks: int) -> None:
    w = watch(ranks, ("numbers",))
    tell(w, 1, "begin", stage="numbers")
    tell(w, 2, "case", ranks=tuple(range(ranks - 1)), case="eager a", **GOOD)
    bad = {**GOOD, "worst": 9.0, "problems": ["norm: 2048 elements unwritten"]}
    tell(w, 2, "case", ranks=(ranks - 1,), case="eager a", **bad)
    tell(w, 3, "end", stage="numbers")
    assert statuses(w) == {"numbers": "failed"}
    first = w.first_failure()
    assert first is not None
    assert (first.cause, first.case) == ("wrong_numbers", "eager a")
    assert f"rank {ranks - 1}" in first.text
    assert w.cases()[0]["worst"] == 9.0


def test_a_case_that_one_rank_did_not_report_is_not_a_case() -> None:
    w = watch(2, ("numbers",))
    tell(w, 1, "begin", stage="numbers")
    tell(w, 2, "case", ranks=(0,), case="eager a", **GOOD)
    assert w.cases() == []


@pytest.mark.parametrize(
    ("planned", "told", "words"),
    [
        ((), (), "0 of 0 cases right; nothing was computed"),
        (
            ("eager a", "eager b", "graph a"),
            ("eager a",),
            "1 of 2 cases right; not told by all ranks: eager b",
        ),
        (("eager a", "eager b", "graph a"), ("eager a", "eager b"), ""),
    ],
)
def test_a_stage_with_fewer_cases_than_planned_fails(
    planned: tuple[str, ...], told: tuple[str, ...], words: str
) -> None:
    w = watch(2, ("numbers",), planned)
    tell(w, 1, "begin", stage="numbers")
    for name in told:
        tell(w, 2, "case", case=name, **GOOD)
    tell(w, 3, "end", stage="numbers")
    assert statuses(w) == {"numbers": "failed" if words else "passed"}
    assert [(each.cause, each.text) for each in w.failures] == ([("cases_lacking", words)] if words else [])


def test_graph_cases_are_judged_with_the_graph_stage() -> None:
    w = watch(2, ("numbers", "graph"))
    tell(w, 1, "begin", stage="numbers")
    tell(w, 2, "case", case="eager a", **GOOD)
    tell(w, 2, "end", stage="numbers")
    tell(w, 3, "begin", stage="graph")
    tell(w, 4, "case", case="graph a", **{**GOOD, "problems": ["norm: 3 times the worst case"]})
    tell(w, 5, "end", stage="graph")
    assert statuses(w) == {"numbers": "passed", "graph": "failed"}


def test_a_hang_is_found_at_the_step_limit_and_blames_the_rank_that_does_not_wait() -> None:
    w = watch(4, ("numbers",))
    tell(w, 10, "begin", stage="numbers")
    tell(w, 10, "beat", case="eager a")
    tell(w, 11, "beat", ranks=(0, 1, 3), case="eager a: waiting for the result")
    w.check(10 + STEP_LIMIT_SECONDS["numbers"], 1e6)
    assert not w.failures
    w.check(10.5 + STEP_LIMIT_SECONDS["numbers"], 1e6)
    first = w.first_failure()
    assert first is not None
    assert (first.stage, first.cause, first.rank, first.case) == ("numbers", "hang", 2, "eager a")
    assert statuses(w) == {"numbers": "failed"}


def test_a_rank_that_is_through_the_stage_is_not_hanging() -> None:
    w = watch(2, ("numbers",))
    tell(w, 0, "begin", stage="numbers")
    tell(w, 1, "end", ranks=(0,), stage="numbers")
    tell(w, 90, "beat", ranks=(1,), case="eager z")
    w.check(91, 1e6)
    assert not w.failures


def test_talking_does_not_extend_the_stage_limit() -> None:
    w = watch(2, ("numbers",), numbers=100)
    tell(w, 0, "begin", stage="numbers")
    for now in range(0, 101, 10):
        tell(w, now, "beat", case="eager a")
        w.check(now, 1e6)
    assert not w.failures
    tell(w, 101, "beat", case="eager a")
    w.check(101, 1e6)
    first = w.first_failure()
    assert first is not None
    assert first.cause == "time_limit"


def test_a_rank_that_never_speaks_is_found() -> None:
    w = watch(2)
    tell(w, 1, "begin", ranks=(0,), stage="nccl")
    tell(w, START_LIMIT_SECONDS, "beat", ranks=(0,), case="joining")
    w.check(START_LIMIT_SECONDS + 1, 1e6)
    first = w.first_failure()
    assert first is not None
    assert (first.cause, first.rank) == ("time_limit", 1)


def test_the_whole_has_a_limit_too() -> None:
    w = watch(2, ("numbers",))
    tell(w, 0, "begin", stage="numbers")
    tell(w, 49, "beat", case="eager a")
    w.check(51, 50)
    first = w.first_failure()
    assert first is not None
    assert first.cause == "time_limit"


def test_the_crash_is_the_cause_and_the_peers_errors_are_not() -> None:
    w = watch(2, ("numbers",))
    tell(w, 0, "begin", stage="numbers")
    tell(w, 1, "beat", case="eager a")
    w.feed(0, {"t": "fail", "cause": "exception", "text": "connection closed by peer"}, 2)
    w.exited(0, 3, 2)
    w.exited(1, -11, 2.1)
    assert len(w.failures) == 2
    first = w.first_failure()
    assert first is not None
    assert (first.cause, first.rank, first.case) == ("crash", 1, "eager a")
    assert "signal 11" in first.text
    assert not w.over(2 + PEERS_SECONDS / 2)
    assert w.over(2 + PEERS_SECONDS)


def test_leaving_without_a_word_is_a_crash_even_with_exit_code_0() -> None:
    w = watch(2)
    tell(w, 0, "begin", stage="nccl")
    w.exited(1, 0, 1)
    assert [f.cause for f in w.failures] == ["crash"]


def test_speed_is_that_of_the_slowest_rank() -> None:
    w = watch(2, ("speed",))
    tell(w, 0, "begin", stage="speed")
    for rank, fused in ((0, 4.0), (1, 6.0)):
        w.feed(
            rank,
            {"t": "speed", "hidden": 4096, "tokens": 8, "microseconds": {"fused": fused, "unfused": 9.0}},
            1,
        )
    w.feed(0, {"t": "speed", "hidden": 4096, "tokens": 16, "microseconds": {"fused": 1.0, "unfused": 9.0}}, 1)
    assert w.speed() == {(4096, 8): {"fused": 6.0, "unfused": 9.0}}
