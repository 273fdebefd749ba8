"""Fetch wheels of SGLang and FlashInfer from the package index, and unpack of them what the gates need."""

from __future__ import annotations

import base64
import csv
import fcntl
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("SM120_WHEEL_CACHE", ROOT / ".cache" / "wheels"))
DISTRIBUTIONS = {"sglang": "sglang", "flashinfer": "flashinfer-python"}

# Later SGLang wheels carry a tag of one Python and one platform; only their text is read, so one will do.
_TAGS = [
    "--python-version=3.11",
    "--implementation=cp",
    "--abi=cp311",
    *(f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 34, 28, 17)),
]


def wheel(package: str, version: str) -> Path:
    """The wheel of a release, from the cache folder or downloaded into it."""
    name = DISTRIBUTIONS[package]
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob(pattern)):
        with (CACHE / ".lock").open("w") as lock:  # tests that run side by side share the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not list(CACHE.glob(pattern)):
                _download(f"{name}=={version}", pattern)
    return next(CACHE.glob(pattern))


def _download(wanted: str, pattern: str) -> None:
    """Moved into the cache as a whole: one that is killed leaves no part of a wheel there."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"),
                *(*_TAGS, f"--dest={folder}", wanted),
            ],
            check=True,
        )
        (path,) = Path(folder).glob(pattern)
        path.replace(CACHE / path.name)


def gated_paths(package: str) -> set[str]:
    """Every file in which a gate of this package has ever been."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    catalogue = importlib.import_module("module_utils.sm120.catalogue")
    return {variant.path for gate in catalogue.GATES if gate.package == package for variant in gate.variants}


def unpack(package: str, version: str, site: Path, wanted: Callable[[str], bool] | None = None) -> None:
    """Unpack the gated files of a release, its dist-info, and whatever else `wanted` names."""
    paths = gated_paths(package) | {f"{package}/__init__.py"}
    with zipfile.ZipFile(wheel(package, version)) as archive:
        for name in archive.namelist():
            if ".dist-info/" in name or name in paths or (wanted is not None and wanted(name)):
                archive.extract(name, site)


def recorded(site: Path) -> dict[Path, str]:
    """sha256 of every unpacked file, as RECORD has it."""
    hashes = {}
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            for name, value, *_ in csv.reader(lines):
                if value and (site / name).is_file():
                    raw = value.removeprefix("sha256=")
                    hashes[site / name] = base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)).hex()
    return hashes


def differing(site: Path) -> set[str]:
    """Unpacked files that are not as their wheel delivered them."""
    return {
        str(path.relative_to(site))
        for path, digest in recorded(site).items()
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest
    }


def deliver(site: Path, relative: str, data: bytes) -> None:
    """Change a file together with its line in RECORD, as if upstream had released it that way."""
    value = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    (site / relative).write_bytes(data)
    for record in site.glob("*.dist-info/RECORD"):
        with record.open(newline="") as lines:
            rows = list(csv.reader(lines))
        for row in rows:
            if row[0] == relative:
                row[1] = f"sha256={value}"
        with record.open("w", newline="") as lines:
            csv.writer(lines).writerows(rows)
