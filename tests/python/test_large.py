"""Buffers beyond 2^31 bytes, where a 32-bit count somewhere would show."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

COUNT = 2**31 + 5


def available_gib() -> float:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def pattern(rank: int) -> torch.Tensor:
    # Ends and the places around 2^31 differ from the rest, and from rank to rank.
    data = torch.full((COUNT,), 1 + rank, dtype=torch.uint8)
    data[0], data[2**31 - 1], data[2**31], data[-1] = 11 + rank, 21 + rank, 31 + rank, 41 + rank
    return data


def probe(data: torch.Tensor) -> list[int]:
    return [int(data[i]) for i in (0, 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, -1)]


def move_large(rank):
    found = {}
    data = pattern(rank)
    dist.all_reduce(data)
    found["all_reduce"] = probe(data)
    data = pattern(rank) if rank == 1 else data.zero_()
    dist.broadcast(data, 1)
    found["broadcast"] = probe(data)
    return found


@pytest.mark.skipif(available_gib() < 10, reason="needs 10 GiB of memory")
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_more_than_two_gigabytes(engine):
    env = {"TESSERA_ENGINE": engine, "LIMIT": "60"}
    for found in run_ranks(2, move_large, backend="shm", env=env, limit=120):
        assert found["all_reduce"] == [23, 3, 3, 43, 63, 3, 83]
        assert found["broadcast"] == [12, 2, 2, 22, 32, 2, 42]
