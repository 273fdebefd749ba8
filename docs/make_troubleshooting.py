#!/usr/bin/env python3
"""Print docs/troubleshooting.md from troubleshooting.head.md and the diagnosis catalogue:

python docs/make_troubleshooting.py > docs/troubleshooting.md
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from module_utils.sm120.diagnosis_catalogue import TOPICS
from module_utils.sm120.signature import Signature

HEAD = Path(__file__).with_name("troubleshooting.head.md")


def entry(signature: Signature) -> str:
    mark = f"`{signature.needle.decode()}`" if len(signature.needle) > 12 else ""
    stage = f" (during {signature.stage})" if signature.stage else ""
    lines = [f"### {signature.name}", f"*{signature.role}*, {signature.layer}{stage}. {signature.meaning}"]
    if mark:
        lines.append(f"Line: {mark}")
    lines.append(f"**Next:** {signature.advice}")
    return "\n\n".join(lines)


def page() -> str:
    parts = [HEAD.read_text(encoding="utf-8").rstrip()]
    shown: set[str] = set()
    for title, signatures in TOPICS:
        parts.append(f"## {title}")
        for signature in signatures:
            if signature.name not in shown:
                shown.add(signature.name)
                parts.append(entry(signature))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
