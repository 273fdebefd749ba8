"""What nvcc makes of FlashInfer's headers for SM120, before and after the guard is opened. No GPU needed."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

# The guard drops statements of the stand-alone all-reduce on SM120 and leaves this kernel without a body. The
# fused kernel, which SGLang calls, never had it.
GUARD, OPEN, OCCURRENCES = " && (__CUDA_ARCH__ < 1200))", ")", 13
UNITS = {
    "lamport": """
#include "flashinfer/comm/trtllm_allreduce.cuh"
namespace ar = flashinfer::trtllm_allreduce::reduce_fusion;
void* keep() {
  return (void*)ar::lamport_style_one_shot_all_reduce_norm_kernel<8, __nv_bfloat16, 8, false, true, true>;
}
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
    """Include folders, {opened: path}."""
    found = {}
    for opened in (False, True):
        folder = tmp_path_factory.mktemp("opened" if opened else "closed")
        with zipfile.ZipFile(flashinfer_wheel) as wheel:
            names = wheel.namelist()
            wheel.extractall(
                folder,
                [n for n in names if n.startswith(("flashinfer/data/include", "flashinfer/data/spdlog"))],
            )
        header = folder / "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh"
        text = header.read_text()
        assert text.count(GUARD) == OCCURRENCES
        if opened:
            header.write_text(text.replace(GUARD, OPEN))
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
        ("lamport", "120a", False, {"kernels": 1, "wait": 0, "launch": 0, "cluster": 0}),
        ("lamport", "120a", True, {"kernels": 1, "wait": 1, "launch": 1, "cluster": 4}),
        ("lamport", "90a", False, {"kernels": 1, "wait": 1, "launch": 1, "cluster": 4}),
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
