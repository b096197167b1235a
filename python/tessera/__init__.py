"""Split one training job over many processes.

Importing this package makes the process-group backend ``"shm"`` known to ``torch.distributed``:

>>> import tessera, torch.distributed
>>> torch.distributed.Backend("shm")
'shm'
"""

import torch  # noqa: F401  # loads the libraries that the extension is linked with

from tessera import _torch_check  # noqa: F401  # isort: skip  # before the extension meets another torch
from tessera import _C, comm
from tessera._backend import register as _register
from tessera._error import CommError

_register()

__version__ = _C.version()

__all__ = ["CommError", "__version__", "comm"]
