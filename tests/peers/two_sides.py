"""The same names of both projects, for programs that run on either."""

from __future__ import annotations

import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))


class Side:
    """Give the modules of one project: `side("distributed.types")`."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __call__(self, path: str):
        return importlib.import_module(f"{self.root}.{path}")


OURS = Side("tessera")
THEIRS = Side("torchrec")
SIDES = (OURS, THEIRS)
