"""Names without anything behind them, so that SGLang imports on a host that has no GPU packages.

SGLang imports sgl_kernel, torchvision and IPython at start and, with --device cpu, uses none of them. A name of
such a package resolves here; calling it raises, so that nothing can be computed with a stand-in by mistake.
Submodules of a stand-in are made on import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn


class AbsentName:
    """An attribute of a package that is not installed: may be named, annotated with, derived from; not called."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.__name__ = path.rpartition(".")[2]

    def __getattr__(self, name: str) -> AbsentName:
        if name.startswith("__"):
            raise AttributeError(name)
        return AbsentName(f"{self._path}.{name}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{self._path} is an import stand-in: this host was set up for device cpu")

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, _other: Any) -> AbsentName:
        return self

    __ror__ = __or__


def _names_of(module: ModuleType) -> None:
    def resolve(name: str) -> AbsentName:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return AbsentName(f"{module.__name__}.{name}")

    module.__getattr__ = resolve  # type: ignore[method-assign]


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = package + "."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        _names_of(module)


def stand_in(package: str) -> None:
    """Make an imported, empty package answer for every name and submodule below it."""
    module = sys.modules[package]
    _names_of(module)
    # Last on the path: a real file of the package, should there be one, comes first.
    sys.meta_path.append(_Submodules(package))
