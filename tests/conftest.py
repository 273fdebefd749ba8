"""Upstream's wheels for every test that needs them, downloaded once into a folder that all tests share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
wheels = importlib.import_module("wheels")

MakeSite = Callable[..., Path]


@pytest.fixture
def make_site(tmp_path: Path) -> MakeSite:
    """Unpack the gated files of an SGLang and a FlashInfer wheel as a site-packages folder; returns it."""

    def make(sglang: str | None, flashinfer: str | None, name: str = "site") -> Path:
        site = tmp_path / name
        for package, version in (("sglang", sglang), ("flashinfer", flashinfer)):
            if version is not None:
                wheels.unpack(package, version, site)
        return site

    return make
