"""What makes an edit useless though every file is right: prebuilt kernels, packages that do not fit, an old nvcc."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .packages import Distribution, Package, distributions
from .versions import Ranges

JIT_CACHE, CUBIN = "flashinfer-jit-cache", "flashinfer-cubin"
# From here on upstream's own prebuilt module has code for SM120; before it, one shadows what would be compiled.
PREBUILT_SINCE = "0.6.17"
# A companion package of another version ends the import of FlashInfer before this, and is ignored from here on.
MISMATCH_IGNORED_SINCE = "0.7.0"
# The CUDA release that FlashInfer needs to compile for SM120, by its own version.
_NEEDED_CUDA = ((">=0.7.1", (12, 8)), (">=0.6.7,<0.7.1", (12, 9)), ("<0.6.7", (12, 8)))


@dataclass(frozen=True)
class Defeats:
    """What stops a plan, and what an operator should know."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def _public(version: str) -> str:
    """A version without its local suffix, as +cu130."""
    return version.partition("+")[0]


def _companions(package: Package) -> list[Distribution]:
    return [
        each for site in package.site_dirs for each in distributions(site) if each.name in (JIT_CACHE, CUBIN)
    ]


def _prebuilt(package: Package, companions: Iterable[Distribution], ranges: Ranges, pip: str) -> list[str]:
    """Prebuilt modules that FlashInfer loads in place of the one that the edits let it compile."""
    if not ranges.contains(f"<{PREBUILT_SINCE}", _public(package.version)):
        return []
    found = []
    for each in companions:
        if each.name == JIT_CACHE:
            found.append(
                f"{JIT_CACHE} {each.version} is installed in {each.info.parent}: its prebuilt trtllm_comm has no "
                f"SM120 code and is loaded in place of what would be compiled. Nothing was changed. Run: {pip} "
                f"uninstall -y {JIT_CACHE}; prebuilt modules know SM120 from FlashInfer {PREBUILT_SINCE} on"
            )
    library = package.root / "data/aot/trtllm_comm/trtllm_comm.so"
    if library.is_file():
        found.append(
            f"{library} is a prebuilt module without SM120 code, and is loaded in place of what would be compiled. "
            f"Nothing was changed. Run: {pip} install --force-reinstall --no-deps "
            f"flashinfer-python=={package.version} after moving that folder away"
        )
    return found


def _mismatches(package: Package, companions: Iterable[Distribution]) -> list[str]:
    return [
        f"{each.name} {each.version} stands beside flashinfer-python {package.version}"
        for each in companions
        if _public(each.version) != _public(package.version)
    ]


def find_nvcc(python: str | None) -> Path | None:
    """The nvcc that this environment would most likely use: its own, then /usr/local/cuda, then PATH."""
    if python is not None:
        for toolkit in sorted(
            Path(python).parent.parent.glob("lib/python*/site-packages/nvidia/cu*"), reverse=True
        ):
            if (toolkit / "bin/nvcc").is_file():
                return toolkit / "bin/nvcc"
    if Path("/usr/local/cuda/bin/nvcc").is_file():
        return Path("/usr/local/cuda/bin/nvcc")
    found = shutil.which("nvcc")
    return Path(found) if found else None


def cuda_release(nvcc: Path) -> tuple[int, int] | None:
    """The release that an nvcc tells, as (13, 0)."""
    try:
        told = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"release (\d+)\.(\d+)", told.stdout)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _old_compiler(package: Package, ranges: Ranges, nvcc: Path | None) -> list[str]:
    release = cuda_release(nvcc) if nvcc is not None else None
    for versions, needed in _NEEDED_CUDA:
        if release is not None and ranges.contains(versions, _public(package.version)) and release < needed:
            return [
                f"{nvcc} is CUDA {release[0]}.{release[1]}; FlashInfer {package.version} needs {needed[0]}."
                f"{needed[1]} to compile for SM120 and fails with 'No supported CUDA architectures' although "
                "every gate is open. Install a newer toolkit, or set CUDA_HOME of the server to one"
            ]
    return []


def look_for_defeats(package: Package, ranges: Ranges, python: str | None, nvcc: Path | None) -> Defeats:
    """Everything that would defeat open gates of this FlashInfer."""
    pip = f"{python} -m pip" if python else "pip"
    companions = _companions(package)
    problems = _prebuilt(package, companions, ranges, pip)
    notes = _old_compiler(package, ranges, nvcc)
    for mismatch in _mismatches(package, companions):
        if ranges.contains(f">={MISMATCH_IGNORED_SINCE}", _public(package.version)):
            notes.append(f"{mismatch}: FlashInfer ignores it")
        else:
            problems.append(
                f"{mismatch}: importing FlashInfer ends in a RuntimeError. Nothing was changed. Install the same "
                f"version of both, or run: {pip} uninstall -y {mismatch.partition(' ')[0]}"
            )
    return Defeats(tuple(problems), tuple(notes))
