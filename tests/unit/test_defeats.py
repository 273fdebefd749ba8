"""What makes open gates useless is refused or told, with the command that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.sm120 import defeats, packages
from ansible.module_utils.sm120.versions import Ranges
from gates_driver import Gates, RunModule


def companion(site: Path, name: str, version: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("")


@pytest.mark.parametrize("version", ["0.6.3", "0.6.3+cu130"])
def test_a_prebuilt_package_that_shadows_the_edit_is_refused(
    make_site: Any, run_module: RunModule, version: str
) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.6.3"))
    companion(gates.site, "flashinfer-jit-cache", version)
    answer = gates.info()
    assert (len(answer["problems"]), answer["edits"]) == (1, [])
    assert "uninstall -y flashinfer-jit-cache" in answer["problems"][0]
    gates.features = ["moe_autotune"]
    assert gates.info()["problems"] == []
    assert gates.info("absent")["problems"] == []


def test_a_prebuilt_library_in_the_package_is_refused(make_site: Any, run_module: RunModule) -> None:
    gates = Gates(run_module, make_site("0.5.9", "0.6.3"))
    library = gates.site / "flashinfer/data/aot/trtllm_comm/trtllm_comm.so"
    library.parent.mkdir(parents=True)
    library.write_text("x")
    assert str(library) in gates.info()["problems"][0]


@pytest.mark.parametrize(
    ("flashinfer", "name", "version", "refused", "told"),
    [
        ("0.6.3", "flashinfer-cubin", "0.6.2", True, True),
        ("0.6.3", "flashinfer-cubin", "0.6.3+cu130", False, False),
        ("0.7.2", "flashinfer-cubin", "0.6.13", False, True),
        ("0.7.2", "flashinfer-jit-cache", "0.7.2+cu130", False, False),
    ],
)
def test_companions_of_another_version(
    make_site: Any, run_module: RunModule, flashinfer: str, name: str, version: str, refused: bool, told: bool
) -> None:
    gates = Gates(run_module, make_site("0.5.9", flashinfer))
    companion(gates.site, name, version)
    answer = gates.info()
    assert any(version in problem for problem in answer["problems"]) is refused
    assert any(version in text for text in answer["problems"] + answer["notes"]) is told


@pytest.mark.parametrize(
    ("flashinfer", "release", "old"),
    [
        ("0.6.3", "12.8", False),
        ("0.6.3", "12.6", True),
        ("0.6.7", "12.8", True),
        ("0.6.7", "12.9", False),
        ("0.7.1", "12.8", False),
        ("0.7.1", "11.5", True),
        ("0.7.1", "no answer", False),
    ],
)
def test_an_old_compiler_is_told(
    make_site: Any, tmp_path: Path, flashinfer: str, release: str, old: bool
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    package = packages.by_root("flashinfer", make_site(None, flashinfer) / "flashinfer")
    found = defeats.look_for_defeats(package, Ranges(), None, nvcc)
    assert found.problems == ()
    assert len(found.notes) == old


def test_the_environment_comes_first_for_nvcc(tmp_path: Path) -> None:
    nvcc = tmp_path / "lib/python3.12/site-packages/nvidia/cu13/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("")
    assert defeats.find_nvcc(str(tmp_path / "bin/python")) == nvcc
