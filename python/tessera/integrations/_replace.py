"""Functions in the place of others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def replace(package: str, places: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Put functions in the place of a package's own, and return where, as "module.name".

    `places` are modules of the package and, by name, what goes there. A name that the installed version
    does not have is left out. Modules of the package that have imported the original by name get the
    new one as well. Raises ImportError if none of the modules is there.
    """
    done = []
    found = False
    for place, names in places.items():
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue
        found = True
        for name, function in names.items():
            original = getattr(module, name, None)
            if original is None or original is function:
                continue
            for other_name, other in list(sys.modules.items()):
                if other is None or not (other_name == package or other_name.startswith(f"{package}.")):
                    continue
                if getattr(other, name, None) is original:
                    setattr(other, name, function)
                    done.append(f"{other_name}.{name}")
    if not found:
        raise ImportError(f"integrations: none of the modules {', '.join(places)} is there.")
    return sorted(done)
