"""What nvcc makes of FlashInfer's headers for SM120, before and after the guard is opened. No GPU needed."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest
from sm120 import catalogue
from sm120.editing import simulate
from sm120.versions import Ranges

# The guard drops statements of the stand-alone all-reduce on SM120 and leaves the lamport kernel without a body. The
# fused kernel, which SGLang calls, never had it.
GUARDS = 13
UNITS = {
    "stand_alone": """
#include "flashinfer/comm/trtllm_allreduce.cuh"
namespace ar = flashinfer::trtllm_allreduce;
void* keep[] = {
  (void*)ar::oneShotAllReduceKernel<__nv_bfloat16, 8>,
  (void*)ar::twoShotAllReduceKernel<__nv_bfloat16, 8>,
  (void*)ar::reduce_fusion::rms_norm_kernel<__nv_bfloat16, false, true, true, false>,
  (void*)ar::reduce_fusion::lamport_style_one_shot_all_reduce_norm_kernel<8, __nv_bfloat16, 8, false, true, true>,
};
""",
    "fused": """
#include "flashinfer/comm/trtllm_allreduce_fusion.cuh"
namespace ar = flashinfer::trtllm_allreduce_fusion;
template cudaError_t ar::allreduce_fusion_kernel_launcher<
    ar::AllReduceFusionPattern::kARResidualRMSNorm, __nv_bfloat16, 8, false>(
    ar::AllReduceFusionParams<__nv_bfloat16> const&, bool);
""",
}


@pytest.fixture(scope="module")
def headers(flashinfer_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Include folders, {opened: path}: as delivered, and as the catalogue's edit leaves it."""
    (gate,) = (each for each in catalogue.GATES if each.id == "fusion.header_guard")
    variant = catalogue.variant_for(gate, flashinfer_wheel.name.split("-")[1], Ranges())
    assert variant is not None
    found = {}
    for opened in (False, True):
        folder = tmp_path_factory.mktemp("opened" if opened else "closed")
        with zipfile.ZipFile(flashinfer_wheel) as wheel:
            names = wheel.namelist()
            wheel.extractall(
                folder,
                [n for n in names if n.startswith(("flashinfer/data/include", "flashinfer/data/spdlog"))],
            )
        header = folder / variant.path
        delivered = header.read_bytes()
        assert delivered.count(b"__CUDA_ARCH__ < 1200") == GUARDS
        if opened:
            header.write_bytes(simulate(delivered, catalogue.records(gate, variant)))
            assert header.read_bytes().count(b"__CUDA_ARCH__ < 1200") == 0
        found[opened] = folder / "flashinfer" / "data"
    return found


def compile_unit(nvcc: str, data: Path, unit: str, arch: str, folder: Path) -> dict[str, int]:
    source, target = folder / "unit.cu", folder / "unit.ptx"
    source.write_text(UNITS[unit])
    includes = [f"-I{data}/include", f"-I{data}/spdlog/include"]
    generate = f"-gencode=arch=compute_{arch},code=compute_{arch}"
    subprocess.run(
        [
            nvcc,
            "-std=c++17",
            "--expt-relaxed-constexpr",
            "-ptx",
            generate,
            *includes,
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    text = target.read_text()
    return {
        "kernels": len(re.findall(r"\.entry", text)),
        "wait": text.count("griddepcontrol.wait"),
        "launch": text.count("griddepcontrol.launch_dependents"),
        "cluster": text.count("barrier.cluster"),
    }


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("unit", "arch", "opened", "wanted"),
    [
        ("stand_alone", "120a", False, {"kernels": 4, "wait": 0, "launch": 0, "cluster": 0}),
        ("stand_alone", "120a", True, {"kernels": 4, "wait": 4, "launch": 4, "cluster": 4}),
        ("stand_alone", "90a", False, {"kernels": 4, "wait": 4, "launch": 4, "cluster": 4}),
        pytest.param(
            *("fused", "120a", False, {"kernels": 3, "wait": 3, "launch": 3, "cluster": 40}),
            marks=pytest.mark.long,
        ),
    ],
    ids=["guarded-is-empty", "opened-synchronises", "sm90-as-ever", "fused-needs-no-edit"],
)
def test_synchronisation_that_reaches_the_gpu(
    nvcc: str,
    headers: dict[bool, Path],
    tmp_path: Path,
    unit: str,
    arch: str,
    opened: bool,
    wanted: dict[str, int],
) -> None:
    assert compile_unit(nvcc, headers[opened], unit, arch, tmp_path) == wanted
