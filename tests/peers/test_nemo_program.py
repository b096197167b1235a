"""Policy optimisation in NeMo-RL's names, on every number of ranks, against plain torch in one process."""

from __future__ import annotations

import functools
import tempfile

import nemo_program
import pytest
import torch
import torch.distributed as dist
import two_sides  # noqa: F401  # finds the helpers of the other tests

from ranks import run_ranks  # isort: skip

STEPS = 20


@functools.cache
def alone():
    return run_ranks(1, trained, "alone", 1, backend=None)[0]


def trained(rank, root, tensor):
    if not dist.is_initialized():
        return nemo_program.train(root, STEPS, tempfile.mkdtemp())
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return nemo_program.train(root, STEPS, folder[0], tensor)


@pytest.mark.parametrize("engine", ["gloo", "shm"])
@pytest.mark.parametrize(("world", "tensor"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_trains_as_plain_torch_does(world, tensor, engine):
    expected, expected_state = alone()
    rewards = expected[2::3]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1  # it learns
    for found, state in run_ranks(world, trained, "tessera", tensor, backend=engine, limit=180):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for name, value in expected_state.items():
            torch.testing.assert_close(
                state[name], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
