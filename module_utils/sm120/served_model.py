"""What the server serves."""

from __future__ import annotations

from typing import Any

from .http import Answer, Client

PAGE_SECONDS = 25.0


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
