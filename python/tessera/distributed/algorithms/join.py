"""Uneven inputs: torch's own `Join`, which `tessera.nn.parallel.DistributedDataParallel` takes part in."""

from torch.distributed.algorithms.join import Join, Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable"]
