"""These tests need a Python with torch, and FlashInfer's wheel: `make test-probe` provides both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "module_utils"))


def needed(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        pytest.fail(f"{name} is not set: run these tests by `make test-probe`")
    return value


@pytest.fixture(scope="session")
def torch_python() -> str:
    return needed("SM120_TORCH_PYTHON")


@pytest.fixture(scope="session")
def flashinfer_wheel() -> Path:
    """A wheel of FlashInfer 0.6.0 to 0.6.16, whose header has the guard."""
    return Path(needed("SM120_FLASHINFER_WHEEL"))


@pytest.fixture(scope="session")
def nvcc() -> str:
    return str(Path(needed("SM120_CUDA_HOME")) / "bin" / "nvcc")
