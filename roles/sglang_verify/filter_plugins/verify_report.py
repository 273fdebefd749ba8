"""Filters of the report: thresholds that were missed, and the ladder as a picture."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable
from typing import Any

RELATIONS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": (">=", operator.ge),
    "maximum": ("<=", operator.le),
}


def _figure(rung: dict[str, Any], path: str) -> float | None:
    value: Any = rung
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def missed_thresholds(
    results: list[dict[str, Any]], thresholds: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The thresholds that a run misses, with what was found. A figure that is absent is missed."""
    missed = []
    for target in results:
        for rung in target["rungs"]:
            for threshold in thresholds:
                if threshold.get("concurrency", rung["concurrency"]) != rung["concurrency"]:
                    continue
                found = _figure(rung, threshold["figure"])
                for bound, (relation, holds) in RELATIONS.items():
                    if bound in threshold and (found is None or not holds(found, float(threshold[bound]))):
                        missed.append(
                            {
                                "instance": target["instance"],
                                "concurrency": rung["concurrency"],
                                "figure": threshold["figure"],
                                "relation": relation,
                                "limit": threshold[bound],
                                "found": found,
                            }
                        )
    return missed


def ladder_svg(rungs: list[dict[str, Any]]) -> str:
    """Output tokens per second and TTFT over concurrency, as an SVG element."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    concurrency = [rung["concurrency"] for rung in rungs]
    figure, (rate, wait) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    rate.plot(concurrency, [rung["output_tokens_per_second"] for rung in rungs], "o-")
    rate.set_ylabel("output tokens per second")
    wait.plot(concurrency, [rung["ttft_ms"]["p50"] for rung in rungs], "o-", label="p50")
    wait.plot(concurrency, [rung["ttft_ms"]["p99"] for rung in rungs], "o--", label="p99")
    wait.set_ylabel("TTFT, ms")
    wait.legend(frameon=False)
    for axis in (rate, wait):
        axis.set_xlabel("concurrent requests")
        axis.set_xscale("log", base=2)
        axis.set_xticks(concurrency, [str(streams) for streams in concurrency])
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    plt.close(figure)
    return picture.getvalue()[picture.getvalue().index("<svg") :]


class FilterModule:
    """Found by Ansible in the role."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"missed_thresholds": missed_thresholds, "ladder_svg": ladder_svg}
