from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
from ansible.module_utils.sm120.gpu_power import Sampler, parse, summarise

LINES = """\
0, 250.10, 600.00, 100, 90000, 97887
1, 240.10, 600.00, 98, 91000, 97887
0, 260.10, 600.00, 100, 90500, 97887
1, [N/A], 600.00, 100, 91000, 97887
1, 2
Failed to initialize NVML: Driver/library version mismatch
"""


def test_lines_are_parsed_and_noise_is_left_out() -> None:
    samples = parse(LINES)
    assert [one.gpu for one in samples] == [0, 1, 0, 1]
    assert samples[3].power_watts is None


def test_means_per_card_and_power_of_all() -> None:
    got = summarise(parse(LINES))
    assert got is not None
    assert [card["power_watts"] for card in got["per_gpu"]] == [255.1, 240.1]
    assert [card["power_watts_max"] for card in got["per_gpu"]] == [260.1, 240.1]
    assert [card["memory_used_mib"] for card in got["per_gpu"]] == [90500, 91000]
    assert got["power_watts_total"] == 495.2
    assert got["busy_at_low_power"] is False


@pytest.mark.parametrize(
    ("lines", "remarked"),
    [
        ("0, 125, 600, 100, 1, 2\n1, 140, 600, 99, 1, 2\n" * 4, True),
        ("0, 125, 600, 100, 1, 2\n1, 140, 600, 99, 1, 2\n" * 3, False),  # too short a look
        ("0, 125, 600, 100, 1, 2\n" * 8, False),  # one card waits for nobody
        ("0, 30, 600, 0, 1, 2\n1, 30, 600, 0, 1, 2\n" * 4, False),  # idle
        ("0, 125, 600, 100, 1, 2\n1, 300, 600, 99, 1, 2\n" * 4, False),  # one card works
        # Two healthy H200 that served a model small for them.
        ("0, 192.1, 700, 100, 1, 2\n1, 188.4, 700, 98, 1, 2\n" * 8, False),
        # One sample at full clocks is a working card.
        ("0, 125, 600, 100, 1, 2\n1, 140, 600, 99, 1, 2\n" * 4 + "1, 412, 600, 100, 1, 2\n", False),
        ("0, [N/A], 600, 100, 1, 2\n1, 140, 600, 99, 1, 2\n" * 4, False),
    ],
)
def test_full_load_at_low_power_is_remarked_only_when_it_lasts_on_all_cards(
    lines: str, remarked: bool
) -> None:
    got = summarise(parse(lines))
    assert got is not None
    assert got["busy_at_low_power"] is remarked


def test_nothing_to_sample_is_said() -> None:
    assert summarise([]) is None


def program(tmp_path: Path, text: str) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_sampler_reads_a_program_that_runs_until_stopped(tmp_path: Path) -> None:
    sampler = Sampler(program(tmp_path, "while :; do echo '0, 100, 600, 50, 10, 20'; sleep 0.01; done"))
    sampler.start()
    assert sampler._file is not None
    deadline = time.monotonic() + 20
    while not os.fstat(sampler._file.fileno()).st_size and time.monotonic() < deadline:
        time.sleep(0.02)
    got = sampler.stop()
    assert got is not None
    assert got["power_watts_total"] == 100
    assert sampler.missing is None


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    sampler = Sampler(program(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9"))
    sampler.start()
    assert sampler._process is not None
    sampler._process.wait(10)
    assert sampler.stop() is None
    assert sampler.missing is not None
    assert "NVIDIA-SMI has failed" in sampler.missing


def test_without_the_program_there_is_no_power_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    sampler = Sampler()
    sampler.start()
    assert sampler.stop() is None
    assert sampler.missing is not None
    assert "not installed" in sampler.missing
