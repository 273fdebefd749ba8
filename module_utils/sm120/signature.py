"""What one entry of the diagnosis catalogue is."""

from __future__ import annotations

import re
from dataclasses import dataclass

CAUSE = "cause"
CONSEQUENCE = "consequence"
WARNING = "warning"
NOTE = "note"  # all is well, and somebody wants to know

# How far a server has come, by what it logs on its way.
LOADING = "loading"
POOLING = "memory pool"
CAPTURING = "graph capture"
SERVING = "serving"


@dataclass(frozen=True)
class Signature:
    """One known line: bytes it must contain, optionally an expression it must match, and what it means.

    Where the alternatives of the expression have no bytes in common, the needle is empty.
    `stage` restricts it to what happens on a server's way there; `fatal` says that no server outlives it.
    """

    name: str
    role: str
    layer: str
    needle: bytes
    meaning: str
    advice: str
    pattern: re.Pattern[bytes] | None = None
    stage: str | None = None
    fatal: bool = False

    def matches(self, line: bytes, stage: str | None) -> bool:
        return (
            self.needle in line
            and (self.stage is None or self.stage == stage)
            and (self.pattern is None or self.pattern.search(line) is not None)
        )
