"""Filter of the role: thresholds that a run misses."""

from __future__ import annotations

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
    """The thresholds that a run misses, with what was found. A figure that is absent, or of a rung that was not
    measured, is missed."""
    missed = []
    for target in results:
        for threshold in thresholds:
            wanted = threshold.get("concurrency")
            rungs = [rung for rung in target["rungs"] if wanted in (None, rung["concurrency"])]
            for rung in rungs or [{"concurrency": wanted}]:
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


def format_missed(miss: dict[str, Any]) -> str:
    """One missed threshold as a sentence."""
    return (
        f"{miss['instance']}, concurrency {miss['concurrency']}: wanted {miss['figure']} {miss['relation']} "
        f"{miss['limit']}, found {miss['found']}"
    )


class FilterModule:
    """Found by Ansible in the role."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"missed_thresholds": missed_thresholds, "format_missed": format_missed}
