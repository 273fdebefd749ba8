"""Verdicts, the speed table, and a next step for every failure."""

from __future__ import annotations

import itertools

import pytest
from ansible.module_utils.sm120.probe_cases import Case
from ansible.module_utils.sm120.probe_report import (
    BUILD_STAGES,
    NEXT,
    STAGES,
    Stage,
    case_rows,
    loses_from,
    merge_case,
    merge_groups,
    next_step,
    speed_rows,
    speed_summary,
    verdict,
)


def stages(**status: str) -> list[Stage]:
    return [Stage(name, status.get(name, "passed")) for name in STAGES]


def test_passed_needs_every_stage() -> None:
    assert verdict(stages(), STAGES) == "passed"
    for name in STAGES:
        assert verdict(stages(**{name: "not_run"}), STAGES) == "incomplete"
        assert verdict(stages(**{name: "failed"}), STAGES) == "failed"


def test_a_build_alone_is_compiled_never_passed() -> None:
    rest = {name: "not_run" for name in STAGES if name not in BUILD_STAGES}
    assert verdict(stages(**rest), BUILD_STAGES) == "compiled"
    assert verdict(stages(**rest, jit="not_run"), BUILD_STAGES) == "incomplete"
    assert verdict(stages(**rest), ("toolchain", "jit", "nccl")) == "incomplete"


def rows(**ratios: float) -> list[dict[str, object]]:
    return [{"hidden": 6144, "tokens": int(t[1:]), "ratio": r} for t, r in ratios.items()]


@pytest.mark.parametrize(
    ("ratios", "tokens"),
    [
        ({"t1": 3.0, "t64": 1.2, "t2048": 1.0}, None),
        ({"t1": 3.0, "t64": 0.9, "t2048": 0.8}, 64),
        ({"t1": 0.9, "t64": 1.1, "t2048": 0.8}, 2048),
        ({"t1": 0.9, "t64": 0.9, "t2048": 1.8}, None),
        ({"t1": 0.5}, 1),
    ],
)
def test_the_size_from_which_fusion_loses(ratios: dict[str, float], tokens: int | None) -> None:
    assert loses_from(rows(**ratios)) == tokens


def test_a_size_is_as_slow_as_its_slowest_group() -> None:
    found = [{(6144, 8): {"fused": 5.0, "unfused": 9.0}}, {(6144, 8): {"fused": 7.0, "unfused": 8.0}}]
    assert merge_groups(found) == {(6144, 8): {"fused": 7.0, "unfused": 9.0}}
    assert merge_groups([]) == {}


def measured(fused: float, unfused: float, tokens: int = 8) -> dict[tuple[int, int], dict[str, float]]:
    return {(6144, tokens): {"fused": fused, "unfused": unfused}}


def test_ratio_is_unfused_to_fused() -> None:
    assert speed_rows(measured(5.0, 15.0))[0] == {
        "hidden": 6144,
        "tokens": 8,
        "fused_microseconds": 5.0,
        "unfused_microseconds": 15.0,
        "ratio": 3.0,
    }


def test_slower_somewhere_is_told_and_slower_everywhere_fails() -> None:
    mixed = speed_rows({**measured(5, 15), **measured(20, 10, 2048)})
    assert speed_summary(mixed, 3.0)["too_slow"] == []
    assert speed_summary(mixed, 3.0)["slower_at"] == ["6144x2048"]
    assert speed_summary(mixed, 3.0)["loses_from_tokens"] == {"6144": 2048}
    assert len(speed_summary(mixed, 1.9)["too_slow"]) == 1
    assert len(speed_summary(speed_rows(measured(11, 10)), 3.0)["too_slow"]) == 1
    assert speed_summary([], 3.0)["too_slow"] == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_case_has_the_worst_figure_of_all_ranks(ranks: int) -> None:
    found = {
        rank: {"worst": rank / 10, "rms": 1 - rank / 10, "bias": 0.0, "error": 0.001, "problems": []}
        for rank in range(ranks)
    }
    merged = merge_case(found)
    assert (merged["worst"], merged["rms"], merged["ok"]) == ((ranks - 1) / 10, 1.0, True)


def test_a_figure_that_is_not_finite_on_one_rank_has_no_number() -> None:
    good = {"worst": 0.9, "rms": 0.7, "bias": 0.2, "error": 0.002, "problems": []}
    lost = {**good, "worst": None, "error": None, "problems": ["norm: 3 elements not finite, row 1"]}
    merged = merge_case({0: good, 1: lost})
    assert (merged["worst"], merged["error"], merged["rms"], merged["ok"]) == (None, None, 0.7, False)
    planned = [Case("eager", 4096, tokens, "bf16", "auto") for tokens in (1, 2, 4)]
    found = [{"name": case.name, **merge_case({0: good})} for case in planned]
    found[1] |= merged
    (row,) = case_rows(planned, found)
    assert (row["right"], row["error"], row["worst"]) == (2, None, None)


def test_every_failure_has_a_next_step_and_a_silent_nccl_is_p2p() -> None:
    causes = ["hang", "time_limit", "crash", "wrong_numbers", "slow", "gate_closed", "exception", "memory"]
    for stage, cause in itertools.product(STAGES, causes):
        assert next_step(stage, cause) in NEXT.values()
    assert next_step("nccl", "hang") == NEXT["p2p"]
    assert "NCCL_P2P_DISABLE=1" in NEXT["p2p"]
    assert next_step("nccl", "ranks") == NEXT["ranks"]
    assert next_step("numbers", "hang") == NEXT["hang"]
    assert "systemctl stop sglang-a.service" in next_step("speed", "memory", ["sglang-a.service"])
    assert next_step("numbers", "wrong_numbers") == NEXT["wrong"]


def test_cases_of_one_shape_are_one_row_with_its_worst_figures() -> None:
    planned = [
        Case(kind, 4096, tokens, "bf16", "auto") for kind in ("eager", "graph") for tokens in (1, 2, 4)
    ]
    figures = [(True, 0.002, 0.7), (False, 0.5, 3.0), (True, 0.003, 0.4), (True, 0.001, 0.2)]
    found = [
        {"name": case.name, "ok": ok, "error": error, "worst": worst}
        for case, (ok, error, worst) in zip(planned, figures, strict=False)
    ]  # the last two never ran
    assert case_rows(planned, found) == [
        {
            "kind": "eager",
            "hidden": 4096,
            "dtype": "bf16",
            "cases": 3,
            "right": 2,
            "error": 0.5,
            "worst": 3.0,
        },
        {
            "kind": "graph",
            "hidden": 4096,
            "dtype": "bf16",
            "cases": 1,
            "right": 1,
            "error": 0.001,
            "worst": 0.2,
        },
    ]
    assert case_rows(planned, []) == []
