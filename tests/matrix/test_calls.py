"""How each released SGLang calls the fused all-reduce, read from the source in its wheel as the probe reads it."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest
import versions
from conftest import wheels

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "module_utils"))
probe_call = importlib.import_module("sm120.probe_call")
SGLANG = list(versions.PINS)
# The releases from which; docs/fusion-probe.md says the same in words.
UNIFIED, GROUPS, FLOAT32 = (SGLANG.index(version) for version in ("0.5.10", "0.5.11", "0.5.20"))


@pytest.mark.parametrize("version", SGLANG)
def test_the_call_of_a_release(version: str) -> None:
    at = SGLANG.index(version)
    with zipfile.ZipFile(wheels.wheel("sglang", version)) as wheel:
        call = probe_call.parse_call(wheel.read(f"sglang/{probe_call.SOURCE}").decode())
    assert call == probe_call.FusionCall(
        api="unified" if at >= UNIFIED else "ipc",
        fp32_accumulate=at >= FLOAT32,
        max_tokens=2048,
        passes_groups=at >= GROUPS,
        has_preflight=at >= GROUPS,
    )


@pytest.mark.parametrize(("sglang", "flashinfer"), versions.PINS.items())
def test_without_sglang_its_flashinfer_decides_alike(sglang: str, flashinfer: str) -> None:
    """What the probe takes where no SGLang is installed is the API of the release that pins this FlashInfer."""
    wanted = "unified" if SGLANG.index(sglang) >= UNIFIED else "ipc"
    assert probe_call.call_without_sglang(flashinfer).api == wanted
