"""Make a folder of wheels with the names and versions of a lock, and nothing in them: real installers install them.

Arguments: the lock, the folder. A few packages get modules that the role imports, or files that two of them share.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

MODULES = {
    "torch": {"torch/__init__.py": ""},
    "transformers": {"transformers/__init__.py": ""},
    "flashinfer-python": {"flashinfer/__init__.py": ""},
    # One name after the other for the same module, and one library of two CUDA releases: the last one installed wins.
    "sgl-kernel": {"sgl_kernel/__init__.py": "", "sgl_kernel/of": "sgl-kernel"},
    "sglang-kernel": {"sgl_kernel/__init__.py": "", "sgl_kernel/of": "sglang-kernel"},
    "nvidia-cudnn-cu12": {"nvidia/cudnn/lib/of": "nvidia-cudnn-cu12"},
    "nvidia-cudnn-cu13": {"nvidia/cudnn/lib/of": "nvidia-cudnn-cu13"},
    "sglang": {"sglang/__init__.py": "", "sglang/srt/__init__.py": "", "sglang/srt/server_args.py": ""},
}


def make(folder: Path, name: str, version: str, files: dict[str, str] | None = None) -> Path:
    """One wheel, for any Python."""
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    entries = {
        **(files or {}),
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{stem}.dist-info/RECORD"
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for path, text in entries.items()
    ]
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name_inside, text in entries.items():
            wheel.writestr(name_inside, text)
        wheel.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return path


def main() -> None:
    lock, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for line in lock.read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            make(folder, name, version, MODULES.get(name))


if __name__ == "__main__":
    main()
