"""Inputs, poisoned outputs, and one fused call against the float64 result (see sm120.probe_limits)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from sm120.probe_cases import seed_of
from sm120.probe_limits import BIAS_SIGMAS, POISON_BITS, ROW_RMS_SLACK, TINY, Limits

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Inputs:
    x: torch.Tensor  # this rank's part of the sum, one per round: [rounds, tokens, hidden]
    residual: torch.Tensor  # the same on every rank
    weight: torch.Tensor


@dataclass
class Figures:
    """Each figure is a multiple of its limit: above 1 fails. Infinite: an element that is no number has none."""

    worst: float = 0.0  # worst element against the worst-case bound
    rms: float = 0.0  # worst row against the expected size
    bias: float = 0.0  # worst projection on one input
    error: float = 0.0  # norm-wise relative error, for people
    problems: dict[str, str] = field(default_factory=dict)  # one of each kind, the first

    def merge(self, other: Figures) -> None:
        self.worst, self.rms = max(self.worst, other.worst), max(self.rms, other.rms)
        self.bias, self.error = max(self.bias, other.bias), max(self.error, other.error)
        self.problems = {**other.problems, **self.problems}


def make_inputs(
    rounds: int, tokens: int, hidden: int, dtype: str, *, base: int, index: int, rank: int, device: Any
) -> Inputs:
    """Rows of different magnitude, negative zeros among them (the one-shot protocol's own 'empty' mark)."""
    kind = TORCH_DTYPES[dtype]
    mine = torch.Generator(device=device).manual_seed(seed_of(base, index, rank))
    shared = torch.Generator(device=device).manual_seed(seed_of(base, index, 63))
    x = torch.randn(rounds, tokens, hidden, generator=mine, device=device)
    x *= torch.exp2((torch.arange(tokens, device=device) % 5 - 2).float())[None, :, None]
    x[:, :, rank::97] = -0.0
    residual = torch.randn(rounds, tokens, hidden, generator=shared, device=device)
    weight = 1 + 0.2 * torch.randn(hidden, generator=shared, device=device)
    return Inputs(x.to(kind), residual.to(kind), weight.to(kind))


def poisoned(rounds: int, tokens: int, hidden: int, dtype: str, device: Any) -> torch.Tensor:
    """Outputs full of a NaN that no arithmetic makes, with one guard row behind each round."""
    out = torch.empty(rounds, tokens + 1, hidden, dtype=TORCH_DTYPES[dtype], device=device)
    out.view(torch.int16).fill_(POISON_BITS[dtype])
    return out


def poison_count(out: torch.Tensor, dtype: str) -> torch.Tensor:
    """Poisoned elements of each row."""
    return (out.contiguous().view(torch.int16) == POISON_BITS[dtype]).sum(-1)


def compare(
    gathered: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor],
    limits: Limits,
    dtype: str,
    eps: float,
) -> Figures:
    """All inputs [ranks, tokens, hidden] of a call against (residual out, norm out) with their guard rows."""
    figures, tokens = Figures(), residual.shape[0]
    total = torch.zeros_like(residual, dtype=torch.float64)
    magnitude, squares = torch.zeros_like(total), []
    for part in gathered:
        wide = part.double()
        total += wide
        magnitude += wide.abs()
        squares.append(wide.square().mean(-1))
    partial = torch.stack(squares).sort(0, descending=True).values.cumsum(0)  # E_k, k = 1..n
    result = total + residual.double()
    mean_square = result.square().mean(-1)
    rho = (mean_square + eps).sqrt()
    wide_weight = weight.double()
    norm = result * wide_weight / rho[:, None]

    sum_factor, result_factor = limits.residual_bound_factors()
    bound_r = sum_factor * magnitude + result_factor * result.abs() + TINY
    variance_r = limits.variance * (sum(partial[k - 1] for k in limits.rounded_partials) + mean_square)
    q = (bound_r.square().mean(-1).sqrt() / rho)[:, None]
    bound_n = (
        (1 + limits.norm_roundoff)
        * wide_weight.abs()
        / (rho[:, None] * (1 - q))
        * (bound_r + q * result.abs())
    )
    bound_n += limits.norm_roundoff * norm.abs() + TINY
    variance_n = (
        wide_weight.square().mean() * variance_r / mean_square + limits.variance * norm.square().mean(-1)
    )

    for name, out, reference, bound, variance in (
        ("residual", outputs[0], result, bound_r, variance_r),
        ("norm", outputs[1], norm, bound_n, variance_n),
    ):
        holes = poison_count(out, dtype)
        if int(holes[tokens:].sum()) != out.shape[-1]:
            figures.problems[f"{name} end"] = f"{name}: wrote behind the end of its output"
        unwritten = int(holes[:tokens].sum())
        if unwritten:
            figures.problems[f"{name} unwritten"] = (
                f"{name}: {unwritten} elements unwritten in {int((holes[:tokens] > 0).sum())} rows, "
                f"row {int(holes[:tokens].argmax())}"
            )
        error = out[:tokens].double() - reference
        finite = torch.isfinite(error)
        lost = int((~finite).sum()) - unwritten
        if lost:
            figures.problems[f"{name} lost"] = (
                f"{name}: {lost} elements not finite, row {int((~finite).sum(-1).argmax())}"
            )
        if not bool(finite.all()):
            figures.worst = figures.error = math.inf
        error = torch.where(finite, error, torch.zeros_like(error))
        figures.merge(_sizes(name, error, reference, bound, variance))
        if name == "residual":
            figures.merge(_bias(error, gathered, residual, variance, limits))
    return figures


def _sizes(
    name: str, error: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor, variance: torch.Tensor
) -> Figures:
    figures = Figures(error=float(error.norm() / reference.norm()))
    element = (error.abs() / bound).amax(-1)
    figures.worst = float(element.max())
    row = error.square().mean(-1).sqrt() / (ROW_RMS_SLACK * variance.sqrt())
    figures.rms = float(row.max())
    for what, times in (("worst case", element), ("expected error", row)):
        if float(times.max()) > 1:
            figures.problems[f"{name} {what}"] = (
                f"{name}: {float(times.max()):.3g} times the {what}, {int((times > 1).sum())} rows, "
                f"row {int(times.argmax())}"
            )
    return figures


def _bias(
    error: torch.Tensor,
    gathered: torch.Tensor,
    residual: torch.Tensor,
    variance: torch.Tensor,
    limits: Limits,
) -> Figures:
    figures = Figures()
    for index in range(gathered.shape[0] + 1):
        part = (gathered[index] if index < gathered.shape[0] else residual).double()
        energy = part.square().sum(-1)
        share = float((error * part).sum() / energy.sum())
        deviation = float((energy * variance).sum().sqrt() / energy.sum())
        limit = BIAS_SIGMAS * deviation + limits.bias_floor
        if abs(share) / limit > max(
            1.0, figures.bias
        ):  # the largest is the origin, smaller ones follow from it
            what = f"rank {index}'s input" if index < gathered.shape[0] else "the residual"
            figures.problems["bias"] = (
                f"residual: {what} counted {1 + share:.4f} times (limit {limit:.2g} off 1)"
            )
        figures.bias = max(figures.bias, abs(share) / limit)
    return figures
