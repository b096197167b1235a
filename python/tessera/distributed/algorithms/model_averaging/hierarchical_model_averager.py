"""Averaging in small groups often and in large ones rarely: the name of torch's module."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.model_averaging.averagers import EngineAverager

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(EngineAverager):
    """Averages over blocks of ranks; `period_group_size_dict` maps a period to the size of its blocks.

    Periods and sizes ascend, and the last size is the whole group's. Making the blocks is collective.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(process_group)
        if not period_group_size_dict:
            raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
        size = self.process_group.size()
        last = list(period_group_size_dict.values())[-1]
        if last != size:
            raise ValueError(
                f"The last value in arg ``period_group_size_dict`` {last} "
                f"must be equal to the size of arg ``process_group`` {size}."
            )
        self.warmup_steps = warmup_steps
        self.period_process_group_dict = {
            period: self.process_group
            if ranks == size
            else dist.new_subgroups(group_size=ranks, group=process_group)[0]
            for period, ranks in period_group_size_dict.items()
        }
        self._native = _C.HierarchicalModelAverager(
            list(self.period_process_group_dict.items()), warmup_steps
        )
