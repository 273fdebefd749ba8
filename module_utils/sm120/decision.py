"""Keep a change or take it back: one decision over recorded repeats of both sides."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .outputs import Parting, say_partings
from .stats import median, percentile_sorted, spread

BETTER = "better"
WORSE = "worse"
WITHIN_NOISE = "within noise"
INVALID = "invalid"
TOO_FEW = "too few repeats"
OUTPUTS_DIFFER = "outputs differ"

# Of each series of a rung: is more better? Latencies are judged with a tolerance of their own.
RATE = "output_tokens_per_second"
LATENCIES = ("ttft_ms_p50", "tpot_ms_p50")
# Told, never decided by: what a token costs matters, but nobody gives speed away for it unasked.
EFFICIENCY = "tokens_per_joule"
FIGURES = (RATE, *LATENCIES, EFFICIENCY)


@dataclass(frozen=True)
class Rules:
    """What counts as a difference. Shares, not per cent."""

    min_repeats: int = 5
    min_effect: float = 0.03
    max_latency_growth: float = 0.10
    confidence: float = 0.95
    resamples: int = 4000
    seed: int = 0
    keep_when_equal: bool = False

    def problem(self) -> str | None:
        """One message for the first rule that cannot be."""
        if self.min_repeats < 3:
            return f"min_repeats: must be at least 3, found {self.min_repeats}"
        if not 0 <= self.min_effect < 1:
            return f"min_effect: must be from 0 to below 1, found {self.min_effect}"
        if not self.max_latency_growth >= 0:
            return f"max_latency_growth: must not be negative, found {self.max_latency_growth}"
        if not 0.5 <= self.confidence < 1:
            return f"confidence: must be from 0.5 to below 1, found {self.confidence}"
        if self.resamples < 100:
            return f"resamples: must be at least 100, found {self.resamples}"
        return None


@dataclass(frozen=True)
class Comparison:
    """One figure of one rung, off against on."""

    concurrency: int
    figure: str
    off_median: float
    on_median: float
    ratio: float
    ratio_low: float
    ratio_high: float
    off_spread: float
    on_spread: float
    verdict: str


@dataclass(frozen=True)
class Decision:
    """`keep`: leave the change on. `failed`: the play must end with an error, because somebody has to
    look."""

    verdict: str
    keep: bool
    failed: bool
    reasons: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    explained: tuple[Parting, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio_interval(off: Sequence[float], on: Sequence[float], rules: Rules) -> tuple[float, float]:
    """Bootstrap interval of median(on) / median(off): both sides are drawn anew, with replacement."""
    # Not cryptography: the same series must always give the same decision.
    rng = random.Random(rules.seed)  # noqa: S311
    ratios = sorted(
        median(rng.choices(on, k=len(on))) / median(rng.choices(off, k=len(off)))
        for _ in range(rules.resamples)
    )
    tail = 100 * (1 - rules.confidence) / 2
    return percentile_sorted(ratios, tail), percentile_sorted(ratios, 100 - tail)


def compare(
    concurrency: int, figure: str, off: Sequence[float], on: Sequence[float], rules: Rules
) -> Comparison:
    """A difference counts when the whole interval lies on one side of 1 and the medians differ by enough."""
    ratio = median(on) / median(off)
    low, high = ratio_interval(off, on, rules)
    more_is_better = figure in (RATE, EFFICIENCY)
    enough = rules.min_effect if more_is_better else rules.max_latency_growth
    verdict = WITHIN_NOISE
    if low > 1 and ratio >= 1 + enough:
        verdict = BETTER if more_is_better else WORSE
    elif high < 1 and ratio <= 1 - enough:
        verdict = WORSE if more_is_better else BETTER
    return Comparison(
        concurrency=concurrency,
        figure=figure,
        off_median=round(median(off), 4),
        on_median=round(median(on), 4),
        ratio=round(ratio, 4),
        ratio_low=round(low, 4),
        ratio_high=round(high, 4),
        off_spread=round(spread(off), 4),
        on_spread=round(spread(on), 4),
        verdict=verdict,
    )


Rung = Mapping[str, Any]


def decide(
    off: Sequence[Rung],
    on: Sequence[Rung],
    rules: Rules | None = None,
    *,
    outputs: str | None = None,
    explained: Sequence[Parting] = (),
    on_failure: str | None = None,
) -> Decision:
    """`off` and `on` are the rungs of sglang_throughput (or several calls' rungs, one after the other).

    `outputs` says how the greedy answers of both sides differ beyond explanation; `on_failure` says that the
    server crashed, hung or answered wrong with the change on. Both end the matter whatever the figures say.
    `explained` are the answers that part at a tie: they decide nothing and are told.
    """
    decision = _decide(off, on, rules or Rules(), outputs, on_failure)
    if not explained:
        return decision
    return replace(decision, reasons=(*decision.reasons, say_partings(explained)), explained=tuple(explained))


def _decide(
    off: Sequence[Rung], on: Sequence[Rung], rules: Rules, outputs: str | None, on_failure: str | None
) -> Decision:
    if on_failure:
        return _off(WORSE, True, f"with the change on the server failed: {on_failure}")
    sides = {"off": _gather(off), "on": _gather(on)}
    doubts = [f"{side}: {doubt}" for side, rungs in (("off", off), ("on", on)) for doubt in _doubts(rungs)]
    if set(sides["off"]) != set(sides["on"]) or not sides["off"]:
        doubts.append(f"the rungs differ: off {sorted(sides['off'])}, on {sorted(sides['on'])}")
    if doubts:
        return _off(INVALID, True, *doubts)
    if outputs:
        return _off(OUTPUTS_DIFFER, True, outputs)
    few = [
        f"{side}, concurrency {concurrency}: {len(series[RATE])} repeats, {rules.min_repeats} wanted"
        for side, rungs in sides.items()
        for concurrency, series in rungs.items()
        if len(series[RATE]) < rules.min_repeats
    ]
    if few:
        return _off(TOO_FEW, True, *few)
    compared = tuple(
        compare(
            concurrency, figure, sides["off"][concurrency][figure], sides["on"][concurrency][figure], rules
        )
        for concurrency in sorted(sides["off"])
        for figure in FIGURES
        if sides["off"][concurrency][figure] and sides["on"][concurrency][figure]
    )
    return _weigh(compared, rules)


def _weigh(compared: tuple[Comparison, ...], rules: Rules) -> Decision:
    """One rung that is worse outweighs all that are better: nobody serves at a single concurrency."""
    worse = [_say(one) for one in compared if one.verdict == WORSE and one.figure != EFFICIENCY]
    better = [_say(one) for one in compared if one.verdict == BETTER and one.figure == RATE]
    power = _say_power(compared)
    if worse:
        return Decision(WORSE, False, True, (*worse, *power), compared)
    if better:
        return Decision(BETTER, True, False, (*better, *power), compared)
    kept = "kept, as asked" if rules.keep_when_equal else "not kept"
    reason = f"no rung differs by {rules.min_effect:.0%} and beyond its noise: {kept}"
    return Decision(WITHIN_NOISE, rules.keep_when_equal, False, (reason, *power), compared)


def _say_power(compared: tuple[Comparison, ...]) -> list[str]:
    """What the change does to the energy of a token; nothing where no power was sampled."""
    measured = [one for one in compared if one.figure == EFFICIENCY]
    differs = [f"power, for information: {_say(one)}" for one in measured if one.verdict != WITHIN_NOISE]
    if measured and not differs:
        return ["power, for information: tokens per joule do not differ beyond noise"]
    return differs


def _say(one: Comparison) -> str:
    return (
        f"concurrency {one.concurrency}: {one.figure} {one.off_median:g} -> {one.on_median:g} "
        f"({one.ratio - 1:+.1%}, interval {one.ratio_low - 1:+.1%} to {one.ratio_high - 1:+.1%})"
    )


def _off(verdict: str, failed: bool, *reasons: str) -> Decision:
    return Decision(verdict, False, failed, reasons, ())


def _gather(rungs: Sequence[Rung]) -> dict[int, dict[str, list[float]]]:
    """The repeats of each concurrency, of all calls together."""
    found: dict[int, dict[str, list[float]]] = {}
    for rung in rungs:
        series = found.setdefault(int(rung["concurrency"]), {name: [] for name in FIGURES})
        for repeat in rung["series"]:
            for name, values in series.items():
                if repeat.get(name):  # a latency of 0 was not measured; a rate of 0 is a doubt of its own
                    values.append(float(repeat[name]))
            if repeat.get("power_watts"):
                series[EFFICIENCY].append(repeat[RATE] / repeat["power_watts"])
    return found


def _doubts(rungs: Sequence[Rung]) -> list[str]:
    doubts = []
    for rung in rungs:
        if not rung["valid"]:
            why = "; ".join(rung.get("invalid_because") or ["no reason given"])
            doubts.append(f"concurrency {rung['concurrency']} is invalid: {why}")
        elif any(not repeat[RATE] > 0 for repeat in rung["series"]):
            doubts.append(f"concurrency {rung['concurrency']}: a repeat made no tokens")
    return doubts
