"""GPU power, load and memory while something runs, sampled by nvidia-smi in the background."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any, BinaryIO

FIELDS = ("index", "power.draw", "enforced.power.limit", "utilization.gpu", "memory.used", "memory.total")
PERIOD_MILLISECONDS = 500
# "Full load" of nvidia-smi only says that some kernel ran all the time. Cards that wait for each other in a collective
# drew 125 to 140 W of 600 W; a healthy pair of H200 that served a small model drew 190 W of 700 W. So it takes less
# than a quarter of the limit, nearly all the time, on every one of several cards, before it is worth a remark.
BUSY_PERCENT = 95.0
LOW_POWER_SHARE = 0.25
LEAST_SAMPLES = 4  # two seconds
NEARLY_ALL = 0.9


@dataclass(frozen=True)
class Sample:
    gpu: int
    power_watts: float | None
    limit_watts: float | None
    utilization_percent: float | None
    memory_used_mib: float | None
    memory_total_mib: float | None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]", "[Unknown Error]"


def parse(text: str) -> list[Sample]:
    """Lines of `--format=csv,noheader,nounits`; anything else (a last line cut short, an error text)
    is left out."""
    samples = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(FIELDS) and parts[0].isdigit():
            samples.append(Sample(int(parts[0]), *(_number(part) for part in parts[1:])))
    return samples


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def summarise(samples: list[Sample]) -> dict[str, Any] | None:
    """Means per card and over all cards, and whether all ran at full load and low power throughout."""
    cards: dict[int, list[Sample]] = {}
    for sample in samples:
        cards.setdefault(sample.gpu, []).append(sample)
    if not cards:
        return None
    per_gpu = [
        {
            "gpu": gpu,
            "power_watts": _rounded(_mean([one.power_watts for one in seen])),
            "power_watts_max": _rounded(
                max((one.power_watts for one in seen if one.power_watts is not None), default=None)
            ),
            "power_limit_watts": _rounded(_mean([one.limit_watts for one in seen])),
            "utilization_percent": _rounded(_mean([one.utilization_percent for one in seen])),
            "memory_used_mib": _rounded(
                max((one.memory_used_mib for one in seen if one.memory_used_mib is not None), default=None)
            ),
            "memory_total_mib": _rounded(_mean([one.memory_total_mib for one in seen])),
            "samples": len(seen),
        }
        for gpu, seen in sorted(cards.items())
    ]
    powers = [card["power_watts"] for card in per_gpu]
    return {
        "power_watts_total": _rounded(sum(p for p in powers if p is not None))
        if any(p is not None for p in powers)
        else None,
        "per_gpu": per_gpu,
        "busy_at_low_power": len(cards) > 1 and all(_busy_at_low_power(seen) for seen in cards.values()),
    }


def _busy_at_low_power(seen: list[Sample]) -> bool:
    waiting = [
        one
        for one in seen
        if one.utilization_percent is not None
        and one.power_watts is not None
        and one.limit_watts
        and one.utilization_percent >= BUSY_PERCENT
        and one.power_watts <= LOW_POWER_SHARE * one.limit_watts
    ]
    return len(seen) >= LEAST_SAMPLES and len(waiting) >= NEARLY_ALL * len(seen)


class Sampler:
    """Runs nvidia-smi between start() and stop(). Its lines go to an unnamed file: nobody has to read
    along."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program or shutil.which("nvidia-smi")
        self._process: subprocess.Popen[bytes] | None = None
        self._file: BinaryIO | None = None
        self.missing = None if self._program else "nvidia-smi is not installed here: no power figures"

    def start(self) -> None:
        if self._program is None:
            return
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop()
        query = ["--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits"]
        self._process = subprocess.Popen(
            [self._program, *query, f"--loop-ms={PERIOD_MILLISECONDS}"],
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LC_ALL": "C"},
        )

    def stop(self) -> dict[str, Any] | None:
        """The means since start(); None where there is nothing to sample, with `missing` saying why."""
        if self._process is None or self._file is None:
            return None
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._file.seek(0)
        text = self._file.read().decode("utf-8", "replace")
        self._file.close()
        self._process = self._file = None
        summary = summarise(parse(text))
        if summary is None:
            said = text.strip().splitlines()[0][:200] if text.strip() else "no output"
            self.missing = f"nvidia-smi gave no figures: {said}"
        return summary
