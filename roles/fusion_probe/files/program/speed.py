"""Graph replay of the fused call, and its time against NCCL all-reduce + residual add + RMSNorm."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from checks import make_inputs
from sm120.probe_cases import USE_ONESHOT, feasible

REPLAYS = 25
LARGE_TOKENS = 512


def calls_per_graph(tokens: int) -> int:
    """Enough to hide the launch of the graph; few where one call takes milliseconds over PCIe."""
    return 40 if tokens < LARGE_TOKENS else 10


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream, then record: what SGLang does for its decode batches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def add_and_norm(eps: float) -> tuple[str, Callable[[Any, Any, Any], Any]]:
    """The unfused add + norm: SGLang's kernel where its kernel package is installed, else torch's."""
    try:
        from sgl_kernel import fused_add_rmsnorm
    except ImportError:

        def plain(x: Any, residual: Any, weight: Any) -> Any:
            return functional.rms_norm(x + residual, (x.shape[-1],), weight, eps)

        return "NCCL all_reduce + torch add + torch rms_norm", plain

    def kernel(x: Any, residual: Any, weight: Any) -> Any:
        fused_add_rmsnorm(x, residual, weight, eps)
        return x

    return "NCCL all_reduce + sgl_kernel fused_add_rmsnorm", kernel


def time_case(
    operator: Any, groups: Any, hidden: int, tokens: int, eps: float, index: int, device: Any
) -> dict[str, float]:
    """Median microseconds of one call each way; replays interleaved, so a clock change hits all alike."""
    inputs = make_inputs(1, tokens, hidden, "bf16", base=7, index=index, rank=groups.rank, device=device)
    x, residual, weight = inputs.x[0], inputs.residual[0], inputs.weight
    residual_out, norm_out = torch.empty_like(x), torch.empty_like(x)
    # The unfused way works in place: zeros stay zeros however often they are summed.
    scratch, carried = torch.zeros_like(x), torch.zeros_like(x)
    calls = calls_per_graph(tokens)
    _, norm = add_and_norm(eps)

    def fused(mode: str) -> Callable[[], None]:
        def body() -> None:
            for _ in range(calls):
                operator.run(x, residual, weight, residual_out, norm_out, USE_ONESHOT[mode])

        return body

    def unfused() -> None:
        for _ in range(calls):
            dist.all_reduce(scratch, group=groups.device)
            norm(scratch, carried, weight)

    def all_reduce() -> None:
        for _ in range(calls):
            dist.all_reduce(scratch, group=groups.device)

    ways = {"fused": fused("auto"), "unfused": unfused, "all_reduce": all_reduce}
    if feasible("two_shot", tokens, groups.ranks):
        ways["two_shot"] = fused("two_shot")
    graphs = {name: capture(body) for name, body in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    dist.barrier(group=groups.cpu)
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(values) for name, values in times.items()}
