"""One training program under torch's wrapper and under ours: the same losses, the same model."""

from __future__ import annotations

import tempfile

import ddp_program
import pytest
import torch
import torch.distributed as dist
import two_sides  # noqa: F401  # finds the helpers of the other tests

from ranks import run_ranks  # isort: skip

THEIRS, OURS = ddp_program.WRAPPERS


def compare(rank, theirs, mixed, tolerance):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    losses, state = ddp_program.train(OURS, folder[0], mixed)
    if rank == 0:
        assert sum(losses[-6:]) < 0.7 * sum(losses[:6])  # it learns
    expected, expected_state = theirs[rank]
    torch.testing.assert_close(losses, expected, rtol=0, atol=tolerance)
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        torch.testing.assert_close(
            state[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def of_torch(rank, mixed):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return ddp_program.train(THEIRS, folder[0], mixed)


@pytest.mark.parametrize("engine", ["gloo", "shm"])
@pytest.mark.parametrize("world", [1, 2])
def test_mixed_precision_bit_for_bit(world, engine):
    """Two ranks have one sum only, so that nothing may differ."""
    theirs = run_ranks(world, of_torch, True, backend="gloo", limit=120)
    run_ranks(world, compare, theirs, True, 0.0, backend=engine, limit=120)


@pytest.mark.parametrize("engine", ["gloo", "shm"])
def test_four_ranks(engine):
    """Sums of four are taken in another order: a rounding of bfloat16 would turn it into a visible step."""
    theirs = run_ranks(4, of_torch, False, backend="gloo", limit=180)
    run_ranks(4, compare, theirs, False, 1e-9, backend=engine, limit=180)
