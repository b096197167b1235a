"""The types of sharding taken apart: what sends ids, what looks them up, what sends rows home."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
