"""Submodules that are loaded when they are asked for, as attributes of their package."""

from __future__ import annotations

import importlib
from types import ModuleType


def submodule(package: str, name: str) -> ModuleType:
    """Return a package's submodule, for its `__getattr__`. Raises AttributeError if there is none.

    >>> submodule("tessera.sparse", "jagged_tensor").__name__
    'tessera.sparse.jagged_tensor'
    """
    path = f"{package}.{name}"
    if not name.startswith("_"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
