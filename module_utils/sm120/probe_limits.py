"""How far the fused operation may be from the float64 result, derived from its arithmetic alone.

Notation: u is the unit roundoff of the 16-bit type, v = 2**-24 that of float32, n the number of ranks, x_i
rank i's row, r the residual, S = sum x_i, R = S + r, rho = sqrt(mean(R^2) + eps), w the norm's weight,
N = R * w / rho. The kernel adds in float32 and rounds each partial sum to the 16-bit type (m = n - 1
roundings), or only the whole sum (`fp32_acc`, m = 1); it rounds R once and N once, and computes N from the
rounded R. One rounding after a float32 operation is off by at most u' = u + v * (1 + u), relatively.

Worst case, element by element (each step is an inequality, nothing is estimated):
    |S^ - S| <= g * sum|x_i|          g = m * u' / (1 - m * u')      (fp32_acc: u' + (n - 1) * v for m * u')
    |R^ - R| <= bR = (1 + u') * g * sum|x_i| + u' * |R|
    |rho^ - rho| <= rms(bR) = q * rho                 (the root mean square is a norm, hence 1-Lipschitz)
    |N^ - N| <= bN = (1 + u'') * |w| / (rho * (1 - q)) * (bR + q * |R|) + u'' * |N| + tiny
with u'' = u + NORM_FLOAT32_OPERATIONS * v for the float32 sum of squares, rsqrt and two products.

Expected size, row by row. The worst case grows with n and would let a 2 % error pass at eight ranks. A
rounding error is uniform within its cell, so its variance is at most (u * |value|)^2 / 3, and errors of
separate roundings are uncorrelated:
    var R = u^2 / 3 * (sum of E_k for k = 2..n  +  mean R^2)            (fp32_acc: E_n alone)
    var N = mean(w^2) * var R / rho^2 + u^2 / 3 * mean N^2
E_k is the mean square of a partial sum of k rows; the inputs are independent between ranks, so it is at most
the sum of the k largest mean squares, whatever order the kernel adds in. A cell is as wide for 1.99 as for
1.0, so the true variance is about half of this: the room for chance in a row of 2048 elements or more.

Bias. Rounding does not follow any one input, so the error's projection on x_i, <e, x_i> / <x_i, x_i>, is zero
up to chance: its standard deviation is sqrt(sum x_i^2 * var R) / <x_i, x_i>. A rank that is missing, counted
twice, or scaled shows as -1, +1 or scale - 1, far beyond that, and the rank is named.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # 8 and 11 bits of significand
POISON_BITS = {"bf16": 0x7FAB, "fp16": 0x7EAB}  # a NaN with a payload that no arithmetic produces
FLOAT32_ROUNDOFF = 2.0**-24
NORM_FLOAT32_OPERATIONS = (
    64  # a tree over at most 1024 threads x 8 elements, plus division, rsqrt and products
)
TINY = 2.0**-24  # below the normal range of fp16 the error is absolute
ROW_RMS_SLACK = 1.15  # chance correlation of the inputs within one row of 2048 elements
BIAS_SIGMAS = 8.0
BIAS_FLOOR_ROUNDOFFS = 1 / 16  # rounding to even is unbiased only to first order


@dataclass(frozen=True)
class Limits:
    """Coefficients of the bounds above for one type, number of ranks and way of accumulating."""

    roundoff: float  # u'
    sum_growth: float  # g
    norm_roundoff: float  # u''
    variance: float  # u^2 / 3
    rounded_partials: tuple[int, ...]  # the k of E_k
    bias_floor: float

    def residual_bound_factors(self) -> tuple[float, float]:
        """Factors of sum|x_i| and of |R| in bR."""
        return (1 + self.roundoff) * self.sum_growth, self.roundoff


def limits_for(dtype: str, ranks: int, fp32_accumulate: bool) -> Limits:
    if ranks < 2:
        raise ValueError(f"an all-reduce needs at least 2 ranks, got {ranks}")
    unit = UNIT_ROUNDOFF[dtype]
    once = unit + FLOAT32_ROUNDOFF * (1 + unit)
    total = once + (ranks - 1) * FLOAT32_ROUNDOFF if fp32_accumulate else (ranks - 1) * once
    return Limits(
        roundoff=once,
        sum_growth=total / (1 - total),
        norm_roundoff=unit + NORM_FLOAT32_OPERATIONS * FLOAT32_ROUNDOFF,
        variance=unit * unit / 3,
        rounded_partials=(ranks,) if fp32_accumulate else tuple(range(2, ranks + 1)),
        bias_floor=unit * BIAS_FLOOR_ROUNDOFFS,
    )
