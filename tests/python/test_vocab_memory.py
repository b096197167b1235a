"""What the vocabulary's functions keep for backward, and for how long."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from tessera import vocab_parallel
from tessera.distributed import model_utils
from tessera.loss import te_parallel_ce
from torch.utils.checkpoint import checkpoint
from vocab_sample import VOCAB, sample

LOSSES = {
    "DistributedLogprob": lambda x, y: model_utils.DistributedLogprob.apply(x, y, 0, VOCAB, None),
    "ChunkedDistributedLogprob": lambda x, y: model_utils.ChunkedDistributedLogprob.apply(
        x, y, 0, VOCAB, 2, None
    ),
    "DistributedLogprobWithSampling": lambda x, y: model_utils.DistributedLogprobWithSampling.apply(
        x, y, None, VOCAB - 1, 1.0
    ),
    "ChunkedDistributedLogprobWithSampling": (
        lambda x, y: model_utils.ChunkedDistributedLogprobWithSampling.apply(x, y, None, VOCAB - 1, 1.0, 2)
    ),
    "ChunkedDistributedGatherLogprob": lambda x, y: model_utils.ChunkedDistributedGatherLogprob.apply(
        x, y.unsqueeze(-1), 0, VOCAB, 2, None
    ),
    "ChunkedDistributedEntropy": lambda x, y: model_utils.ChunkedDistributedEntropy.apply(x, 2, None),
    "DistributedCrossEntropy": lambda x, y: model_utils.DistributedCrossEntropy.apply(
        x, x.detach() * 2, None
    ),
    "parallel_cross_entropy": lambda x, y: te_parallel_ce.parallel_cross_entropy(x, y),
    "TEParallelCrossEntropy": lambda x, y: te_parallel_ce.TEParallelCrossEntropy()(x, y),
    "cross_entropy": lambda x, y: vocab_parallel.cross_entropy(x, y),
    "log_softmax": lambda x, y: vocab_parallel.log_softmax(x),
    "sampled": lambda x, y: vocab_parallel.sampled_log_probabilities(x, y, top_k=5),
}


def alive(references):
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("name", LOSSES)
def test_backward_frees_the_logits(name):
    whole, labels = sample()
    leaf = whole.clone().requires_grad_(True)
    losses, logits = [], []
    for _ in range(3):
        made = leaf * 1.5
        # The memory, not the Python object: what was saved is another object.
        logits.append(weakref.ref(made.untyped_storage()))
        losses.append(LOSSES[name](made, labels).sum())
        del made
    assert alive(logits) == 3
    for loss in losses:
        loss.backward()
    assert alive(logits) == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[0].backward()


@pytest.mark.parametrize("name", LOSSES)
def test_a_kept_graph_goes_back_twice(name):
    whole, labels = sample()
    leaf = whole.clone().requires_grad_(True)
    loss = LOSSES[name](leaf, labels).sum()
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    loss.backward()
    torch.testing.assert_close(leaf.grad, 2 * first)


@pytest.mark.parametrize("name", LOSSES)
def test_changed_logits_are_noticed(name):
    whole, labels = sample()
    leaf = whole.clone().requires_grad_(True)
    logits = leaf * 1.0
    loss = LOSSES[name](logits, labels).sum()
    with torch.no_grad():
        logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def packed_bytes(function, *leaves):
    """The value, its gradients, and the bytes that autograd saved of what is no leaf."""
    held = 0

    def pack(tensor):
        nonlocal held
        if not any(tensor is leaf for leaf in leaves):
            held += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = function(*leaves)
    return value, torch.autograd.grad(value, leaves), held


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "log_softmax"])
def test_a_checkpointed_forward_keeps_no_logits(name):
    whole, labels = sample()
    storages = []

    def last_part(x):
        made = x * 1.5
        storages.append(weakref.ref(made.untyped_storage()))
        return LOSSES[name](made, labels).sum()

    leaf = whole.clone().requires_grad_(True)
    loss = checkpoint(last_part, leaf, use_reentrant=False)
    assert alive(storages) == 0
    loss.backward()
    plain = whole.clone().requires_grad_(True)
    last_part(plain).backward()
    assert torch.equal(leaf.grad, plain.grad)


def test_the_linear_form_saves_its_logits_where_hooks_see_them():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(6, 8, generator=generator).requires_grad_(True)
    weight = torch.randn(VOCAB, 8, generator=generator).requires_grad_(True)
    labels = torch.randint(VOCAB, (6,), generator=generator)
    for reduction in ("mean", "none"):

        def loss_of(h, w, reduction=reduction):
            return vocab_parallel.linear_cross_entropy(h, w, labels, reduction=reduction).sum()

        value, gradients, held = packed_bytes(loss_of, hidden, weight)
        assert held >= 6 * VOCAB * 4
        again = checkpoint(loss_of, hidden, weight, use_reentrant=False)
        assert torch.equal(again, value)
        for one, other in zip(torch.autograd.grad(again, (hidden, weight)), gradients, strict=True):
            assert torch.equal(one, other)
        # Twice: the kept logits are the gradient after the first time.
        loss = loss_of(hidden, weight)
        for _ in range(2):
            for one, other in zip(
                torch.autograd.grad(loss, (hidden, weight), retain_graph=True), gradients, strict=True
            ):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_forward_and_backward_by_hand_go_once():
    whole, labels = sample()

    class Context:
        pass

    ctx = Context()
    value = te_parallel_ce.CrossEntropyFunction.forward(ctx, whole, labels)
    te_parallel_ce.CrossEntropyFunction.backward(ctx, torch.ones_like(value))
    with pytest.raises(RuntimeError, match="second time"):
        te_parallel_ce.CrossEntropyFunction.backward(ctx, torch.ones_like(value))


GROWTH = """
import resource, torch
from tessera.integrations import verl

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

tokens, vocabulary = 512, 248_000  # 484 MiB of logits
torch.set_num_threads(1)
hidden = torch.randn(tokens, 4, requires_grad=True)
weight = torch.randn(vocabulary, 4, requires_grad=True)
labels = torch.randint(vocabulary, (tokens,))
verl.linear_cross_entropy(hidden[:8], weight, labels[:8])[0].sum().backward()  # what libraries keep
before = peak()
log_p, entropy = verl.linear_cross_entropy(hidden, weight, labels)
(log_p.sum() + entropy.sum()).backward()
print(peak() - before)
"""


def test_a_large_vocabulary_needs_its_workspace_alone():
    """262,144 tokens of it within 4 GB: beside the workspace nothing grows with the product."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROWTH], capture_output=True, text=True, check=True
    )
    assert float(ended.stdout) < 300  # MiB; the workspace is 256


MANY_PARTS = """
import resource, torch
from tessera import vocab_parallel

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

tokens, vocabulary = 8192, 16_000  # in parts of 8 columns: 2,000, of 96 KiB of statistics each
torch.set_num_threads(1)
hidden = torch.randn(tokens, 4, requires_grad=True)
weight = torch.randn(vocabulary, 4, requires_grad=True)
labels = torch.randint(vocabulary, (tokens,))

def loss_of(columns):
    return vocab_parallel.linear_cross_entropy(
        hidden, weight[:columns], labels % columns, workspace_bytes=tokens * 4 * 8
    )

loss_of(64).backward()  # what libraries keep
before = peak()
loss_of(vocabulary).backward()
print(peak() - before)
"""


def test_many_parts_of_a_vocabulary_weigh_as_much_as_few():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MANY_PARTS], capture_output=True, text=True, check=True
    )
    assert float(ended.stdout) < 40  # MiB; the statistics of all parts are 187
