"""How large a model's vocabulary is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


def vocabulary_of(config: dict[str, Any]) -> int | None:
    """vocab_size of a config.json; models with several parts keep it in the language model's section."""
    for section in (config, *(config.get(name) for name in SECTIONS)):
        if isinstance(section, dict):
            size = section.get("vocab_size")
            if isinstance(size, int) and size > 0:
                return size
            nested = section.get("text_config") if section is not config else None
            if isinstance(nested, dict) and isinstance(nested.get("vocab_size"), int):
                return int(nested["vocab_size"])
    return None


def vocabulary_at(model_path: str) -> int | None:
    """The same from a model's folder, when it can be read on this machine."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return vocabulary_of(config) if isinstance(config, dict) else None
