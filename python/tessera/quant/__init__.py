"""Tables with rows in few bits, for models that only predict."""

from functools import partial

from tessera._lazy import submodule
from tessera.quant.embedding_modules import EmbeddingBagCollection

__all__ = ["EmbeddingBagCollection"]

__getattr__ = partial(submodule, __name__)
