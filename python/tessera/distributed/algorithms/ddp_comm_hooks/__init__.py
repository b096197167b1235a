"""Communication hooks: how the gradients of a bucket become their average.

A hook is a function of a state and a bucket that returns a future of the averaged buffer. Those here
run in C++, and work with `tessera.nn.parallel.DistributedDataParallel` and with torch's own.
"""

from tessera.distributed.algorithms.ddp_comm_hooks._native import native_hook

__all__ = ["native_hook"]
