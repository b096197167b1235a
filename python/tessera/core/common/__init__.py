"""Graph parallelism by the paths and signatures of ``fairchem.core.common``."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
