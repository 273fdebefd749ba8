"""What the server serves, and how large its vocabulary is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .http import Answer, Client

PAGE_SECONDS = 25.0
VOCABULARY_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")


def model_info(client: Client, timeout_seconds: float = PAGE_SECONDS) -> Answer:
    return client.get_either("/model_info", "/get_model_info", timeout_seconds=timeout_seconds)


def server_info(client: Client, timeout_seconds: float = PAGE_SECONDS) -> dict[str, Any]:
    """The few fields that measurements need. The page also echoes the API key: the rest is dropped here."""
    page = client.get_either("/server_info", "/get_server_info", timeout_seconds=timeout_seconds).json()
    if not isinstance(page, dict):
        return {}
    wanted = (
        "version",
        "max_running_requests",
        "max_req_input_len",
        "max_total_num_tokens",
        "context_length",
        "tp_size",
        "pp_size",
        "dp_size",
        "quantization",
        "attention_backend",
        "moe_runner_backend",
        "speculative_algorithm",
        "enable_flashinfer_allreduce_fusion",
        "flashinfer_allreduce_fusion_backend",
    )
    return {name: page[name] for name in wanted if name in page}


def vocabulary_of(config: dict[str, Any]) -> int | None:
    """vocab_size of a config.json; models with several parts keep it in the language model's section."""
    for section in (config, *(config.get(name) for name in VOCABULARY_SECTIONS)):
        if isinstance(section, dict):
            size = section.get("vocab_size")
            if isinstance(size, int) and size > 0:
                return size
            nested = section.get("text_config") if section is not config else None
            if isinstance(nested, dict) and isinstance(nested.get("vocab_size"), int):
                return int(nested["vocab_size"])
    return None


def vocabulary_at(model_path: str) -> int | None:
    """The same from the folder that /model_info names, when it can be read on this machine."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return vocabulary_of(config) if isinstance(config, dict) else None
