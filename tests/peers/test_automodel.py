"""Automodel's own losses against ours of the same names."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from projects import need, stand_in
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from two_sides import Side

from ranks import run_ranks  # isort: skip

need("nemo_automodel")
VOCAB = 24
OURS, THEIRS = Side("tessera.loss"), Side("nemo_automodel.components.loss")
SIDES = (OURS, THEIRS)


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # puts back what was there
    stand_in("transformers")


def tokens():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 6, VOCAB, generator=generator) * 2
    labels = torch.randint(VOCAB, (2, 6), generator=generator)
    labels[0, 1] = -100
    mask = torch.ones(2, 6)
    mask[1, 3] = 0
    return logits, labels, mask, torch.rand(2, 6, generator=generator)


def both(call, *leaves):
    """Call with either side; compare values and the gradients of the leaves."""
    found = []
    for side in SIDES:
        own = [leaf.clone().requires_grad_(True) for leaf in leaves]
        value = call(side, *own)
        value.sum().backward()
        found.append([value.detach(), *(leaf.grad for leaf in own)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_cross_entropy_of_logits(ignore_index):
    logits, labels, mask, factors = tokens()
    for reduction in ("sum", "mean", "none"):
        for given in (None, mask):

            def plain(side, x, reduction=reduction, given=given):
                loss = side("masked_ce").MaskedCrossEntropy(reduction=reduction, ignore_index=ignore_index)
                return loss(x, labels.clone(), given).flatten()

            both(plain, logits)
    for count in (None, 7, 0):

        def of_a_batch(side, x, count=count):
            loss = side("masked_ce").MaskedCrossEntropy(ignore_index=ignore_index)
            return loss(x, labels.clone(), mask, count, factors)

        both(of_a_batch, logits)
    for side in SIDES:
        loss = side("masked_ce").MaskedCrossEntropy(reduction="mean")
        for wrong in ({"num_label_tokens": 3}, {"loss_weights": factors}):
            with pytest.raises(ValueError, match="sum"):
                loss(logits, labels, **wrong)


def test_cross_entropy_of_hidden_states():
    _, labels, mask, factors = tokens()
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 6, 8, generator=generator)
    weight = torch.randn(VOCAB, 8, generator=generator)
    for reduction in ("sum", "mean", "none"):

        def plain(side, h, w, reduction=reduction):
            loss = side("chunked_ce").ChunkedCrossEntropy(chunk_len=5, compile=False, reduction=reduction)
            return loss(h, labels, w, mask=mask).flatten()

        both(plain, hidden, weight)

    def of_a_batch(side, h, w):
        loss = side("chunked_ce").ChunkedCrossEntropy(compile=False)
        return loss(h, labels, w, 9, None, factors)

    def packed(side, h, w):
        loss = side("chunked_ce").ChunkedCrossEntropy(compile=False)
        return loss(h.reshape(1, 12, 8), labels.flatten(), w)

    both(of_a_batch, hidden, weight)
    both(packed, hidden, weight)


def distillation(rank):
    stand_in("transformers")
    logits, labels, _, _ = tokens()
    teacher = torch.randn(2, 6, VOCAB, generator=torch.Generator().manual_seed(4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for temperature in (1.0, 2.5):
        for count in (None, 20):
            found = []
            for side in SIDES:
                loss = side("kd_loss").KDLoss(temperature=temperature)
                student = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_(True)
                value = loss(student, distribute_tensor(teacher, mesh, [Shard(-1)]), labels, count)
                value.backward()
                found.append((value.detach(), student.grad.full_tensor()))
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_distillation(world):
    run_ranks(world, distillation, backend="gloo")


def test_names():
    assert OURS("te_parallel_ce").HAVE_TE_PARALLEL_CE
    for module in ("masked_ce", "chunked_ce", "kd_loss", "linear_ce", "te_parallel_ce"):
        for name in OURS(module).__all__:
            assert hasattr(THEIRS(module), name), f"{module}.{name}"
