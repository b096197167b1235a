"""Who owns which atom, and which rows travel, by fairchem's names."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
