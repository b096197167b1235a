"""Odd models under our wrapper and under torch's: the same gradients, bit for bit, on two ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera.nn.parallel import DistributedDataParallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Tied(nn.Module):
    def __init__(self, is_sparse=False):
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=is_sparse)
        self.out = nn.Linear(8, 10, bias=False)
        if not is_sparse:
            self.out.weight = self.table.weight

    def forward(self, x):
        return self.out(self.table((x.abs() * 10).long() % 10))


class ManyTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).double()
        self.c, self.d = nn.Linear(8, 4).bfloat16(), nn.Linear(4, 4, dtype=torch.complex128)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.across = nn.Parameter(torch.arange(32.0).reshape(4, 8).t() / 32)  # not contiguous

    def forward(self, x):
        y = self.c(self.b(self.a(x).double()).bfloat16()).to(torch.complex128)
        return self.d(y).abs() + x @ self.across * self.scalar + self.nothing.sum()


class Recomputed(Layers):
    def __init__(self, is_reentrant):
        super().__init__()
        self.is_reentrant = is_reentrant

    def forward(self, x):
        part = lambda x: torch.tanh(self.a(x))  # noqa: E731
        return self.b(checkpoint(part, x, use_reentrant=self.is_reentrant))


class Packed(nn.LSTM):
    def forward(self, x):
        rows = x[:5].reshape(-1, 1, 8).repeat(1, 2, 1)
        out, (h, c) = super().forward(nn.utils.rnn.pack_padded_sequence(rows, [5, 3]))
        return out.data, {"h": h, "c": c, "nothing": None}


class Rounded(Layers):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def frozen():
    model = Layers()
    model.a.weight.requires_grad_(False)
    return model


def with_hooks():
    model = Layers()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return model


def reparametrized():
    first, second = nn.Linear(8, 8), nn.Linear(8, 4)
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(first), nn.utils.parametrizations.spectral_norm(second)
    )


MODELS = {
    "tied weights": Tied,
    "sparse gradients": lambda: Tied(is_sparse=True),
    "many types": ManyTypes,
    "recomputed": lambda: Recomputed(False),
    "recomputed in a backward of its own": lambda: Recomputed(True),
    "packed sequences": lambda: Packed(8, 6),
    "autocast": Rounded,
    "frozen": frozen,
    "hooks on parameters": with_hooks,
    "reparametrized": reparametrized,
    "batch norm": lambda: nn.Sequential(Layers(), nn.BatchNorm1d(4)),
}
OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
}


def total(output):
    tensors = torch.utils._pytree.tree_leaves(output)
    return sum(tensor.square().mean() for tensor in tensors if tensor is not None)


def gradients_of(kind, rank, name, options, group=None):
    torch.manual_seed(3)
    model = MODELS[name]()
    ddp = kind(model, process_group=group, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(6, 8, generator=generator)
        x.requires_grad_(name == "recomputed in a backward of its own")
        total(ddp(x)).backward()
        seen += [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        optimizer.step()
    return seen + [buffer.clone() for buffer in model.buffers()]


def compare(rank, options):
    group = dist.new_group(backend="gloo")
    for name in MODELS:
        # Torch finds no unused parameters of backwards within backwards.
        if "of its own" in name and "find_unused_parameters" in options:
            continue
        mine = gradients_of(DistributedDataParallel, rank, name, options)
        theirs = gradients_of(TorchDDP, rank, name, options, group)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert (a is None) == (b is None), (name, i)
            if a is not None:
                assert a.stride() == b.stride() and torch.equal(a, b), (name, i, (a - b).abs().max())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_odd_models_train_as_with_torch_bit_for_bit(options, backend):
    run_ranks(2, compare, options, backend=backend)


def empty_batches(rank, kind_name):
    kind = {"ours": DistributedDataParallel, "torch": TorchDDP}[kind_name]
    torch.manual_seed(3)
    ddp = kind(Layers())
    seen = []
    for step in range(4):
        ddp.zero_grad()
        ddp(torch.full((0 if (rank + step) % 2 else 3, 8), 1.0 + rank)).square().sum().backward()
        seen += [p.grad.clone() for p in ddp.parameters()]
    return seen


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_may_have_an_empty_batch(backend):
    ours = run_ranks(2, empty_batches, "ours", backend=backend)
    theirs = run_ranks(2, empty_batches, "torch", backend="gloo")
    assert all(torch.equal(a, b) for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True))


def copies(rank, options):
    torch.manual_seed(3)
    ddp = DistributedDataParallel(Layers(), **options)
    x = torch.full((2, 8), 1.0 + rank)
    ddp(x).sum().backward()
    expected = [p.grad.clone() for p in ddp.parameters()]
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    for again in (copy.deepcopy(ddp), torch.load(file, weights_only=False)):
        assert list(again.state_dict()) == list(ddp.state_dict())
        for _ in range(3):
            again.zero_grad()
            again(x).sum().backward()
            assert all(torch.equal(p.grad, g) for p, g in zip(again.parameters(), expected, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_copies_and_pickles_train_on(options):
    run_ranks(2, copies, options)
