"""The report of a probe: stages, cases over all ranks, speed table, verdict and the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .probe_cases import Case

STAGES = ("toolchain", "jit", "nccl", "workspace", "numbers", "graph", "speed")
BUILD_STAGES = ("toolchain", "jit")  # these need no GPU
NO_WORD = ("memory", "ranks", "visible")  # causes that say nothing about fusion

PLAY = "ansible-playbook -i INVENTORY playbooks/"
NEXT = {
    "toolchain": f"Give the service user a whole toolkit: {PLAY}probe.yml --tags cuda",
    "gate_closed": f"Open the gates, all layers at once: {PLAY}gates.yml",
    "no_architecture": "Give it nvcc 12.9 or newer (cuda_toolkit_method, cuda_toolkit_path)",
    "aot": f"Remove flashinfer-jit-cache from the environment, then {PLAY}probe.yml",
    "memory": f"Stop what uses the GPUs (systemctl list-units 'sglang-*'; nvidia-smi), then {PLAY}probe.yml",
    "preflight": f"See gate fusion.multicast_preflight and free memory: {PLAY}audit.yml",
    "memory_of": "Stop {units}, which is on the GPUs: systemctl stop {units}, then "
    f"{PLAY}probe.yml; {PLAY}serve.yml starts it again",
    "visible": "Name more GPUs in CUDA_VISIBLE_DEVICES of the server's environment (sglang_server_extra_environment), "
    "or give the server a smaller tensor or pipeline parallel size",
    "ranks": "Give the server a tensor and pipeline parallel size that this host has GPUs for (sglang_server_profile, "
    "sglang_server_tensor_parallel_size)",
    "p2p": "This is peer-to-peer between the GPUs, not fusion. Check `nvidia-smi topo -p2p r` (all OK), "
    "ACS and IOMMU on the path, and `options nvidia_uvm uvm_disable_hmm=1`. If the probe gets past it with "
    "NCCL_P2P_DISABLE=1 in fusion_probe_environment, P2P it is; fusion needs P2P, so it stays off",
    "wrong": f"Do not serve with fusion on this host: leave it off, or {PLAY}revert.yml",
    "hang": "Do not serve with fusion on this host. See the end of each rank's log, and `dmesg` for Xid",
    "slow": "Fusion would slow this host down: leave sglang_server_allreduce_fusion off",
    "other": "Read the evidence file and the logs that it names",
}


@dataclass
class Stage:
    name: str
    status: str = "not_run"  # passed / failed / not_run
    seconds: float = 0.0
    detail: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "seconds": round(self.seconds, 2),
            "detail": self.detail,
            "facts": self.facts,
        }


def largest(figures: Iterable[float | None]) -> float | None:
    """None is the figure of what is not finite: no number is worse."""
    found = list(figures)
    return None if None in found else max(float(each) for each in found if each is not None)


def merge_case(by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One case as all ranks saw it: the worst figure of each, and every rank's problems by name."""
    worst = {
        key: largest(found[key] for found in by_rank.values()) for key in ("worst", "rms", "bias", "error")
    }
    problems = [f"rank {rank}: {text}" for rank in sorted(by_rank) for text in by_rank[rank]["problems"]]
    return {**worst, "ok": not problems, "problems": problems[:8]}


def case_rows(planned: Iterable[Case], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cases that ran, for a page: those of one launch, hidden size and type as one row with its worst figures."""
    shapes = {case.name: (case.kind, case.hidden, case.dtype) for case in planned}
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for case in found:
        kind, hidden, dtype = shape = shapes[case["name"]]
        row = rows.setdefault(
            shape,
            {
                "kind": kind,
                "hidden": hidden,
                "dtype": dtype,
                "cases": 0,
                "right": 0,
                "error": 0.0,
                "worst": 0.0,
            },
        )
        row["cases"] += 1
        row["right"] += bool(case["ok"])
        for figure in ("error", "worst"):
            row[figure] = largest((row[figure], case[figure]))
    return list(rows.values())


def merge_speed(by_rank: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """A collective is as slow as its slowest rank."""
    ways = next(iter(by_rank.values()))
    return {way: max(found[way] for found in by_rank.values()) for way in ways}


def merge_groups(
    found: Sequence[Mapping[tuple[int, int], Mapping[str, float]]],
) -> dict[tuple[int, int], Any]:
    """Likewise a server of several groups: each size as its slowest group had it."""
    sizes = sorted({size for group in found for size in group})
    return {size: merge_speed({n: g[size] for n, g in enumerate(found) if size in g}) for size in sizes}


def speed_rows(measured: Mapping[tuple[int, int], Mapping[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for (hidden, tokens), microseconds in sorted(measured.items()):
        row: dict[str, Any] = {"hidden": hidden, "tokens": tokens}
        row.update({f"{way}_microseconds": round(value, 2) for way, value in microseconds.items()})
        row["ratio"] = round(microseconds["unfused"] / microseconds["fused"], 3)
        rows.append(row)
    return rows


def loses_from(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Smallest token count from which fusion is slower at every measured size; None where there is none."""
    first = None
    for row in sorted(rows, key=lambda row: int(row["tokens"]), reverse=True):
        if row["ratio"] >= 1:
            break
        first = int(row["tokens"])
    return first


def speed_summary(rows: Sequence[Mapping[str, Any]], max_slowdown: float) -> dict[str, Any]:
    """Too slow: fusion wins nowhere, or somewhere it is `max_slowdown` times slower (bad synchronisation)."""
    by_hidden: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_hidden.setdefault(int(row["hidden"]), []).append(row)
    too_slow = [
        f"hidden={row['hidden']} tokens={row['tokens']}: {row['fused_microseconds']} us fused, "
        f"{row['unfused_microseconds']} us unfused"
        for row in rows
        if row["ratio"] * max_slowdown < 1
    ]
    if rows and all(row["ratio"] < 1 for row in rows):
        too_slow.insert(0, "fusion is slower at every measured size")
    return {
        "loses_from_tokens": {str(hidden): loses_from(found) for hidden, found in by_hidden.items()},
        "slower_at": [f"{row['hidden']}x{row['tokens']}" for row in rows if row["ratio"] < 1],
        "too_slow": too_slow,
    }


def next_step(stage: str, cause: str, holders: Sequence[str] = ()) -> str:
    """`holders`: units that are on the GPUs, where memory is the cause."""
    if cause == "memory" and holders:
        return NEXT["memory_of"].format(units=" ".join(holders))
    if stage == "nccl" and cause not in NO_WORD:
        return NEXT["p2p"]
    return NEXT.get(
        {"wrong_numbers": "wrong", "time_limit": "hang", "crash": "hang"}.get(cause, cause), NEXT["other"]
    )


def verdict(stages: Iterable[Stage], wanted: Sequence[str]) -> str:
    """passed: every stage there is passed. compiled: the build passed and nothing else was asked for."""
    state = {stage.name: stage.status for stage in stages}
    if any(status == "failed" for status in state.values()):
        return "failed"
    if all(state.get(name) == "passed" for name in STAGES):
        return "passed"
    if all(state.get(name) == "passed" for name in BUILD_STAGES) and not set(wanted) - set(BUILD_STAGES):
        return "compiled"
    return "incomplete"
