"""Compilers, headers and packages that are missing or do not fit together."""

from __future__ import annotations

import re

from .signature import CAUSE, Signature

TOPIC = "Something is missing, or versions do not fit"

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="toolchain.no_ninja",
        role=CAUSE,
        layer="toolchain",
        needle=b"ninja",
        pattern=re.compile(
            rb"(?i)no such file or directory: '?ninja|ninja(?:: | is )(?:command )?not found"
            rb"|ninja is required|"
            rb"No module named 'ninja'"
        ),
        meaning="The service's environment has no ninja: nothing can be compiled.",
        advice="pip install ninja in the venv, and the venv's bin first in the unit's PATH (role "
        "sglang_runtime).",
    ),
    Signature(
        name="toolchain.no_nvcc",
        role=CAUSE,
        layer="toolchain",
        needle=b"nvcc",
        pattern=re.compile(
            rb"(?i)could not find nvcc|nvcc[^\n]{0,40}(?:not found|No such file)"
            rb"|No such file or directory: '[^']*nvcc"
        ),
        meaning="The service's environment has no nvcc.",
        advice="Install the toolkit (role cuda_toolkit) and set CUDA_HOME to one absolute folder in "
        "the unit.",
    ),
    Signature(
        name="toolchain.no_cuda_home",
        role=CAUSE,
        layer="toolchain",
        needle=b"rror",
        pattern=re.compile(rb"CUDA_HOME environment variable is not set|CUDA_HOME.*does(?:n't| not) exist"),
        meaning="CUDA_HOME is not set or names no folder.",
        advice="Set CUDA_HOME to one absolute folder in the unit's environment.",
    ),
    Signature(
        name="toolchain.no_header",
        role=CAUSE,
        layer="toolchain",
        needle=b"rror",
        pattern=re.compile(
            rb"fatal error: \S+\.(?:h|hpp|cuh)\b.*(?:No such file|not found)|cannot open source file"
        ),
        meaning="The compiler lacks a header: Python.h (python3-dev), or a part of the CUDA toolkit.",
        advice="Install the package that holds the header named in the line.",
    ),
    Signature(
        name="toolchain.no_compiler",
        role=CAUSE,
        layer="toolchain",
        needle=b"",
        pattern=re.compile(
            rb"(?i)failed to find C compiler|gcc: (?:fatal )?error: .*cc1plus|c\+\+: not found"
        ),
        meaning="The service's environment has no C or C++ compiler.",
        advice="apt install build-essential.",
    ),
    Signature(
        name="toolchain.no_libcuda",
        role=CAUSE,
        layer="driver",
        needle=b"cuda",
        pattern=re.compile(
            rb"(?i)cannot find -lcuda\b|libcuda\.so(?:\.1)?\S* ?:? ?(?:not found|cannot open)"
            rb"|libcuda\.so cannot found"
        ),
        meaning="The driver's library is not visible to the service.",
        advice="nvidia-smi must work for the service user; ldconfig -p | grep libcuda. On a host "
        "without GPUs use device cpu.",
    ),
    Signature(
        name="packages.libcudart_not_loaded",
        role=CAUSE,
        layer="packages",
        needle=b"libcudart is not loaded",
        meaning="FlashInfer wants the CUDA runtime library in the process, and torch has none (a CPU build).",
        advice="On device cpu preload the library of the nvidia-cuda-runtime wheel (role "
        "sglang_runtime does).",
    ),
    Signature(
        name="packages.flashinfer_mismatch",
        role=CAUSE,
        layer="packages",
        needle=b"does not match flashinfer version",
        meaning="flashinfer-cubin or flashinfer-jit-cache is of another version than flashinfer-python.",
        advice="Install the same version, or remove them; FLASHINFER_DISABLE_VERSION_CHECK only "
        "hides it. A jit-cache "
        "wheel also bypasses the gate edits.",
    ),
    Signature(
        name="packages.flashinfer_mismatch",
        role=CAUSE,
        layer="packages",
        needle=b"rror",
        pattern=re.compile(rb"flashinfer[-_](?:jit[-_]cache|cubin) version \("),
        meaning="flashinfer-cubin or flashinfer-jit-cache is of another version than flashinfer-python.",
        advice="Install the same version, or remove them; FLASHINFER_DISABLE_VERSION_CHECK only "
        "hides it. A jit-cache "
        "wheel also bypasses the gate edits.",
    ),
    Signature(
        name="packages.too_old",
        role=CAUSE,
        layer="packages",
        needle=b"xception",
        pattern=re.compile(
            rb"is installed with version \S+, which is less than the minimum required|"
            rb"with minimum required version \S+ is not installed"
        ),
        meaning="A kernel package is older than this SGLang wants.",
        advice="Install the release set as a whole (role sglang_runtime): its versions are pinned together.",
    ),
    Signature(
        name="packages.abi",
        role=CAUSE,
        layer="packages",
        needle=b"rror",
        pattern=re.compile(rb"undefined symbol: \S+|symbol lookup error"),
        meaning="A compiled package was built for another torch or CUDA.",
        advice="Install the release set as a whole (role sglang_runtime); check for a second copy "
        "of the package.",
    ),
    Signature(
        name="packages.missing_library",
        role=CAUSE,
        layer="packages",
        needle=b"rror",
        pattern=re.compile(
            rb"ImportError: lib\S+: cannot open shared object file|OSError: lib\S+: cannot open shared"
        ),
        meaning="A shared library is not on the loader's path.",
        advice="The line names it; usually a CUDA wheel of the release set is not installed.",
    ),
    Signature(
        name="packages.missing_module",
        role=CAUSE,
        layer="packages",
        needle=b"rror",
        # transformers_modules are a model's own code.
        pattern=re.compile(rb"(?:^|: )ModuleNotFoundError: No module named (?!'transformers_modules)"),
        meaning="A Python package is not installed in the venv.",
        advice="The line names it; install the release set as a whole (role sglang_runtime).",
    ),
    Signature(
        name="packages.registered_twice",
        role=CAUSE,
        layer="packages",
        needle=b"rror",
        pattern=re.compile(rb"is already used by a Transformers (?:config|model)"),
        meaning="transformers is newer than this SGLang knows: both bring the same model.",
        advice="Install the transformers version of the release set.",
    ),
)
