"""What makes a trained model ready to predict."""

from functools import partial

from tessera._lazy import submodule

__getattr__ = partial(submodule, __name__)
