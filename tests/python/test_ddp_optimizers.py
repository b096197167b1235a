"""Optimizers around DistributedDataParallel: in backward, and averaging now and then; odd joins."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting
from tessera.distributed.algorithms.ddp_comm_hooks import default_hooks
from tessera.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tessera.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tessera.distributed.optim import PostLocalSGDOptimizer
from tessera.nn.parallel import DistributedDataParallel
from torch.distributed.optim import _apply_optimizer_in_backward


def make_model():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def batch(step, rank):
    return torch.arange(15.0).reshape(3, 5).add(5 * step + rank).sin()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def in_backward(rank, is_all, is_view, order):
    reference, model = make_model(), make_model()
    stepped = list(model.parameters()) if is_all else list(model[0].parameters())
    num_before = {"before": len(stepped), "around": 1, "after": 0}[order]
    _apply_optimizer_in_backward(torch.optim.Adam, stepped[:num_before], {"lr": 0.03})
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=is_view)
    _apply_optimizer_in_backward(torch.optim.Adam, stepped[num_before:], {"lr": 0.03})
    rest = torch.optim.SGD([p for p in model.parameters() if not any(p is q for q in stepped)] or
                           [torch.zeros(1)], lr=0.1)  # fmt: skip
    expected = DistributedDataParallel(reference)
    optimizers = [
        torch.optim.Adam(reference.parameters() if is_all else reference[0].parameters(), lr=0.03),
        torch.optim.SGD([torch.zeros(1)] if is_all else reference[2].parameters(), lr=0.1),
    ]
    for step in range(4):
        with parallel.no_sync() if step == 1 else contextlib.nullcontext():
            parallel(batch(step, rank)).square().mean().backward()
        with expected.no_sync() if step == 1 else contextlib.nullcontext():
            expected(batch(step, rank)).square().mean().backward()
        if step == 1:
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        rest.step()
        rest.zero_grad()
        if is_all and order != "around":
            assert all(p.grad is None for p in model.parameters())
    assert "exp_avg" in stepped[0]._in_backward_optimizers[0].state[stepped[0]]
    return same(model, reference)


BACKENDS = ["shm", "gloo"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["before", "around", "after"])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("is_all", [True, False])
def test_optimizers_that_parameters_carry_step_in_backward(is_all, is_view, order, backend):
    assert run_ranks(2, in_backward, is_all, is_view, order, backend=backend) == [True, True]


def too_late(rank, is_hooked):
    model = make_model()
    parallel = DistributedDataParallel(model)
    if is_hooked:
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        parallel(batch(0, rank)).sum().backward()
    _apply_optimizer_in_backward(torch.optim.SGD, list(model[2].parameters()), {"lr": 0.1})
    parallel(batch(1, rank))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_hooked", [False, True])
def test_optimizers_that_come_too_late_are_refused(is_hooked, backend):
    for outcome in run_ranks_collecting(2, too_late, is_hooked, backend=backend):
        assert outcome.error.startswith(
            "RuntimeError: DistributedDataParallel: '2.weight' was given an optimizer by "
            "_apply_optimizer_in_backward"
        )
        assert ("can only be called once" if is_hooked else "a backward has run already") in outcome.error


def post_local(rank):
    model, other = make_model(), make_model()
    parallel = DistributedDataParallel(model)
    state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
    parallel.register_comm_hook(state, post_localSGD_hook)
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=2, warmup_steps=2))
    # By hand: two common steps, then steps of one's own, averaged after every second.
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        parallel(batch(step, rank)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        other(batch(step, rank)).square().mean().backward()
        for parameter in other.parameters():
            if step < 2:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        plain.step()
        if step >= 2 and (step - 2) % 2 == 0:
            for parameter in other.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
        torch.testing.assert_close(list(model.parameters()), list(other.parameters()))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["step"] == 6
    fresh = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), PeriodicModelAverager(2, 2)
    )
    fresh.load_state_dict(saved)
    assert fresh.averager.step == 6
    assert fresh.param_groups[0]["lr"] == 0.1
    del saved["step"]
    with pytest.warns(UserWarning, match="step counter"):
        fresh.load_state_dict(saved)
    assert fresh.averager.step == 0
    return repr(fresh).startswith("SGD")


def test_post_local_sgd():
    assert run_ranks(2, post_local) == [True, True]


def join_with_an_empty_rank(rank, is_static):
    model = make_model()
    parallel = DistributedDataParallel(model, static_graph=is_static)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel.join():
        for step in range(0 if rank == 1 else 3):
            optimizer.zero_grad()
            parallel(batch(step, 0)).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("is_static", [False, True])
def test_a_rank_without_batches_in_the_first_join(is_static):
    reference = make_model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (reference(batch(step, 0)).square().mean() / 2).backward()  # divided by the ranks there were
        optimizer.step()
    for found in run_ranks(2, join_with_an_empty_rank, is_static):
        torch.testing.assert_close(found, list(reference.parameters()))
