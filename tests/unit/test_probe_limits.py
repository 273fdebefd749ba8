"""The limits against an emulation of the kernel's rounding, in exact and 16-bit arithmetic."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
from ansible.module_utils.sm120.probe_limits import (
    POISON_BITS,
    ROW_RMS_SLACK,
    TINY,
    UNIT_ROUNDOFF,
    limits_for,
)

pytestmark = pytest.mark.once

WIDTH = 2048


def to_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def to_bf16(value: float) -> float:
    bits = struct.unpack("I", struct.pack("f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even
    return float(struct.unpack("f", struct.pack("I", bits & 0xFFFF0000))[0])


def to_fp16(value: float) -> float:
    return float(struct.unpack("e", struct.pack("e", value))[0])


ROUND: dict[str, Callable[[float], float]] = {"bf16": to_bf16, "fp16": to_fp16}


def row(dtype: str, ranks: int, seed: int) -> tuple[list[list[float]], list[float], list[float]]:
    draw, narrow = random.Random(seed), ROUND[dtype]  # noqa: S311 - test data
    parts = [[narrow(draw.gauss(0, 2)) for _ in range(WIDTH)] for _ in range(ranks)]
    residual = [narrow(draw.gauss(0, 1)) for _ in range(WIDTH)]
    return parts, residual, [narrow(1 + draw.gauss(0, 0.2)) for _ in range(WIDTH)]


def kernel(
    dtype: str, parts: list[list[float]], residual: list[float], weight: list[float], fp32: bool
) -> tuple[list[float], list[float]]:
    narrow, out = ROUND[dtype], []
    for index in range(WIDTH):
        total = parts[0][index]
        for part in parts[1:]:
            total = to_float32(total + part[index])
            total = total if fp32 else narrow(total)
        out.append(narrow(to_float32(narrow(total) + residual[index])))
    scale = to_float32(1 / math.sqrt(sum(v * v for v in out) / WIDTH + 1e-6))
    return out, [narrow(to_float32(to_float32(v * scale) * w)) for v, w in zip(out, weight, strict=True)]


@pytest.mark.parametrize("fp32", [False, True], ids=["rounded", "fp32_acc"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_right_results_are_inside_and_a_scaled_rank_is_outside(dtype: str, ranks: int, fp32: bool) -> None:
    parts, residual, weight = row(dtype, ranks, ranks * 2 + fp32)
    limits = limits_for(dtype, ranks, fp32)
    exact = [float(sum((Fraction(p[i]) for p in parts), Fraction(residual[i]))) for i in range(WIDTH)]
    mean_square = sum(v * v for v in exact) / WIDTH
    rho = math.sqrt(mean_square + 1e-6)
    on_sum, on_result = limits.residual_bound_factors()
    bound = [on_sum * sum(abs(p[i]) for p in parts) + on_result * abs(exact[i]) + TINY for i in range(WIDTH)]
    q = math.sqrt(sum(b * b for b in bound) / WIDTH) / rho
    squares = sorted((sum(v * v for v in part) / WIDTH for part in parts), reverse=True)
    variance = limits.variance * (sum(sum(squares[:k]) for k in limits.rounded_partials) + mean_square)
    row_limit = ROW_RMS_SLACK * math.sqrt(variance)

    def row_error(inputs: list[list[float]]) -> tuple[float, bool]:
        got, norm = kernel(dtype, inputs, residual, weight, fp32)
        worst = all(abs(g - e) <= b for g, e, b in zip(got, exact, bound, strict=True))
        for index in range(WIDTH):
            w, r = weight[index], exact[index]
            reach = (1 + limits.norm_roundoff) * abs(w) / (rho * (1 - q)) * (bound[index] + q * abs(r))
            reach += limits.norm_roundoff * abs(r * w / rho) + TINY
            worst = worst and abs(norm[index] - r * w / rho) <= reach
        return math.sqrt(sum((g - e) ** 2 for g, e in zip(got, exact, strict=True)) / WIDTH), worst

    right, inside = row_error(parts)
    assert inside
    assert right < row_limit
    assert right > 0.3 * row_limit  # a limit ten times too wide would let half a wrong rank pass
    wrong, _ = row_error([*parts[:-1], [ROUND[dtype](v * 1.05) for v in parts[-1]]])
    assert wrong > row_limit


def test_more_ranks_round_more_often_unless_the_sum_is_float32() -> None:
    assert limits_for("bf16", 8, False).rounded_partials == (2, 3, 4, 5, 6, 7, 8)
    assert limits_for("bf16", 8, True).rounded_partials == (8,)
    assert limits_for("bf16", 8, False).sum_growth > 6.9 * limits_for("bf16", 8, True).sum_growth


def test_one_rank_is_no_all_reduce() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        limits_for("bf16", 1, False)


@pytest.mark.parametrize(("dtype", "code"), [("bf16", "f"), ("fp16", "e")])
def test_the_poison_is_a_nan(dtype: str, code: str) -> None:
    bits = POISON_BITS[dtype]
    raw = struct.pack("<HH", 0, bits) if code == "f" else struct.pack("<H", bits)
    assert math.isnan(struct.unpack("<" + code, raw)[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_unit_roundoff_is_half_a_step_above_one(dtype: str) -> None:
    unit = UNIT_ROUNDOFF[dtype]
    assert ROUND[dtype](1 + unit) == 1.0  # the tie goes to even
    assert ROUND[dtype](1 + 1.01 * unit) == 1 + 2 * unit
