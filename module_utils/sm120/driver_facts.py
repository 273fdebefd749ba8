"""NVIDIA's driver on a host: what is loaded, on disk, packaged, and what the kernel would need. Changes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import gpu_facts
from .apt_packages import Record, too_full
from .apt_state import QUERY, Package, parse_packages
from .nvidia_repository import parse_os_release

DRIVER_PACKAGE = re.compile(
    r"nvidia-(?:driver|dkms|kernel|open|headless|utils|compute-utils|firmware|persistenced|modprobe|smi)(?!-pinning)"
    r"|linux-(?:modules|objects|signatures)-nvidia|libnvidia-(?:compute|ml|cfg)|libcuda1|cuda-drivers"
)


def module_on_disk(host: gpu_facts.Host, kernel: str) -> dict[str, str | None]:
    """Version and flavour of the module that the running kernel would load."""
    told = {}
    for field in ("version", "license"):
        code, text = host.run(["modinfo", "-k", kernel, "-F", field, "nvidia"])
        told[field] = text.strip() if code == 0 and text.strip() else None
    licence = told["license"]
    flavour = None if licence is None else "proprietary" if licence == "NVIDIA" else "open"
    return {"version": told["version"], "flavour": flavour}


def live_options(host: gpu_facts.Host, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Values of the named parameters of the modules that are loaded; those that cannot be read are left out."""
    found: dict[str, dict[str, str]] = {}
    for module, values in options.items():
        for name in values:
            text = host.read(f"sys/module/{module}/parameters/{name}")
            if text:
                found.setdefault(module, {})[name] = text
    return found


# Kernel metapackages, less those without headers of that name: Ubuntu's extra-virtual needs the generic one, which has
# them, and uc is Ubuntu Core's.
IMAGE_METAPACKAGE = re.compile(r"linux-image-(?!\d|.*-dbg|unsigned-|extra-virtual|uc-)(.+)")


def header_packages(packages: Mapping[str, Package], kernel: str, built: bool) -> list[str]:
    """Headers of the running kernel and, for those to come, of each image metapackage that is installed."""
    wanted = [] if built else [f"linux-headers-{kernel}"]
    for name, package in packages.items():
        kind = IMAGE_METAPACKAGE.fullmatch(name)
        if kind and package.there:
            wanted.append(f"linux-headers-{kind[1]}")
    return wanted


def gather(
    host: gpu_facts.Host,
    record: Path,
    done: Path,
    options: Mapping[str, Mapping[str, Any]],
    space: Mapping[str, int],
    kernel: str = "",
) -> dict[str, Any]:
    kernel = kernel or os.uname().release
    code, text = host.run(QUERY)
    packages = parse_packages(text) if code == 0 else {}
    distribution, _ = parse_os_release(host.read("etc/os-release"))
    return {
        **gpu_facts.gather(host),
        "distribution": distribution,
        "kernel": kernel,
        "disk": module_on_disk(host, kernel),
        "packages": packages,
        "driver_packages": sorted(
            name for name, each in packages.items() if each.there and DRIVER_PACKAGE.match(name)
        ),
        "headers": header_packages(packages, kernel, (host.root / f"lib/modules/{kernel}/build").exists()),
        "options": live_options(host, options),
        "record": Record.load(record),
        "initramfs_done": done.read_text().strip() if done.exists() else "",
        "too_full": too_full(space),
    }
