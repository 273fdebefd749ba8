"""The stages that need no GPU: the toolchain as the service user sees it, and the JIT build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from channel import Channel, beat_while, die_with_parent, read_config

ROOM_BYTES = 2 << 30
UNIT = """
#include <cuda.h>
#include <cuda_runtime.h>
__global__ void one(int* out) { *out = 1; }
extern "C" int probe_unit(int* out) { one<<<1, 1>>>(out); int v = 0; cuDriverGetVersion(&v); return v; }
"""


class Missing(Exception):
    """Something of the toolchain is not there: what, and the fix."""


def first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout or done.stderr).strip().splitlines()[0] if done.returncode == 0 else ""


def toolchain(config: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Compile and link one small file for the wanted architecture, as FlashInfer's ninja file would."""
    home = Path(os.environ.get("CUDA_HOME") or "/nonexistent")
    nvcc = home / "bin" / "nvcc"
    if not os.access(nvcc, os.X_OK):
        raise Missing(f"no compiler at {nvcc}: set cuda_toolkit_path, or run playbooks/probe.yml --tags cuda")
    release = re.search(r"release (\d+\.\d+)", subprocess.check_output([str(nvcc), "--version"], text=True))
    ninja, host = shutil.which("ninja"), shutil.which(os.environ.get("CXX", "c++"))
    if ninja is None:
        raise Missing(
            f"no ninja on PATH={os.environ.get('PATH')}: it comes with flashinfer-python's requirements"
        )
    if host is None:
        raise Missing("no C++ compiler (c++, or what CXX names) on PATH: install the distribution's g++")
    if not (home / "include" / "cuda_runtime.h").is_file():
        raise Missing(f"no headers at {home}/include/cuda_runtime.h: {home} is not a whole toolkit")
    cache = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise Missing(f"{cache} cannot be written by uid {os.getuid()}: {error.strerror}") from None
    room = shutil.disk_usage(cache).free
    if room < ROOM_BYTES:
        raise Missing(f"{room >> 20} MiB free under {cache}, the build wants {ROOM_BYTES >> 20} MiB")
    channel.beat("compiling and linking a small file")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        source, target = Path(folder, "unit.cu"), Path(folder, "unit.so")
        source.write_text(UNIT, encoding="ascii")
        flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in config["architectures"]]
        libraries = [f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
        command = [
            str(nvcc),
            "-shared",
            "-Xcompiler",
            "-fPIC",
            *flags,
            str(source),
            "-o",
            str(target),
            *libraries,
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    said = (built.stderr or built.stdout).strip()[:800]
    if built.returncode and "Unsupported gpu architecture" in said:
        raise Missing(
            f"{nvcc} is CUDA {release.group(1) if release else 'of an unknown release'} and does not know "
            f"{', '.join(f'sm_{a}' for a in config['architectures'])} ({said}): set cuda_toolkit_method: pip, or "
            "cuda_toolkit_path to a newer toolkit"
        )
    if built.returncode:
        raise Missing(f"nvcc cannot build a small file: {said}")
    return {
        "nvcc": release.group(1) if release else "unknown",
        "cuda_home": str(home),
        "ninja": f"{ninja} {first_line(ninja, '--version')}",
        "compiler": first_line(host, "--version"),
        "cache": str(cache),
    }


def gate_or_compiler(error: RuntimeError) -> tuple[str, str]:
    """The same words are raised for a closed gate and for an empty list of architectures: tell them apart."""
    from flashinfer.compilation_context import CompilationContext

    archs = sorted(f"{major}{minor}" for major, minor in CompilationContext().TARGET_CUDA_ARCHS)
    if not archs:
        return (
            "no_architecture",
            f"FlashInfer finds no architecture to build for ({error}): no GPU and no "
            "FLASHINFER_CUDA_ARCH_LIST, or an nvcc too old for the GPU",
        )
    return (
        "gate_closed",
        f"gate fusion.jit is closed: gen_trtllm_comm_module in flashinfer/jit/comm.py refuses "
        f"{', '.join(archs)} ({error})",
    )


def jit(config: dict[str, Any], channel: Channel) -> dict[str, Any]:
    end = beat_while(
        channel, lambda: "importing flashinfer.jit"
    )  # its binding library may build a part of itself
    try:
        import flashinfer
        from flashinfer.jit.comm import gen_trtllm_comm_module
    finally:
        end()
    try:
        spec = gen_trtllm_comm_module()
    except RuntimeError as error:
        cause, text = gate_or_compiler(error)
        channel.fail(cause, text)
        sys.exit(3)
    found = {
        "flashinfer": flashinfer.__version__,
        "library": str(spec.get_library_path()),
        "warm": spec.is_compiled,
    }
    if spec.is_aot and config["refuse_aot"]:
        channel.fail(
            "aot",
            f"{spec.get_library_path()} would be used instead of a build, and the ready-made library of "
            f"FlashInfer {flashinfer.__version__} has no SM120 code",
        )
        sys.exit(3)
    folder = spec.jit_library_path.parent

    def count() -> str:
        return f"building trtllm_comm, {len(list(folder.glob('*.o')))} of {len(spec.sources)} objects"

    end = beat_while(channel, count)
    try:
        if not spec.is_aot:
            spec.build(verbose=False, need_lock=True)
    finally:
        end()
    library = Path(spec.get_library_path())
    if not library.is_file():
        raise RuntimeError(f"the build ended well but left no {library}")
    return {**found, "bytes": library.stat().st_size, "aot": spec.is_aot}


def main() -> None:
    die_with_parent()
    channel = Channel()
    stages = {"toolchain": toolchain, "jit": jit}
    config = read_config()
    try:
        for name in config["stages"]:
            channel.begin(name)
            channel.end(**stages[name](config, channel))
        channel.send("done")
    except Missing as missing:
        channel.fail("toolchain", str(missing))
        sys.exit(3)
    except Exception as error:
        traceback.print_exc()
        channel.fail("exception", f"{type(error).__name__}: {str(error)[-1500:]}")
        sys.exit(3)


main()
