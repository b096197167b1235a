"""One training program, run with both imports: losses and metrics agree."""

from __future__ import annotations

import tempfile

import dlrm_program
import pytest
import torch.distributed as dist
import two_sides  # noqa: F401  # finds the helpers of the other tests

from ranks import run_ranks  # isort: skip

STEPS = 200


def compare(rank):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    (ours, our_metrics), (theirs, their_metrics) = [
        dlrm_program.train(root, STEPS, folder[0]) for root in ("tessera", "torchrec")
    ]
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert sum(ours[-20:]) < sum(ours[:20])  # it learns
    assert our_metrics == pytest.approx(their_metrics, abs=1e-5)


@pytest.mark.parametrize(("world", "engine"), [(1, "gloo"), (2, "gloo"), (4, "gloo"), (1, "shm"), (4, "shm")])
def test_both_imports_train_alike(world, engine):
    run_ranks(world, compare, backend=engine, env={"LOCAL_WORLD_SIZE": str(world)}, limit=240)
