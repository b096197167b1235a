"""The path of today's fairchem: ``fairchem.core.common`` is ``tessera.core.common``."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
