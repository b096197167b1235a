"""Data parallelism: `DistributedDataParallel`, with the signature of torch's."""

from tessera.nn.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
