"""The names of loss.te_parallel_ce in Python against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tessera.loss import te_parallel_ce
from vocab_sample import VOCAB, group_and_range, sample, shard


def parallel_ce_rank(rank):
    whole, labels = sample()
    labels[0, 2] = -100
    group, start, end = group_and_range(rank)
    flat = whole.reshape(-1, VOCAB).double()
    weights = torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    for smoothing in (0.0, 0.2):
        x = flat.clone().requires_grad_(True)
        expected = F.cross_entropy(x, labels.reshape(-1), reduction="none", label_smoothing=smoothing)
        (expected * weights.reshape(-1)).sum().backward()
        logits = shard(whole, start, end)
        before = logits.detach().clone()
        loss = te_parallel_ce.parallel_cross_entropy(logits, labels, smoothing, False, group)
        assert loss.shape == (2, 6)
        torch.testing.assert_close(loss.double(), expected.reshape(2, 6).detach(), rtol=1e-5, atol=1e-5)
        (loss * weights).sum().backward(retain_graph=True)
        gradient = x.grad.reshape(2, 6, VOCAB)[..., start:end]
        torch.testing.assert_close(logits.grad.double(), gradient, rtol=1e-5, atol=1e-6)
        (loss * weights).sum().backward()
        torch.testing.assert_close(logits.grad.double(), 2 * gradient, rtol=1e-5, atol=1e-6)
        assert torch.equal(before, logits.detach())
        mean = te_parallel_ce.CrossEntropyFunction.apply(logits, labels, smoothing, True, group)
        assert mean.dim() == 0
        torch.testing.assert_close(mean.double(), (expected.sum() / 11).detach(), rtol=1e-5, atol=1e-5)

    mask = torch.ones(2, 6)
    mask[1, 4] = 0
    kept = labels.clone()
    for reduction in ("none", "mean", "sum"):
        module = te_parallel_ce.TEParallelCrossEntropy(reduction=reduction, tp_group=group)
        loss = module(shard(whole, start, end), labels, mask)
        used = labels.masked_fill(mask == 0, -100).reshape(-1)
        expected = F.cross_entropy(flat, used, reduction=reduction)
        torch.testing.assert_close(loss.double().reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept, labels)
    module = te_parallel_ce.TEParallelCrossEntropy(tp_group=group)
    loss = module(shard(whole, start, end), labels, num_label_tokens=7)
    expected = F.cross_entropy(flat, labels.reshape(-1), reduction="sum") / 7
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    nothing = te_parallel_ce.TEParallelCrossEntropy(reduction="mean", tp_group=group)(
        shard(whole, start, end), torch.full_like(labels, -100)
    )
    assert nothing.item() == 0.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parallel_cross_entropy(size):
    run_ranks(size, parallel_ce_rank)


def test_constants_and_wrong_reduction():
    assert te_parallel_ce.HAVE_TE_PARALLEL_CE is True
    assert te_parallel_ce.MISSING_TE_PARALLEL_CE_MSG == ""
    whole, labels = sample()
    module = te_parallel_ce.TEParallelCrossEntropy(reduction="median")
    with pytest.raises(ValueError, match=r"Invalid reduction: median\. Use 'none', 'mean' or 'sum'\."):
        module(whole, labels)
