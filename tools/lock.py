#!/usr/bin/env python3
"""Resolve the CUDA release sets: locks/X-cuda.in (what upstream pins) to locks/X-cuda.txt (every package).

The locks are installed without dependencies, so that a host gets today what it gets in a year. Metadata alone is
fetched (uv, which reads it out of wheels by range requests): no wheel is downloaded and nothing is built.

    tools/lock.py                 write all locks anew, resolved on Python 3.11, so that they serve 3.12 as well
    tools/lock.py 0.5.23          that one
    tools/lock.py --check PYTHON  resolve the pins under the lock on that interpreter: each lock must come out as it is
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "roles/sglang_runtime/files/locks"
# The toolkit that compiles FlashInfer's kernels may lie in the same venv: its wheels must be of one release.
TOOLKIT = ROOT / "roles/cuda_toolkit/vars/main.yml"
OLDEST_PYTHON = "3.11"  # sglang 0.5.22 and newer need it
OVERRIDE = "# override: "


def releases() -> list[str]:
    return sorted(path.name.removesuffix("-cuda.in") for path in LOCKS.glob("*-cuda.in"))


def pinned(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def resolve(release: str, python: str, under: list[str]) -> list[str]:
    """The packages that the pins of a release ask for on a Python, held to the constraints `under`."""
    pins = LOCKS / f"{release}-cuda.in"
    toolkit = yaml.safe_load(TOOLKIT.read_text())["__cuda_toolkit_releases"]["13.0"]["packages"]
    overrides = [
        line.removeprefix(OVERRIDE) for line in pins.read_text().splitlines() if line.startswith(OVERRIDE)
    ]
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        sys.exit("wanted: uv (make setup .venv/bin/.ready-dev installs it). Found: none.")
    with tempfile.TemporaryDirectory() as folder:
        constraints, override = Path(folder) / "constraints.txt", Path(folder) / "overrides.txt"
        constraints.write_text(
            "\n".join([*(f"{name}=={version}" for name, version in toolkit.items()), *under])
        )
        override.write_text("\n".join(overrides))
        command = [uv, "pip", "compile", str(pins), "--python", python, "--no-build", "--quiet"]
        command += ["--no-header", "--no-annotate", "--no-config", "--constraint", str(constraints)]
        done = subprocess.run([*command, "--override", str(override)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{release} does not resolve on Python {python}:\n{done.stderr}")
    return pinned(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", default=releases())
    parser.add_argument("--check", metavar="PYTHON")
    given = parser.parse_args()
    wrong = []
    for release in given.releases:
        lock = LOCKS / f"{release}-cuda.txt"
        if given.check:
            known = pinned(lock.read_text())
            differing = sorted(set(known) ^ set(resolve(release, given.check, known)))
            print(f"{release}: {len(known)} packages, {len(differing)} differ {' '.join(differing)}".rstrip())
            wrong += differing
        else:
            head = f"# Every package of SGLang {release} for CUDA, by tools/lock.py from {release}-cuda.in.\n"
            lock.write_text(head + "".join(f"{line}\n" for line in resolve(release, OLDEST_PYTHON, [])))
    if wrong:
        sys.exit("wanted: locks that are what their pins resolve to. Run: tools/lock.py")


if __name__ == "__main__":
    main()
