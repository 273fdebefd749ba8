"""Where SGLang and FlashInfer live, and what their files were when delivered. Nothing is imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

DISTRIBUTIONS = {"sglang": "sglang", "flashinfer": "flashinfer-python"}


class PackageProblem(Exception):
    """A package that is missing, ambiguous, or that nothing can be proved about."""


@dataclass(frozen=True)
class Distribution:
    """An installed distribution, as its dist-info folder tells it."""

    name: str
    version: str
    info: Path


@dataclass(frozen=True)
class Package:
    """A package found on disk. Paths of its files are relative to `base`, as RECORD has them."""

    name: str
    version: str
    root: Path
    source: str
    hashes: dict[str, str] = field(default_factory=dict)
    site_dirs: tuple[Path, ...] = ()

    @property
    def base(self) -> Path:
        return self.root.parent


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _header(metadata: Path, key: str) -> str:
    for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line:
            break
        if line.startswith(f"{key}: "):
            return line.partition(": ")[2].strip()
    raise PackageProblem(f"{metadata} has no {key}: the installation is damaged, install the package again")


def distributions(folder: Path) -> Iterator[Distribution]:
    """Every installed distribution that a folder holds."""
    for info in sorted(folder.glob("*.dist-info")):
        metadata = info / "METADATA"
        if metadata.is_file():
            yield Distribution(_canonical(_header(metadata, "Name")), _header(metadata, "Version"), info)


def _one(name: str, folders: Iterable[Path]) -> Distribution | None:
    """The distribution of this name on a path: the first folder wins, as it does for Python."""
    wanted = _canonical(DISTRIBUTIONS[name])
    for folder in folders:
        found = [each for each in distributions(folder) if each.name == wanted]
        if len(found) > 1:
            versions = " and ".join(each.version for each in found)
            raise PackageProblem(
                f"{folder} holds {wanted} twice ({versions}): an upgrade was interrupted, "
                f"run pip install --force-reinstall --no-deps {wanted}==<version>"
            )
        if found:
            return found[0]
    return None


def record_hashes(info: Path, prefix: str) -> dict[str, str]:
    """sha256 of each file below `prefix`, as a wheel's RECORD writes it: there are thousands, and few are asked for."""
    record = info / "RECORD"
    if not record.is_file():
        return {}
    hashes = {}
    with record.open(newline="", encoding="utf-8") as lines:
        for row in csv.reader(lines):
            if len(row) >= 2 and row[0].startswith(prefix) and row[1].startswith("sha256="):
                hashes[row[0]] = row[1].removeprefix("sha256=")
    return hashes


def _editable_root(distribution: Distribution, name: str) -> Path | None:
    """The package folder of an editable install, from PEP 610's direct_url.json."""
    direct = distribution.info / "direct_url.json"
    if not direct.is_file():
        return None
    told = json.loads(direct.read_text(encoding="utf-8"))
    if not told.get("dir_info", {}).get("editable"):
        return None
    project = Path(unquote(urlparse(told["url"]).path))
    for folder in (project / name, project / "src" / name, project / "python" / name):
        if (folder / "__init__.py").is_file():
            return folder
    raise PackageProblem(f"{name} is an editable install of {project}, where there is no {name} package")


def _git(root: Path, *arguments: str) -> bytes | None:
    """Ask git about a checkout that may belong to another user; None where there is no answer."""
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "-C", str(root), *arguments],
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _from_distribution(name: str, distribution: Distribution, site_dirs: tuple[Path, ...]) -> Package:
    editable = _editable_root(distribution, name)
    if editable is not None:
        return Package(name, distribution.version, editable, "git", site_dirs=site_dirs)
    hashes = record_hashes(distribution.info, f"{name}/")
    root = distribution.info.parent / name
    if not hashes or not root.is_dir():
        raise PackageProblem(
            f"{distribution.info} lists no files of {name} (no RECORD, or a damaged one): "
            f"run pip install --force-reinstall --no-deps {distribution.name}=={distribution.version}"
        )
    return Package(name, distribution.version, root, "wheel", hashes, site_dirs)


def search_path(python: str) -> tuple[Path, ...]:
    """The folders that an interpreter imports from."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", "import json, sys; print(json.dumps(sys.path))"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PackageProblem(f"{python} does not run: {error}") from None
    if asked.returncode != 0:
        raise PackageProblem(f"{python} does not run: {asked.stderr.strip()}")
    try:
        told = json.loads(asked.stdout)
    except ValueError:
        raise PackageProblem(
            f"{python} does not tell its import path alone, it says {asked.stdout[-300:]!r}: something prints when it "
            "starts (a .pth file, sitecustomize)"
        ) from None
    return tuple(Path(each) for each in told if Path(each).is_dir())


def by_interpreter(name: str, site_dirs: tuple[Path, ...]) -> Package | None:
    """A package as this import path has it; None where it is not installed."""
    distribution = _one(name, site_dirs)
    return None if distribution is None else _from_distribution(name, distribution, site_dirs)


_VERSION = re.compile(r"^__version__(?:: str)? = (?:version = )?['\"]([^'\"]+)['\"]", re.MULTILINE)


def by_root(name: str, root: Path) -> Package:
    """A package from its own folder: beside its dist-info, or inside a git checkout."""
    if root.name != name or not (root / "__init__.py").is_file():
        raise PackageProblem(
            f"{root} is not a package folder of {name}: wanted .../{name} with an __init__.py"
        )
    site_dirs = (root.parent,)
    distribution = _one(name, site_dirs)
    if distribution is not None:
        return _from_distribution(name, distribution, site_dirs)
    if _git(root, "rev-parse", "--show-toplevel") is None:
        raise PackageProblem(
            f"{root} has neither a {DISTRIBUTIONS[name]} dist-info beside it nor is it in a git checkout: "
            "nothing proves what its files were"
        )
    for told in ("version.py", "_version.py", "_build_meta.py", "__init__.py"):
        text = (root / told).read_text(encoding="utf-8") if (root / told).is_file() else ""
        if match := _VERSION.search(text):
            return Package(name, match.group(1), root, "git", site_dirs=site_dirs)
    raise PackageProblem(f"{root} does not tell its version: install the checkout with pip install -e first")


def delivered(package: Package, relative: str) -> tuple[str, bytes | None] | None:
    """What a file was when delivered: its sha256 and, from a checkout, its bytes."""
    if package.source == "wheel":
        known = package.hashes.get(relative)
        if known is None:
            return None
        return base64.urlsafe_b64decode(known + "=" * (-len(known) % 4)).hex(), None
    blob = _git(package.base, "show", f"HEAD:./{relative}")
    return None if blob is None else (hashlib.sha256(blob).hexdigest(), blob)


def tracked(package: Package) -> set[str] | None:
    """Every file of a checkout as delivered, whether it still lies there or not; None where git does not tell."""
    listed = _git(package.base, "ls-tree", "-r", "-z", "--name-only", "HEAD", "--", f"{package.name}/")
    return None if listed is None else set(listed.decode(errors="surrogateescape").split("\0")) - {""}
