"""The few statistics that figures and decisions are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

PERCENTILES = (50, 90, 95, 99)


def percentile_sorted(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks (numpy's default); `values` must be sorted."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    position = (len(values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def median(values: Iterable[float]) -> float:
    return percentile_sorted(sorted(values), 50)


def spread(values: Sequence[float]) -> float:
    """(max - min) / median: 0.05 says that the repeats lie within five per cent. 0 for a single value."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def distribution_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """mean, p50, p90, p95 and p99 in milliseconds of values in seconds; None when there are none."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    figures = {"mean": math.fsum(ordered) / len(ordered)}
    figures |= {f"p{percent}": percentile_sorted(ordered, percent) for percent in PERCENTILES}
    return {name: round(value * 1000, 3) for name, value in figures.items()}
