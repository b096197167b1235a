"""The module paths of torchrec.metrics: how well a model predicts clicks, over all ranks."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
