"""The decision over recorded series."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from ansible.module_utils.sm120.decision import Rules, compare, decide, ratio_interval
from ansible.module_utils.sm120.outputs import Answer, Parting, answer_of, difference

# Recorded repeats of a real server (output tok/s at one concurrency) and what was made of them.
STEADY = [3740.0, 3712.0, 3755.0, 3731.0, 3748.0]
STORY_SECOND_ATTEMPT = [236.0, 231.0, 238.0, 235.0, 240.0]
FIVE_PER_CENT_MORE = [3927.0, 3911.0, 3940.0, 3922.0, 3933.0]
NOISY = [3500.0, 3900.0, 3720.0, 3610.0, 3850.0]


def rung(rates: list[float], concurrency: int = 8, **changes: Any) -> dict[str, Any]:
    latencies = changes.pop("tpot", [10.0] * len(rates))
    series = [
        {"output_tokens_per_second": rate, "tpot_ms_p50": tpot, "ttft_ms_p50": 50.0}
        for rate, tpot in zip(rates, latencies, strict=True)
    ]
    return {"concurrency": concurrency, "valid": True, "invalid_because": [], "series": series} | changes


@pytest.mark.parametrize(
    ("off", "on", "verdict", "keep", "failed"),
    [
        (STEADY, FIVE_PER_CENT_MORE, "better", True, False),
        (FIVE_PER_CENT_MORE, STEADY, "worse", False, True),
        (STEADY, STORY_SECOND_ATTEMPT, "worse", False, True),
        (STEADY, STEADY, "within noise", False, False),
        (STEADY, [one * 1.01 for one in STEADY], "within noise", False, False),  # sure, but too little
        (NOISY, [one * 1.04 for one in NOISY], "within noise", False, False),  # enough, but not sure
        (STEADY[:4], FIVE_PER_CENT_MORE, "too few repeats", False, True),
    ],
)
def test_verdicts_on_recorded_series(
    off: list[float], on: list[float], verdict: str, keep: bool, failed: bool
) -> None:
    got = decide([rung(off)], [rung(on)])
    assert (got.verdict, got.keep, got.failed) == (verdict, keep, failed), got.reasons
    assert got.reasons
    json.dumps(got.as_dict())


def test_an_invalid_rung_decides_nothing() -> None:
    short = rung(
        FIVE_PER_CENT_MORE, valid=False, invalid_because=["64 of 64 requests failed: 1 tokens instead of 128"]
    )
    got = decide([rung(STEADY)], [short])
    assert (got.verdict, got.keep, got.failed) == ("invalid", False, True)
    assert "1 tokens instead of 128" in got.reasons[0]
    assert decide([short], [rung(STEADY)]).verdict == "invalid"


def test_no_tokens_is_invalid_and_not_a_division_by_zero() -> None:
    assert decide([rung(STEADY)], [rung([0.0] * 5)]).verdict == "invalid"
    assert decide([rung([0.0] * 5)], [rung(STEADY)]).verdict == "invalid"


@pytest.mark.parametrize("zero", ["off", "on", "both", "one repeat"])
def test_a_latency_of_zero_was_not_measured_and_divides_nothing(zero: str) -> None:
    off, on = rung(STEADY), rung(FIVE_PER_CENT_MORE)
    for side in ("off", "on"):
        for repeat in (off if side == "off" else on)["series"][: 1 if zero == "one repeat" else None]:
            if zero in (side, "both", "one repeat"):
                repeat["tpot_ms_p50"] = 0.0
    got = decide([off], [on])
    assert (got.verdict, got.keep) == ("better", True)
    figures = [one.figure for one in got.comparisons]
    assert ("tpot_ms_p50" in figures) is (zero == "one repeat")
    json.dumps(got.as_dict(), allow_nan=False)


def test_rungs_must_be_the_same() -> None:
    assert decide([rung(STEADY, 8)], [rung(STEADY, 16)]).verdict == "invalid"
    assert decide([], []).verdict == "invalid"


def test_different_outputs_outweigh_any_speed() -> None:
    got = decide([rung(STEADY)], [rung(FIVE_PER_CENT_MORE)], outputs="2 of 8 greedy answers differ")
    assert (got.verdict, got.keep, got.failed) == ("outputs differ", False, True)


def test_a_crash_with_the_change_on_outweighs_everything() -> None:
    got = decide([rung(STEADY)], [], on_failure="crashed: gate.jit_closed")
    assert (got.verdict, got.keep, got.failed) == ("worse", False, True)


def test_one_worse_rung_outweighs_the_better_ones() -> None:
    slower = [one * 0.9 for one in STEADY]
    got = decide([rung(STEADY, 1), rung(STEADY, 64)], [rung(FIVE_PER_CENT_MORE, 1), rung(slower, 64)])
    assert got.verdict == "worse"
    assert any("concurrency 64" in reason for reason in got.reasons)
    assert not any("concurrency 1:" in reason for reason in got.reasons)


def test_latency_that_grows_is_worse_even_at_the_same_rate() -> None:
    got = decide([rung(STEADY)], [rung(STEADY, tpot=[12.0, 12.1, 12.2, 12.0, 12.1])])
    assert got.verdict == "worse"
    assert "tpot_ms_p50" in got.reasons[0]


def test_equal_may_be_kept_when_asked() -> None:
    got = decide([rung(STEADY)], [rung(STEADY)], Rules(keep_when_equal=True))
    assert (got.verdict, got.keep, got.failed) == ("within noise", True, False)


def test_repeats_of_several_calls_count_together() -> None:
    off = [rung([one]) for one in STEADY]
    on = [rung([one]) for one in FIVE_PER_CENT_MORE]
    assert decide(off, on).verdict == "better"


def test_the_same_series_give_the_same_decision() -> None:
    assert decide([rung(NOISY)], [rung(STEADY)]) == decide([rung(NOISY)], [rung(STEADY)])


def test_false_alarms_are_rare_and_real_effects_are_found() -> None:
    rng = random.Random(11)  # noqa: S311 - a reproducible experiment
    rules = Rules(resamples=400)

    def draw(mean: float) -> list[float]:
        return [rng.gauss(mean, 0.02 * mean) for _ in range(7)]

    def verdicts(effect: float) -> list[str]:
        return [
            compare(1, "output_tokens_per_second", draw(1000), draw(1000 * effect), rules).verdict
            for _ in range(200)
        ]

    assert verdicts(1.0).count("within noise") >= 190
    assert verdicts(1.10).count("better") >= 190
    assert verdicts(0.90).count("worse") >= 190


def test_the_interval_holds_the_ratio() -> None:
    low, high = ratio_interval(STEADY, FIVE_PER_CENT_MORE, Rules())
    assert low < 3927 / 3740 < high
    assert low > 1


@pytest.mark.parametrize(
    "rules",
    [
        Rules(min_repeats=2),
        Rules(min_effect=1.0),
        Rules(min_effect=-0.1),
        Rules(max_latency_growth=-1),
        Rules(confidence=0.2),
        Rules(resamples=10),
    ],
)
def test_rules_that_cannot_be_are_named(rules: Rules) -> None:
    assert rules.problem() is not None
    assert Rules().problem() is None


SURE = Answer((1, 2, 3), (((-0.1, 1), (-4.0, 9)), ((-0.1, 2), (-4.0, 9)), ((-0.1, 3), (-4.0, 9))))
TIE = Answer((1, 2, 3), (((-0.1, 1), (-4.0, 9)), ((-0.70, 2), (-0.75, 9)), ((-0.1, 3), (-4.0, 9))))


@pytest.mark.parametrize(
    ("off", "on", "differs", "explained"),
    [
        (SURE, Answer((1, 2, 3)), False, []),
        (SURE, Answer((1, 9, 5)), True, []),  # the model was sure, and another token came
        (TIE, Answer((1, 9, 5)), False, [Parting(1, 2)]),  # a tie: what follows may be anything
        (TIE, Answer((1, 8, 3)), True, []),  # not among the candidates
        (SURE, Answer((1, 2)), True, []),  # cut short
        (Answer((1, 2, 3)), Answer((1, 9, 3)), True, []),  # no candidates known: no excuse
    ],
)
def test_greedy_answers_are_equal_or_explained(
    off: Answer, on: Answer, differs: bool, explained: list[Parting]
) -> None:
    wrong, partings = difference([off], [on])
    assert ((wrong is not None), partings) == (differs, explained)


def test_answers_must_be_as_many() -> None:
    assert difference([SURE], [])[0] is not None
    assert difference([], [])[0] is not None


def test_a_parting_that_is_explained_is_told_with_every_verdict() -> None:
    _, partings = difference([SURE, TIE], [Answer((1, 2, 3)), Answer((1, 9, 5))])
    for on, verdict in (
        (FIVE_PER_CENT_MORE, "better"),
        (STORY_SECOND_ATTEMPT, "worse"),
        (STEADY[:4], "too few repeats"),
    ):
        got = decide([rung(STEADY)], [rung(on)], explained=partings)
        assert got.verdict == verdict
        assert "at a tie" in got.reasons[-1]
        assert "prompt 2 from token 2 on" in got.reasons[-1]
        assert got.as_dict()["explained"] == ({"prompt": 2, "token": 2},)
    assert decide([rung(STEADY)], [rung(STEADY)]).explained == ()


def powered(rates: list[float], watts: float) -> dict[str, Any]:
    told = rung(rates)
    for repeat in told["series"]:
        repeat["power_watts"] = watts
    return told


@pytest.mark.parametrize(
    ("watts", "verdict", "said"),
    [
        (1000.0, "within noise", "tokens per joule do not differ beyond noise"),
        (1250.0, "worse", "tokens_per_joule 3.74 -> 2.992 (-20.0%"),
        (800.0, "better", "tokens_per_joule 3.74 -> 4.675 (+25.0%"),
    ],
)
def test_the_energy_of_a_token_is_told_and_decides_nothing(watts: float, verdict: str, said: str) -> None:
    got = decide([powered(STEADY, 1000.0)], [powered(STEADY, watts)])
    (one,) = [each for each in got.comparisons if each.figure == "tokens_per_joule"]
    assert one.verdict == verdict
    assert (got.verdict, got.keep, got.failed) == ("within noise", False, False)
    assert said in got.reasons[-1]
    assert "for information" in got.reasons[-1]
    both = decide([powered(STEADY, 1000.0)], [powered(FIVE_PER_CENT_MORE, watts)])
    assert both.verdict == "better"


def test_without_power_nothing_is_said_about_it() -> None:
    got = decide([rung(STEADY)], [rung(STEADY)])
    assert [each.figure for each in got.comparisons] == [
        "output_tokens_per_second",
        "ttft_ms_p50",
        "tpot_ms_p50",
    ]
    assert not any("power" in reason for reason in got.reasons)
    # One side alone compares with nothing.
    got = decide([powered(STEADY, 1000.0)], [rung(STEADY)])
    assert "tokens_per_joule" not in [each.figure for each in got.comparisons]


def test_answers_are_read_from_generate() -> None:
    generated = {
        "output_ids": [5, 6],
        "meta_info": {"output_top_logprobs": [[[-0.1, 5, None], [-2.0, 7, None]], [[None, 6, None]]]},
    }
    assert answer_of(generated) == Answer((5, 6), (((-0.1, 5), (-2.0, 7)), ()))
