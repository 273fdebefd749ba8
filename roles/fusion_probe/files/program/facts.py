"""Prints versions and folders of the environment's packages as JSON, without importing any."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys

PACKAGES = {
    "torch": "torch",
    "sglang": "sglang",
    "flashinfer-python": "flashinfer",
    "flashinfer-jit-cache": "flashinfer_jit_cache",
    "apache-tvm-ffi": "tvm_ffi",
    "nvidia-nccl-cu13": "",
    "nvidia-nccl-cu12": "",
}


def main() -> None:
    found: dict[str, dict[str, str]] = {}
    for package, module in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        spec = importlib.util.find_spec(module) if module else None
        folders = list(spec.submodule_search_locations or []) if spec else []
        found[package] = {"version": version, "root": folders[0] if folders else ""}
    print(json.dumps({"python": sys.version.split()[0], "executable": sys.executable, "packages": found}))


main()
