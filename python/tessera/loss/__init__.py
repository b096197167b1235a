"""The module paths of nemo_automodel.components.loss, on Tessera's engine."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
