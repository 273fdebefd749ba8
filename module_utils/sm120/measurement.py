"""From a module's arguments to a measurement, and what to say beside its figures."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from .http import KEY_REFUSED, Client
from .served_model import model_info
from .throughput import Spec, SpecError, check_numbers, check_vocab
from .vocabulary import vocabulary_at

NUMBERS = (
    "api",
    "concurrency",
    "requests_per_stream",
    "input_tokens",
    "output_tokens",
    "repeats",
    "warmup_requests",
    "stall_seconds",
    "timeout_seconds",
)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Everything that can be known before the server is asked; raises SpecError."""
    check_numbers(**{name: given[name] for name in NUMBERS}, goodput=_limits(given["goodput"]))
    if given["vocab_size"] is not None:
        check_vocab(given["vocab_size"], None)


def make_spec(given: Mapping[str, Any], model_vocab_size: int | None) -> Spec:
    """The measurement asked for, within the model's vocabulary."""
    return Spec(
        api=given["api"],
        concurrency=tuple(given["concurrency"]),
        requests_per_stream=given["requests_per_stream"],
        input_tokens=given["input_tokens"],
        output_tokens=given["output_tokens"],
        repeats=given["repeats"],
        warmup_requests=given["warmup_requests"],
        seed=given["seed"] if given["seed"] is not None else secrets.randbelow(2**31),
        vocab_size=check_vocab(given["vocab_size"], model_vocab_size),
        goodput=_limits(given["goodput"]),
        stall_seconds=given["stall_seconds"],
        timeout_seconds=given["timeout_seconds"],
        run=given["run"],
    )


def _limits(goodput: Mapping[str, Any]) -> dict[str, float]:
    try:
        return {name: float(limit) for name, limit in goodput.items()}
    except (TypeError, ValueError):
        raise SpecError(f"goodput: every limit must be a number of milliseconds, found {goodput}") from None


def served_vocabulary(client: Client) -> int | None:
    """The model's vocabulary, if it can be known here; raises SpecError when the server cannot be asked."""
    answer = model_info(client)
    where = f"{client.address.scheme}://{client.address.netloc}"
    if answer.status == 401:
        raise SpecError(f"{where} answers 401: {KEY_REFUSED}")
    if not answer.ok:
        found = f"HTTP {answer.status}" if answer.status else f"{answer.error}: {answer.detail}"
        raise SpecError(
            f"{where}/model_info: wanted an answer from a running server, found {found}. "
            "Look at the unit: systemctl status 'sglang-*'; playbooks/status.yml tells the state of each"
        )
    info = answer.json()
    path = info.get("model_path") if isinstance(info, dict) else None
    return vocabulary_at(path) if isinstance(path, str) else None


def check_length(spec: Spec, server: Mapping[str, Any]) -> None:
    """A request longer than the server takes is answered 400, a thousand times over: say it once instead."""
    longest = server.get("max_req_input_len")
    if isinstance(longest, int) and spec.input_tokens > longest:
        raise SpecError(
            f"input_tokens: the server takes prompts of at most {longest}, found {spec.input_tokens}"
        )


def note_queue(rung: dict[str, Any], server: Mapping[str, Any]) -> None:
    """More streams than the server runs at once measure its queue; the reader has to know."""
    most = server.get("max_running_requests")
    if isinstance(most, int) and most < rung["concurrency"]:
        rung["notes"].append(
            f"the server runs at most {most} requests at once (max_running_requests): "
            f"{rung['concurrency'] - most} of {rung['concurrency']} streams wait in its queue"
        )


def method_of(
    spec: Spec, *, seed_given: bool, power_note: str | None, model_vocab_size: int | None
) -> dict[str, Any]:
    """How it was measured: a figure without its method compares with nothing."""
    return {
        "api": spec.api,
        "formulas": "sglang.bench_serving",
        "loop": "closed: each stream sends its next request when its last is answered",
        "requests_per_stream": spec.requests_per_stream,
        "input_tokens": spec.input_tokens,
        "output_tokens": spec.output_tokens,
        "repeats": spec.repeats,
        "warmup_requests": spec.warmup_requests,
        "seed": spec.seed,
        "seed_given": seed_given,
        "run": spec.run,
        "vocab_size": spec.vocab_size,
        "model_vocab_size": model_vocab_size,
        "temperature": 0.0,
        "ignore_eos": True,
        "percentiles": "linear interpolation",
        "goodput": spec.goodput,
        "power": power_note or "nvidia-smi, mean over each repeat, all GPUs together",
    }
