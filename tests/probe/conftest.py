"""These tests need a Python with torch, and a CUDA toolkit: `make test-probe` provides both."""

from __future__ import annotations

import importlib
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
    """A wheel of a FlashInfer whose header has the guard."""
    return Path(importlib.import_module("wheels").wheel("flashinfer", "0.6.3"))


@pytest.fixture(scope="session")
def nvcc() -> str:
    return str(Path(needed("SM120_CUDA_HOME")) / "bin" / "nvcc")
