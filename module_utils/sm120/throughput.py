"""What to send and what to make of the answers: prompts, rungs, figures by the formulas of
sglang.bench_serving."""

from __future__ import annotations

import json
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .http import Address
from .load import Outcome
from .sse import Stream
from .stats import distribution_ms

APIS = ("generate", "completions")
# The first ids of most vocabularies are control tokens: they end a text or open a tool call.
FIRST_TOKEN_ID = 10
CLIENT_BUSY_SHARE = 0.9
CACHED_SHARE = 0.05


class SpecError(ValueError):
    """A measurement that makes no sense; the message says what is wanted."""


@dataclass(frozen=True)
class Spec:
    """One measurement, as asked for."""

    api: str
    concurrency: tuple[int, ...]
    requests_per_stream: int
    input_tokens: int
    output_tokens: int
    repeats: int
    warmup_requests: int
    seed: int
    vocab_size: int
    goodput: dict[str, float]
    stall_seconds: float
    timeout_seconds: float
    run: str = ""

    def requests(self, concurrency: int) -> int:
        return concurrency * self.requests_per_stream


def check_numbers(
    *,
    api: str,
    concurrency: list[int],
    requests_per_stream: int,
    input_tokens: int,
    output_tokens: int,
    repeats: int,
    warmup_requests: int,
    stall_seconds: float,
    timeout_seconds: float,
    goodput: dict[str, float],
) -> None:
    """One clear message for the first argument that cannot be."""
    if api not in APIS:
        raise SpecError(f"api: wanted one of {', '.join(APIS)}, found {api!r}")
    if not concurrency:
        raise SpecError("concurrency: wanted at least one rung, found an empty list")
    for rung in concurrency:
        if rung < 1:
            raise SpecError(f"concurrency: every rung must be at least 1, found {rung}")
    if len(set(concurrency)) != len(concurrency):
        raise SpecError(f"concurrency: every rung once, found {concurrency}")
    for name, value, least in (
        ("requests_per_stream", requests_per_stream, 1),
        ("input_tokens", input_tokens, 1),
        ("output_tokens", output_tokens, 1),
        ("repeats", repeats, 1),
        ("warmup_requests", warmup_requests, 0),
        ("stall_seconds", stall_seconds, 1),
        ("timeout_seconds", timeout_seconds, 1),
    ):
        if value < least:
            raise SpecError(f"{name}: must be at least {least}, found {value}")
    for name, limit in goodput.items():
        if name not in ("ttft_ms", "tpot_ms", "e2e_ms"):
            raise SpecError(f"goodput: knows ttft_ms, tpot_ms and e2e_ms, found {name!r}")
        if not limit > 0:
            raise SpecError(f"goodput.{name}: must be above 0 ms, found {limit}")


def check_vocab(vocab_size: int | None, model_vocab_size: int | None) -> int:
    """The vocabulary to draw prompts from; refused when above the model's: an id outside kills the server."""
    if vocab_size is None:
        if model_vocab_size is None:
            raise SpecError(
                "vocab_size: the served model's config.json could not be read here, so it must be given. "
                "Look it up in the model's config.json (vocab_size, or text_config.vocab_size); "
                "a token id outside the vocabulary kills the server"
            )
        vocab_size = model_vocab_size
    if model_vocab_size is not None and vocab_size > model_vocab_size:
        raise SpecError(
            f"vocab_size: the served model has {model_vocab_size} tokens, {vocab_size} asked for. "
            "A token id outside the vocabulary kills the server; nothing was sent"
        )
    if vocab_size < FIRST_TOKEN_ID + 2:
        raise SpecError(f"vocab_size: must be at least {FIRST_TOKEN_ID + 2}, found {vocab_size}")
    return vocab_size


def prompts(spec: Spec, label: str, count: int) -> Iterator[list[int]]:
    """Random token ids, the same for the same seed, run and label, different for every label.

    So no repeat meets the prefixes of another in the server's cache; nor does another run with the same seed.
    """
    # Not cryptography: a seed that repeats a measurement is the point.
    rng = random.Random(f"{spec.seed}/{spec.run}/{label}")  # noqa: S311
    for _ in range(count):
        yield rng.choices(range(FIRST_TOKEN_ID, spec.vocab_size), k=spec.input_tokens)


def render(spec: Spec, address: Address, headers: dict[str, str], ids: list[int]) -> bytes:
    """One request as bytes, greedy and of exactly the output length asked for."""
    path: str
    body: dict[str, Any]
    if spec.api == "generate":
        path = "/generate"
        sampling = {"temperature": 0.0, "max_new_tokens": spec.output_tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    else:
        path = "/v1/completions"
        body = {
            "model": "default",
            "prompt": ids,
            "temperature": 0.0,
            "max_tokens": spec.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    data = json.dumps(body, separators=(",", ":")).encode()
    head = [
        f"POST {address.prefix}{path} HTTP/1.1",
        f"Host: {address.netloc}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(data)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def token_gaps(stream: Stream) -> Iterator[float]:
    """Inter-token latencies: the gap between two events, shared out over the tokens of the second."""
    for index in range(1, len(stream.times)):
        new = stream.counts[index] - stream.counts[index - 1]
        gap = (stream.times[index] - stream.times[index - 1]) / new
        for _ in range(new):
            yield gap


def measure(spec: Spec, concurrency: int, outcome: Outcome) -> dict[str, Any]:
    """The figures of one repeat, and whether they may be believed."""
    good: list[Stream] = []
    errors: Counter[str] = Counter()
    for stream in outcome.streams:
        if stream.error is None and stream.last_count != spec.output_tokens:
            stream.error = f"{stream.last_count} tokens instead of {spec.output_tokens}"
        if stream.error is None:
            good.append(stream)
        else:
            errors[stream.error] += 1
    duration = outcome.duration
    ttft = [stream.times[0] - stream.started for stream in good]
    e2e = [stream.latency for stream in good]
    tpot = [
        (latency - first) / (spec.output_tokens - 1)
        for latency, first in zip(e2e, ttft, strict=True)
        if spec.output_tokens > 1
    ]
    gaps = array("d", (gap for stream in good for gap in token_gaps(stream)))
    received = sum(stream.last_count for stream in outcome.streams)
    out = sum(stream.last_count for stream in good)
    into = sum(stream.usage["prompt_tokens"] for stream in good)
    cached = sum(stream.usage["cached_tokens"] for stream in good)
    figures: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcome.streams) - len(good),
        "errors": dict(errors.most_common(5)),
        "input_tokens": into,
        "output_tokens": out,
        "cached_tokens": cached,
        "tokens_received": received,
        "duration_seconds": round(duration, 4),
        "output_tokens_per_second": round(out / duration, 3),
        "total_tokens_per_second": round((into + out) / duration, 3),
        "requests_per_second": round(len(good) / duration, 4),
        "mean_concurrency": round(math.fsum(e2e) / duration, 3),
        "ttft_ms": distribution_ms(ttft),
        "tpot_ms": distribution_ms(tpot),
        "itl_ms": distribution_ms(gaps),
        "e2e_ms": distribution_ms(e2e),
        "goodput_requests_per_second": _goodput(spec, ttft, tpot, e2e, duration),
        "client": _client(outcome, received),
        "stalled_seconds": round(outcome.stalled_seconds, 1),
    }
    figures["invalid_because"] = _doubts(spec, concurrency, figures, outcome)
    figures["valid"] = not figures["invalid_because"]
    figures["notes"] = []
    if into and cached > CACHED_SHARE * into:
        figures["notes"].append(
            f"{cached} of {into} prompt tokens came from the server's cache: TTFT is too good. "
            "Use another run or seed, or none"
        )
    return figures


def _goodput(
    spec: Spec, ttft: list[float], tpot: list[float], e2e: list[float], duration: float
) -> float | None:
    """Requests per second that kept every limit given."""
    if not spec.goodput:
        return None
    series = {"ttft_ms": ttft, "tpot_ms": tpot or [0.0] * len(e2e), "e2e_ms": e2e}
    kept = sum(
        all(series[name][index] * 1000 <= limit for name, limit in spec.goodput.items())
        for index in range(len(e2e))
    )
    return round(kept / duration, 4)


def _client(outcome: Outcome, tokens: int) -> dict[str, Any]:
    """What the measurement itself cost: on a busy client the latencies are the client's own."""
    lag = distribution_ms(outcome.lags)
    return {
        "cpu_seconds": round(outcome.cpu_seconds, 4),
        "cpu_percent": round(100 * outcome.cpu_seconds / outcome.duration, 1) if outcome.duration else 0.0,
        "cpu_ms_per_1000_tokens": round(1e6 * outcome.cpu_seconds / tokens, 2) if tokens else None,
        "lag_ms_p99": lag["p99"] if lag else None,
        "lag_ms_max": round(max(outcome.lags) * 1000, 3) if outcome.lags else None,
    }


def _doubts(spec: Spec, concurrency: int, figures: dict[str, Any], outcome: Outcome) -> list[str]:
    doubts = []
    if outcome.stopped:
        doubts.append(f"stopped: {outcome.stopped}")
    missing = spec.requests(concurrency) - len(outcome.streams)
    if missing:
        doubts.append(f"{missing} of {spec.requests(concurrency)} requests were never sent")
    if figures["failed"]:
        worst, times = next(iter(figures["errors"].items()))
        doubts.append(f"{figures['failed']} of {len(outcome.streams)} requests failed, {times} with: {worst}")
    wanted = spec.requests(concurrency) * spec.input_tokens
    if not doubts and figures["input_tokens"] != wanted:
        doubts.append(f"the server counted {figures['input_tokens']} prompt tokens, {wanted} were sent")
    # The start of a run is all client; only over a while does its share say something.
    if outcome.duration >= 1 and figures["client"]["cpu_percent"] >= 100 * CLIENT_BUSY_SHARE:
        doubts.append(
            f"the client used {figures['client']['cpu_percent']:.0f} % of a core: "
            "these are the client's figures, not the server's. Measure from another machine"
        )
    return doubts
