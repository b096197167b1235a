"""Notices replicas that have silently grown apart."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tessera import _C

__all__ = ["ReplicaFingerprint"]


class ReplicaFingerprint:
    """Compares the replicas of a model every `every` steps; eight bytes per rank."""

    def __init__(self, every: int, process_group: dist.ProcessGroup | None = None):
        self._native = _C.ReplicaFingerprint(process_group or dist.group.WORLD, every)

    def check(self, module: torch.nn.Module) -> bool:
        """Count a step and return whether it compared. All ranks call it.

        Raises RuntimeError, on all ranks with the same text, naming the first parameter that differs
        and the ranks on each side.
        """
        names, parameters = [], []
        for name, parameter in module.named_parameters():
            names.append(name)
            parameters.append(parameter)
        return self._native.check(names, parameters)
