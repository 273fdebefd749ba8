"""What the fusion probe computes: the case matrix and the arithmetic of ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

RANKS = (2, 4, 8, 16)  # FlashInfer's kernels are instantiated for these world sizes only
TOKENS = (1, 2, 4, 8, 16, 17, 32, 64, 128, 512, 2048)
HIDDEN = (2048, 4096, 6144, 7168)
DTYPES = ("bf16", "fp16")
MODES = ("auto", "one_shot", "two_shot")
# None is what SGLang passes: FlashInfer then chooses by message size.
USE_ONESHOT: dict[str, bool | None] = {"auto": None, "one_shot": True, "two_shot": False}
LAMPORT_BUFFERS = 3  # the one-shot kernel rotates three buffers and clears the one used before
CALLS = LAMPORT_BUFFERS + 1  # so one more call than buffers meets each of them again
LAMPORT_LIMIT_BYTES = 2147483647 & ~((1 << 21) - 1)  # FlashInfer's cap: int32, rounded down to 2 MiB


@dataclass(frozen=True)
class Case:
    """One shape in one mode; `kind` is how it is launched (eager, or replayed from a CUDA graph)."""

    kind: str
    hidden: int
    tokens: int
    dtype: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.kind} hidden={self.hidden} tokens={self.tokens} {self.dtype} {self.mode}"

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def feasible(mode: str, tokens: int, ranks: int) -> bool:
    """Two-shot splits the tokens over the ranks; FlashInfer refuses it with no more tokens than ranks."""
    return mode != "two_shot" or tokens > ranks


def matrix(
    kind: str,
    ranks: int,
    hidden: Sequence[int],
    tokens: Sequence[int],
    dtypes: Sequence[str],
    modes: Sequence[str],
) -> list[Case]:
    """Token counts run innermost, so that small and large calls follow each other on the same workspace."""
    return [
        Case(kind, h, t, dtype, mode)
        for h in hidden
        for dtype in dtypes
        for mode in modes
        for t in tokens
        if feasible(mode, t, ranks)
    ]


def workspace_bytes(ranks: int, max_tokens: int, hidden: int) -> int:
    """GPU memory of one workspace on one rank for 16-bit types: staging, flags and three Lamport buffers."""
    message = ranks * max_tokens * hidden * 2
    parts = (message, ranks * 256 * 4, LAMPORT_BUFFERS * min(message, LAMPORT_LIMIT_BYTES))
    return sum(-(-part // (1 << 21)) * (1 << 21) for part in parts)


def seed_of(base: int, case_index: int, rank: int) -> int:
    """A stream of its own for each rank and case: equal inputs on two ranks would hide swapped peers."""
    return (base * 1_000_003 + case_index) * 64 + rank
