"""A rank of the probe on the CPU: gloo instead of NCCL, and the fused operation in its own rounding order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "roles" / "fusion_probe" / "files" / "program")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rank import Rank, drive  # noqa: E402


def split_tokens(tokens: int, ranks: int) -> list[tuple[int, int]]:
    """(first token, count) that each rank reduces in the two-shot kernel: the first ranks get the rest."""
    share, rest = divmod(tokens, ranks)
    return [(r * share + min(r, rest), share + (1 if r < rest else 0)) for r in range(ranks)]


class Emulated:
    """Sums in rank order, float32 adds rounded to the type; two-shot reduces by token shares."""

    name = "emulated"

    def __init__(self, groups: Any, call: dict[str, Any], eps: float) -> None:
        self.groups, self.call, self.eps = groups, call, eps

    def make_workspace(self, hidden: int) -> dict[str, Any]:
        return {"backend": "trtllm", "memory": "host"}

    def _sum(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
            if not self.call["fp32_accumulate"]:
                total = total.to(part.dtype).float()
        return total.to(parts[0].dtype)

    def run(
        self, x: Any, residual: Any, weight: Any, residual_out: Any, norm_out: Any, use_oneshot: Any
    ) -> None:
        mine = x.contiguous().view(torch.uint8)
        raw = [torch.empty_like(mine) for _ in range(self.groups.ranks)]
        dist.all_gather(raw, mine, group=self.groups.device)
        parts = [part.view(x.dtype) for part in raw]
        if use_oneshot is False:
            shares = split_tokens(x.shape[0], self.groups.ranks)
            total = torch.cat(
                [self._sum([part[first : first + count] for part in parts]) for first, count in shares]
            )
        else:
            total = self._sum(parts)
        result = (total.float() + residual.float()).to(x.dtype)
        wide = result.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        residual_out.copy_(result)
        norm_out.copy_((wide * scale * weight.float()).to(x.dtype))


class EmulatedRank(Rank):
    def __init__(self, config: dict[str, Any], rank: int, channel: Any) -> None:
        torch.set_num_threads(1)
        super().__init__(config, rank, channel, torch.device("cpu"))
        self.operators = {"unified": Emulated, "ipc": Emulated}


if __name__ == "__main__":
    drive(EmulatedRank)
