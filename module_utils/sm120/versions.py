"""Version ranges as `packaging` understands them, on hosts whose own Python may have no `packaging`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType


class PackagingMissing(Exception):
    """Neither the interpreter nor the examined environment has `packaging`."""

    def __init__(self) -> None:
        super().__init__(
            "the Python library 'packaging' is neither in this host's Python nor in the examined environment "
            "(not inside its pip either): install it with 'apt install python3-packaging'"
        )


def _load_from(folder: Path) -> bool:
    """Register the `packaging` that lies in a folder under its usual name."""
    spec = importlib.util.spec_from_file_location(
        "packaging", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        return False
    module = importlib.util.module_from_spec(spec)
    sys.modules["packaging"] = module
    try:
        spec.loader.exec_module(module)
        importlib.import_module("packaging.specifiers")
    except (ImportError, SyntaxError):
        for name in [name for name in sys.modules if name == "packaging" or name.startswith("packaging.")]:
            del sys.modules[name]
        return False
    return True


def specifiers(site_dirs: Iterable[Path] = ()) -> ModuleType:
    """`packaging.specifiers`: the interpreter's own, else that of the examined environment or of its pip."""
    try:
        return importlib.import_module("packaging.specifiers")
    except ImportError:
        pass
    for site in site_dirs:
        for folder in (site / "packaging", site / "pip" / "_vendor" / "packaging"):
            if (folder / "__init__.py").is_file() and _load_from(folder):
                return importlib.import_module("packaging.specifiers")
    raise PackagingMissing


class Ranges:
    """Answers whether a version lies in a range; pre-releases and local suffixes included."""

    def __init__(self, site_dirs: Iterable[Path] = ()) -> None:
        self._set = specifiers(site_dirs).SpecifierSet
        self.contains = lru_cache(maxsize=None)(self._contains)

    def _contains(self, versions: str, version: str) -> bool:
        return bool(self._set(versions).contains(version, prereleases=True))
