"""What one sees of the reducer of tessera.nn.parallel.DistributedDataParallel from outside."""

from __future__ import annotations

import ctypes

import pytest
import torch
from ranks import run_ranks, run_ranks_collecting
from tessera.nn.parallel import DistributedDataParallel
from torch import nn
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    """Runs one layer in two checkpoints, which backward enters one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)


def train_twice(rank, options):
    torch.manual_seed(0)
    model = Twice()
    ddp = DistributedDataParallel(model, **options)
    for step in range(3):
        model.zero_grad()
        x = torch.full((2, 3), step + rank + 1.0, requires_grad=True)
        ddp(x).sum().backward()
    return [p.grad.tolist() for p in model.parameters()]


def test_a_gradient_that_comes_twice_is_named():
    for outcome in run_ranks_collecting(2, train_twice, {}):
        assert "Expected to mark a variable ready only once" in outcome.error
        assert "'layer." in outcome.error and "has been marked as ready twice" in outcome.error
        assert "static_graph=True" in outcome.error


def test_a_static_graph_counts_gradients():
    ours = run_ranks(2, train_twice, {"static_graph": True})
    torch.manual_seed(0)
    model = Twice()
    for rank in range(2):
        x = torch.full((2, 3), 3.0 + rank, requires_grad=True)
        (model(x).sum() / 2).backward()
    for rank in range(2):
        for mine, alone in zip(ours[rank], model.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), alone.grad)


def profiled_names(rank):
    ddp = DistributedDataParallel(nn.Linear(3, 3), find_unused_parameters=True)
    ddp(torch.ones(2, 3)).sum().backward()
    with torch.autograd.profiler.profile() as profile:
        ddp(torch.ones(2, 3)).sum().backward()
    return {event.name for event in profile.function_events}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_profiles_show_it_under_torchs_names(backend):
    for names in run_ranks(2, profiled_names, backend=backend):
        assert "torch.distributed.ddp.reducer::search_unused_parameters" in names
        assert "torch.distributed.ddp.reducer::copy_bucket_to_grad" in names
        copy = "mul_out" if backend == "gloo" else "copy_"  # Gloo's gradients are divided on the way
        assert f"torch::distributed::reducer::{copy}" in names


def environment_after_training(rank):
    ddp = DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=True)
    ddp(torch.ones(2, 3)).sum().backward()
    # As C sees it, which may differ from Python's copy.
    environment = ctypes.CDLL(None)
    environment.getenv.restype = ctypes.c_char_p
    return environment.getenv(b"DDP_DISABLE_COMM_MEM")


def test_torchs_own_setting_is_left_alone():
    assert run_ranks(2, environment_after_training) == [None, None]
    assert run_ranks(2, environment_after_training, env={"DDP_DISABLE_COMM_MEM": "1"}) == [b"1", b"1"]
