"""Split one training job over many processes.

Importing this package makes the process-group backend ``"shm"`` known to ``torch.distributed``:

>>> import tessera, torch.distributed
>>> torch.distributed.Backend("shm")
'shm'
"""

import importlib

import torch  # noqa: F401  # loads the libraries that the extension is linked with

from tessera import _torch_check  # noqa: F401  # isort: skip  # before the extension meets another torch
from tessera import _C, _lazy, _store, comm
from tessera._backend import register as _register
from tessera._error import CommError

_register()
_store.register()

__version__ = _C.version()

# Names of other projects at the top, where their programs look for them; loaded when they are asked for.
_PLACES = {
    "DataType": "modules.embedding_configs",
    "EmbeddingBagCollection": "modules.embedding_modules",
    "EmbeddingBagCollectionInterface": "modules.embedding_modules",
    "EmbeddingBagConfig": "modules.embedding_configs",
    "EmbeddingCollection": "modules.embedding_modules",
    "EmbeddingConfig": "modules.embedding_configs",
    "JaggedTensor": "sparse.jagged_tensor",
    "KeyedJaggedTensor": "sparse.jagged_tensor",
    "KeyedTensor": "sparse.jagged_tensor",
    "Multistreamable": "streamable",
    "Pipelineable": "streamable",
    "PoolingType": "modules.embedding_configs",
}

__all__ = ["CommError", "__version__", "comm", *_PLACES]


def __getattr__(name: str):
    if name in _PLACES:
        return getattr(importlib.import_module(f"tessera.{_PLACES[name]}"), name)
    return _lazy.submodule(__name__, name)
