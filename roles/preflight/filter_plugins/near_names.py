"""Filter of the role: unknown names, each with the known one that it may be meant for."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any


def near_names(unknown: list[str], known: list[str]) -> list[str]:
    """`sglang_server_prot (did you mean sglang_server_port?)`."""
    found = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        found.append(f"{name} (did you mean {near[0]}?)" if near else name)
    return found


class FilterModule:
    """Found by Ansible in the role."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"near_names": near_names}
