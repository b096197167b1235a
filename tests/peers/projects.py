"""Files of projects that need more than is installed, read without what their packages import."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest


def need(package: str) -> None:
    """Skip the module of tests that calls this, unless `make peers` could install the project."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)


def only_files_of(package: str, *inner: str) -> None:
    """Let modules of a package be imported without running what is in its `__init__`, or in inner ones."""
    for name in (package, *(f"{package}.{path}" for path in inner)):
        module = types.ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            module.__path__ = [f"{folder}/{last}" for folder in sys.modules[parent].__path__]
        else:
            module.__path__ = list(importlib.util.find_spec(name).submodule_search_locations)
        sys.modules[name] = module


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in(name: str, **values: Any) -> None:
    """Put a module there of which any name is an empty class, but for the values given."""
    module = _StandIn(name)
    module.__path__ = []
    for key, value in values.items():
        setattr(module, key, value)
    sys.modules[name] = module
