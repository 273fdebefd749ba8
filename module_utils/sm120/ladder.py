"""Run a ladder: for every rung a warm-up, then the repeats, GPUs sampled meanwhile."""

from __future__ import annotations

from typing import Any

from .gpu_power import Sampler
from .http import Client
from .load import Driver, Limits, Outcome
from .rungs import join
from .throughput import Spec, measure, prompts, render

STALL_NOTE = (
    "no token came while every GPU ran at full load below a quarter of its power limit: "
    "most likely a collective that never ends"
)
LOW_POWER_NOTE = (
    "every GPU ran at full load below a quarter of its power limit nearly all the time: waiting for each other (PCIe, "
    "synchronisation) looks like this, and so does a model too small for these cards; one GPU alone tells them apart"
)


class Ladder:
    """One server, one specification."""

    def __init__(self, client: Client, spec: Spec, *, ca_path: str | None, sample_gpus: bool) -> None:
        self._client = client
        self._spec = spec
        self._driver = Driver(client.address, ca_path=ca_path)
        self._sample = sample_gpus
        self.power_note: str | None = None if sample_gpus else "GPU sampling was switched off"

    def rung(self, concurrency: int) -> dict[str, Any]:
        """All repeats at one concurrency. A repeat that stalled is the last: the rest would only wait
        again."""
        spec = self._spec
        warmup = self._warmup(concurrency)
        runs: list[dict[str, Any]] = []
        requested = 0
        for repeat in range(spec.repeats):
            outcome, gpu = self._load(f"{concurrency}/{repeat}", spec.requests(concurrency), concurrency)
            requested += len(outcome.streams) * spec.output_tokens
            run = measure(spec, concurrency, outcome) | _power(gpu, outcome)
            if gpu and gpu["busy_at_low_power"]:
                run["notes"].append(STALL_NOTE if outcome.stalled_seconds else LOW_POWER_NOTE)
            runs.append(run)
            if outcome.stopped:
                break
        return join(concurrency, requested, warmup, runs)

    def _warmup(self, concurrency: int) -> dict[str, Any]:
        count = self._spec.warmup_requests
        if not count:
            return {"requests": 0, "tokens_requested": 0, "tokens_received": 0, "failed": 0, "error": None}
        outcome = self._driver.run(
            self._requests(f"{concurrency}/warmup", count), min(count, concurrency), self._limits()
        )
        errors = [stream.error for stream in outcome.streams if stream.error]
        return {
            "requests": count,
            "tokens_requested": count * self._spec.output_tokens,
            "tokens_received": sum(stream.last_count for stream in outcome.streams),
            "failed": len(errors),
            "error": errors[0] if errors else None,
        }

    def _load(self, label: str, count: int, concurrency: int) -> tuple[Outcome, dict[str, Any] | None]:
        # Rendered before the clock starts: making prompts is not the server's time.
        requests = self._requests(label, count)
        sampler = Sampler() if self._sample else None
        if sampler:
            sampler.start()
        try:
            outcome = self._driver.run(requests, concurrency, self._limits())
        finally:
            gpu = sampler.stop() if sampler else None
        if sampler:
            self.power_note = sampler.missing
        return outcome, gpu

    def _requests(self, label: str, count: int) -> list[bytes]:
        headers = self._client.headers()
        address = self._client.address
        return [render(self._spec, address, headers, ids) for ids in prompts(self._spec, label, count)]

    def _limits(self) -> Limits:
        return Limits(self._spec.stall_seconds, self._spec.timeout_seconds)


def _power(gpu: dict[str, Any] | None, outcome: Outcome) -> dict[str, Any]:
    watts = gpu["power_watts_total"] if gpu else None
    tokens = sum(stream.last_count for stream in outcome.streams if stream.error is None)
    joules = watts * outcome.duration if watts else 0.0
    return {
        "gpu": gpu,
        "power_watts": watts,
        "tokens_per_joule": round(tokens / joules, 4) if joules else None,
    }
