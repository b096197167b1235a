"""The module paths of torch.distributed.algorithms, on Tessera's engine."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
