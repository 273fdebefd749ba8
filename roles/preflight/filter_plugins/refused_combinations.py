"""Filters of the role: combinations that are known to break, and what the instances need of a guest."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from packaging.version import Version

NOTHING = (None, "", False, 0, "0")
# Variables of the role sglang_server that stand for more than the argument of their name.
DSA_ARGUMENTS = ("dsa-prefill-backend", "dsa-decode-backend")
# Both words that SGLang knows, that which sglang_server takes first before the other.
TENSOR = ("tp-size", "tensor-parallel-size")
STAGES = ("pp-size", "pipeline-parallel-size")
PCIE_IPC = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"

Values = dict[str, Any]


def _dict(value: Any) -> Values:
    """What is not of its type is told by the argument specs, or by SGLang; here it only must not stand in the way."""
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int:
    return int(value) if str(value).isdigit() and int(value) else 1


def profile_of(name: str, profiles: Values) -> Values:
    """A profile with what it takes from the one it is like."""
    own = profiles.get(name, {})
    like = profiles.get(own.get("like", ""), {})
    parts = {part: {**like.get(part, {}), **own.get(part, {})} for part in ("arguments", "environment")}
    return {**parts, "model_mib": own.get("model_mib", like.get("model_mib", 0))}


def _effective(instance: Values, profile: Values, renamed: list[Values]) -> tuple[Values, Values]:
    """(arguments, environment) of an instance, as the role sglang_server puts them together."""
    typed = {name.replace("_", "-"): value for name, value in instance.items() if value not in NOTHING}
    if instance.get("dsa_backend"):
        typed |= dict.fromkeys(DSA_ARGUMENTS, instance["dsa_backend"])
    extra = _dict(instance.get("extra_arguments"))
    new_words = {each["old"]: each["new"] for each in renamed}
    arguments = {**profile["arguments"], **typed, **{new_words.get(k, k): extra[k] for k in extra}}
    environment = dict(profile["environment"])
    if str(instance.get("pcie_ipc_allreduce", "")).lower() in ("true", "yes", "on", "1"):
        environment[PCIE_IPC] = "1"
    return arguments, environment | _dict(instance.get("extra_environment"))


def _gpus(arguments: Values) -> tuple[int, int]:
    """(GPUs in all, pipeline stages)."""

    def size(words: tuple[str, ...]) -> int:
        return _number(next((arguments[word] for word in words if word in arguments), 1))

    stages = size(STAGES)
    return size(TENSOR) * stages, stages


def _met(rule: Values, instance: Values, arguments: Values, environment: Values, release: str) -> bool:
    def given(name: str, wanted: Any) -> bool:
        value = arguments.get(name)
        return value not in NOTHING and (wanted == "any" or value in wanted)

    def matches(name: str, pattern: str) -> bool:
        return re.search(pattern, str(environment.get(name, ""))) is not None

    gpus, stages = _gpus(arguments)
    return (
        all(given(name, wanted) for name, wanted in rule.get("arguments", {}).items())
        and all(arguments.get(name) in NOTHING for name in rule.get("arguments_lacking", []))
        and all(matches(name, pattern) for name, pattern in rule.get("environment", {}).items())
        and not any(matches(name, pattern) for name, pattern in rule.get("environment_lacking", {}).items())
        and re.search(rule.get("profile", ""), str(instance.get("profile", "default"))) is not None
        and ("below" not in rule or Version(release) < Version(rule["below"]))
        and gpus < rule.get("gpus_below", gpus + 1)
        and gpus >= rule.get("gpus_from", 0)
        and stages >= rule.get("stages_from", 0)
        and instance.get("allreduce_fusion", "auto")
        in rule.get("fusion", [instance.get("allreduce_fusion", "auto")])
    )


def refused_combinations(
    instances: list[Values], profiles: Values, refused: list[Values], renamed: list[Values], release: str
) -> list[Values]:
    """The rules that an instance meets and does not insist on, each with the instance's name."""
    found = []
    for instance in instances:
        effective = _effective(instance, profile_of(instance.get("profile", "default"), profiles), renamed)
        insisted = instance.get("insist") or []
        for rule in refused:
            if rule["id"] not in insisted and _met(rule, instance, *effective, release):
                found.append({**rule, "instance": instance.get("instance", "main")})
    return found


def wanted_of_guest(instances: list[Values], profiles: Values, renamed: list[Values]) -> dict[str, int]:
    """What the most demanding instance needs: GPUs, and space for the model of its profile (0: not known)."""
    known = [(each, profile_of(each.get("profile", "default"), profiles)) for each in instances]
    return {
        "gpus": max(_gpus(_effective(instance, profile, renamed)[0])[0] for instance, profile in known),
        "model_mib": max(profile["model_mib"] for _, profile in known),
    }


class FilterModule:
    """Found by Ansible in the role."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"refused_combinations": refused_combinations, "wanted_of_guest": wanted_of_guest}
