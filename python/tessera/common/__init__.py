"""Graph parallelism under the reference's module path."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
