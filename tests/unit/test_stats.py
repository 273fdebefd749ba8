from __future__ import annotations

import pytest
from ansible.module_utils.sm120.stats import distribution_ms, median, percentile_sorted, spread


@pytest.mark.parametrize(
    ("percent", "wanted"), [(0, 1.0), (50, 2.5), (90, 3.7), (95, 3.85), (99, 3.97), (100, 4.0)]
)
def test_percentiles_interpolate_linearly_as_numpy_does(percent: float, wanted: float) -> None:
    assert percentile_sorted([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(wanted)


def test_a_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile_sorted([], 50)


def test_median_and_spread() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([90.0, 100.0, 105.0]) == pytest.approx(0.15)
    assert spread([7.0]) == 0.0
    assert spread([0.0, 0.0]) == 0.0


def test_distribution_is_in_milliseconds_and_order_does_not_matter() -> None:
    assert distribution_ms([0.004, 0.001, 0.003, 0.002]) == {
        "mean": 2.5,
        "p50": 2.5,
        "p90": 3.7,
        "p95": 3.85,
        "p99": 3.97,
    }
    assert distribution_ms([]) is None
