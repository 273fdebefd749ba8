"""Call FlashInfer's gen_trtllm_comm_module() for several architectures, in each of the package folders on stdin.

FlashInfer's own modules run: jit.comm, jit.core, jit.env, jit.cpp_ext, compilation_context. Of the packages around them
no torch and no compiler is needed to get as far as the build's specification, so stand-ins do. Prints JSON: for each
folder and architecture the flags for the compiler, or the error.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import jinja2  # noqa: F401 - used by FlashInfer; imported once here, not in every child
import packaging.version  # noqa: F401

ARCHITECTURES = ("8.0", "9.0a", "10.0a", "12.0a", "12.0f")


def called(folder: str) -> dict[str, list[str] | str]:
    for name in ("torch", "tvm_ffi", "filelock"):
        sys.modules[name] = MagicMock()
    sys.modules["torch"].version.cuda = "13.0"
    for name, path in (("flashinfer", folder), ("flashinfer.jit", f"{folder}/jit")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [path]
    context = importlib.import_module("flashinfer.compilation_context")
    core, comm = (importlib.import_module(f"flashinfer.jit.{name}") for name in ("core", "comm"))
    answers: dict[str, list[str] | str] = {}
    for architecture in ARCHITECTURES:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = architecture
        core.current_compilation_context = comm.current_compilation_context = context.CompilationContext()
        try:
            spec = comm.gen_trtllm_comm_module()
            answers[architecture] = [flag for flag in spec.extra_cuda_cflags if "-gencode" in flag]
        except RuntimeError as error:
            answers[architecture] = f"RuntimeError: {error}"
    return answers


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # the next call may be for another text of the same second
    folders = json.load(sys.stdin)
    os.environ |= {"FLASHINFER_WORKSPACE_BASE": sys.argv[1], "CUDA_HOME": str(Path(sys.argv[1]) / "no-cuda")}
    # A process each: every folder holds modules of the same names.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        json.dump(dict(zip(folders, pool.map(called, folders, chunksize=1), strict=True)), sys.stdout)
