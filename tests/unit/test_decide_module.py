"""sglang_decide over rungs and answers as the other modules return them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sglang_decide

RunModule = Callable[..., tuple[int, dict[str, Any]]]


def side(rate: float, tokens: tuple[int, ...] = (5, 6, 7), repeats: int = 6) -> dict[str, Any]:
    series = [
        {"output_tokens_per_second": rate + shift, "ttft_ms_p50": 50.0, "tpot_ms_p50": 10.0}
        for shift in range(repeats)
    ]
    answer = {"output_ids": list(tokens), "meta_info": {"output_top_logprobs": []}}
    return {"rungs": [{"concurrency": 8, "valid": True, "series": series}], "answers": [answer]}


@pytest.mark.parametrize(
    ("on", "verdict", "keep", "needs_attention"),
    [
        (side(1200), "better", True, False),
        (side(800), "worse", False, True),
        (side(1000), "within noise", False, False),
        (side(1200, tokens=(5, 9, 7)), "outputs differ", False, True),
        (side(1200, repeats=4), "too few repeats", False, True),
    ],
)
def test_a_verdict_of_each_kind(
    run_module: RunModule, on: dict[str, Any], verdict: str, keep: bool, needs_attention: bool
) -> None:
    code, told = run_module(sglang_decide.main, side_off=side(1000), side_on=on)
    assert code == 0
    assert (told["verdict"], told["keep"], told["needs_attention"]) == (verdict, keep, needs_attention)
    assert told["reasons"]
    assert told["changed"] is False


def test_a_server_that_failed_outweighs_figures(run_module: RunModule) -> None:
    _, told = run_module(sglang_decide.main, side_off=side(1000), side_on={}, on_failure="it hung")
    assert (told["verdict"], told["keep"], told["needs_attention"]) == ("worse", False, True)


def test_rules_that_cannot_be_are_refused(run_module: RunModule) -> None:
    code, told = run_module(sglang_decide.main, side_off=side(1), side_on=side(1), min_repeats=1)
    assert code == 1
    assert "min_repeats" in told["msg"]


@pytest.mark.parametrize("answers", [None, "none"])
def test_a_side_without_answers_is_named(run_module: RunModule, answers: Any) -> None:
    other = {"rungs": side(1)["rungs"]} | ({"answers": answers} if answers else {})
    code, told = run_module(sglang_decide.main, side_off=side(1), side_on=other)
    assert code == 1
    assert "side_on: wanted answers" in told["msg"]
