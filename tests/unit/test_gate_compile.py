"""The header edit, seen by the compiler: SM120 code waits for its predecessor grid, SM90 code stays what it was."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.sm120 import catalogue
from ansible.module_utils.sm120.editing import simulate
from ansible.module_utils.sm120.versions import Ranges

wheels = importlib.import_module("wheels")
NVCC = shutil.which("nvcc")
INCLUDE = ("flashinfer/data/include/", "flashinfer/data/spdlog/include/")
VERSION = "0.6.3"

# One kernel of the header, instantiated; nothing of the rest of FlashInfer is needed to compile it.
UNIT = """
#include <flashinfer/comm/trtllm_allreduce.cuh>
void* instantiate() {
  return (void*)&flashinfer::trtllm_allreduce::reduce_fusion::rms_norm_kernel<__nv_bfloat16, false, true, true, false>;
}
"""

pytestmark = pytest.mark.nvcc  # `make test-probe` brings an nvcc


def compiled(folder: Path, architecture: str, flag: str) -> bytes:
    """What nvcc makes of the unit: PTX or a cubin."""
    assert NVCC is not None, "there is no nvcc on PATH to compile with; make test-probe brings one"
    source, target = folder / "unit.cu", folder / f"unit.{architecture}.{flag}"
    source.write_text(UNIT)
    done = subprocess.run(
        [
            *(NVCC, f"-arch={architecture}", f"--{flag}", "-std=c++17", "-O2", "--expt-relaxed-constexpr"),
            *(f"-I{folder / 'site' / include}" for include in INCLUDE),
            *("-DENABLE_BF16", str(source), "-o", str(target)),
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target.read_bytes()


def test_grid_dependency_control(tmp_path: Path) -> None:
    wheels.unpack("flashinfer", VERSION, tmp_path / "site", lambda name: name.startswith(INCLUDE))
    (gate,) = (each for each in catalogue.GATES if each.id == "fusion.header_guard")
    variant = catalogue.variant_for(gate, VERSION, Ranges())
    assert variant is not None
    header = tmp_path / "site" / variant.path
    delivered = header.read_bytes()
    before = {name: compiled(tmp_path, name, "ptx") for name in ("sm_120a", "sm_90a")}
    cubin = compiled(tmp_path, "sm_90a", "cubin")
    header.write_bytes(simulate(delivered, catalogue.records(gate, variant)))
    after = {name: compiled(tmp_path, name, "ptx") for name in ("sm_120a", "sm_90a")}
    counts = [
        len(re.findall(rb"griddepcontrol\.(?:wait|launch_dependents)", text["sm_120a"]))
        for text in (before, after)
    ]
    assert counts[0] == 0
    assert counts[1] >= 2
    assert before["sm_90a"] == after["sm_90a"]
    assert hashlib.sha256(cubin).digest() == hashlib.sha256(compiled(tmp_path, "sm_90a", "cubin")).digest()
