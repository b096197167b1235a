"""The module paths of torchrec.models: whole models of clicks."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
