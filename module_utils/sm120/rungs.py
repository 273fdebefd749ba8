"""Several repeats made one rung: medians, how far apart the repeats lie, totals of what was counted."""

from __future__ import annotations

from typing import Any

from .stats import median, spread

TOTALS = ("completed", "failed", "input_tokens", "output_tokens", "cached_tokens", "tokens_received")
RATES = (
    "output_tokens_per_second",
    "total_tokens_per_second",
    "requests_per_second",
    "mean_concurrency",
    "goodput_requests_per_second",
)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def join(
    concurrency: int, requested: int, warmup: dict[str, Any], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Counts are summed over the repeats, rates and latencies are medians of them."""
    rung: dict[str, Any] = {"concurrency": concurrency, "repeats": len(runs)}
    rung |= {name: sum(run[name] for run in runs) for name in TOTALS}
    rung["tokens_requested"] = requested + warmup["tokens_requested"]
    rung["tokens_received"] += warmup["tokens_received"]
    rung["warmup"] = warmup
    rung["duration_seconds"] = round(sum(run["duration_seconds"] for run in runs), 4)
    rung |= {name: _middle([run[name] for run in runs]) for name in RATES}
    rung |= {name: _middle_distribution([run[name] for run in runs]) for name in LATENCIES}
    rung["spread"] = {
        "output_tokens_per_second": round(spread([run["output_tokens_per_second"] for run in runs]), 4),
        "tpot_ms_p50": _spread_of("tpot_ms", runs),
        "ttft_ms_p50": _spread_of("ttft_ms", runs),
    }
    rung["power_watts"] = _middle([run["power_watts"] for run in runs])
    rung["tokens_per_joule"] = _middle([run["tokens_per_joule"] for run in runs])
    rung["gpu"] = [run["gpu"] for run in runs if run["gpu"]] or None
    rung["client"] = {
        name: max((run["client"][name] for run in runs if run["client"][name] is not None), default=None)
        for name in runs[0]["client"]
    }
    rung["invalid_because"] = [
        f"repeat {number}: {doubt}"
        for number, run in enumerate(runs, start=1)
        for doubt in run["invalid_because"]
    ]
    if warmup["failed"]:
        rung["invalid_because"].insert(0, f"warm-up: {warmup['failed']} requests failed: {warmup['error']}")
    rung["valid"] = not rung["invalid_because"]
    rung["notes"] = list(dict.fromkeys(note for run in runs for note in run["notes"]))
    rung["errors"] = _merge_errors(runs)
    rung["series"] = [_series(run) for run in runs]
    return rung


def say(rung: dict[str, Any]) -> str:
    """One line for whoever watches the ladder."""
    parts = [f"{rung['output_tokens_per_second'] or 0:.1f} output tok/s"]
    if rung["repeats"] > 1:
        parts[0] += f" (median of {rung['repeats']}, spread {rung['spread']['output_tokens_per_second']:.0%})"
    parts += [
        f"{name.removesuffix('_ms').upper()} p50 {rung[name]['p50']:.1f} ms"
        for name in ("ttft_ms", "tpot_ms")
        if rung[name]
    ]
    parts.append(f"{rung['completed']} answered, {rung['failed']} failed")
    if rung["power_watts"]:
        parts.append(f"{rung['power_watts']:.0f} W, {rung['tokens_per_joule']:.2f} tok/J")
    streams = "1 stream" if rung["concurrency"] == 1 else f"{rung['concurrency']} streams"
    told = f"{streams}: {', '.join(parts)}"
    if not rung["valid"]:
        told += f". INVALID: {'; '.join(rung['invalid_because'])}"
    return told + "".join(f". Note: {note}" for note in rung["notes"])


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def _middle_distribution(values: list[dict[str, float] | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {name: round(median(value[name] for value in known), 3) for name in known[0]}


def _spread_of(latency: str, runs: list[dict[str, Any]]) -> float | None:
    known = [run[latency]["p50"] for run in runs if run[latency]]
    return round(spread(known), 4) if known else None


def _merge_errors(runs: list[dict[str, Any]]) -> dict[str, int]:
    merged: dict[str, int] = {}
    for run in runs:
        for error, times in run["errors"].items():
            merged[error] = merged.get(error, 0) + times
    return merged


def _series(run: dict[str, Any]) -> dict[str, Any]:
    """What a decision needs of each repeat: a median alone cannot say whether a difference is noise."""
    return {
        "output_tokens_per_second": run["output_tokens_per_second"],
        "total_tokens_per_second": run["total_tokens_per_second"],
        "duration_seconds": run["duration_seconds"],
        "ttft_ms_p50": run["ttft_ms"]["p50"] if run["ttft_ms"] else None,
        "tpot_ms_p50": run["tpot_ms"]["p50"] if run["tpot_ms"] else None,
        "e2e_ms_p50": run["e2e_ms"]["p50"] if run["e2e_ms"] else None,
        "power_watts": run["power_watts"],
        "valid": run["valid"],
    }
