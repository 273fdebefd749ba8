"""Faults put in on purpose, to see on the real GPUs that the probe finds them (`fault` of the module)."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from checks import poisoned

FAULTY_TOKENS = 2048  # row faults go into the largest call: one bad row among 2048
SCALE = 1.02
CRASH_EXIT = 86


class Faulty:
    """Wraps an operator; the last rank misbehaves, the others are honest."""

    def __init__(self, operator: Any, fault: str, groups: Any) -> None:
        self.operator, self.fault, self.guilty = operator, fault, groups.rank == groups.ranks - 1
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operator, name)

    def run(
        self, x: Any, residual: Any, weight: Any, residual_out: Any, norm_out: Any, use_oneshot: bool | None
    ) -> None:
        self.calls += 1
        if self.guilty:
            if self.fault == "absent_rank":
                while True:
                    time.sleep(60)
            if self.fault == "crashed_rank":
                os._exit(CRASH_EXIT)
            if self.fault == "wrong_scale":
                x = (x.float() * SCALE).to(x.dtype)
            if self.fault == "missing_residual":
                residual = torch.zeros_like(residual)
        self.operator.run(x, residual, weight, residual_out, norm_out, use_oneshot)
        tokens, hidden = x.shape
        if not self.guilty or tokens != FAULTY_TOKENS:
            return
        row = tokens // 3
        if self.fault == "garbage_row":
            norm_out[row] = norm_out[row - 1]
        if self.fault == "unwritten_row":
            kind = "bf16" if x.dtype is torch.bfloat16 else "fp16"
            norm_out[row] = poisoned(1, 0, hidden, kind, x.device)[0, 0]
        if self.fault == "moving_error" and self.calls % 3 == 1:
            # The lowest bit of one element: far inside every limit, but not there in the next call.
            norm_out[row, :1].view(torch.int16).bitwise_xor_(1)
