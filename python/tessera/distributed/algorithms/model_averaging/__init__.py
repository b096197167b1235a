"""Replicas that go their own way and meet from time to time."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
