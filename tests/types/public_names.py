"""Uses of public names as a type checker sees them. `make lint` reads this; nothing runs it."""

from __future__ import annotations

from typing import assert_type

import torch
from tessera.comm import all_gather, all_reduce
from tessera.nn.parallel import DistributedDataParallel
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import Tensor


def collectives(x: Tensor) -> None:
    assert_type(all_reduce(x), Tensor)
    assert_type(all_gather(x), Tensor)
    all_reduce(3)  # type: ignore[arg-type]


def data_parallel(net: torch.nn.Module) -> None:
    DistributedDataParallel(net, bucket_cap_mb=25, static_graph=True)
    DistributedDataParallel(net, bucket_cap_mb="large")  # type: ignore[arg-type]
    DistributedDataParallel(net, bucket_size=25)  # type: ignore[call-arg]


def jagged(batch: KeyedJaggedTensor) -> None:
    assert_type(batch.values(), Tensor)
    assert_type(batch.keys(), list[str])
