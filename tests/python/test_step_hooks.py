"""Hooks that step parameters, clip and check gradients, and mixed precision, over Gloo and shm."""

from __future__ import annotations

import pytest
import torch
from hook_training import make_model, run_steps
from ranks import run_ranks, run_ranks_collecting
from tessera.distributed.algorithms.ddp_comm_hooks import (
    checking_hooks,
    ddp_zero_hook,
    default_hooks,
    optimizer_overlap_hooks,
)
from tessera.nn.parallel import DistributedDataParallel as TesseraDDP
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9)}),
}


def optimizer_in_backward(rank, name):
    make, options = OPTIMIZERS[name]
    plain = make_model(channels_last=True)
    parallel = DistributedDataParallel(plain, bucket_cap_mb=0.01)
    optimizer = make(plain.parameters(), **options)
    run_steps(rank, plain, parallel, 5, optimizer.step)

    stepped = make_model(channels_last=True)
    state = optimizer_overlap_hooks.OptimizerState(name, **options)
    parallel = DistributedDataParallel(stepped, bucket_cap_mb=0.01)
    parallel.register_comm_hook(state, optimizer_overlap_hooks.optimizer_hook)
    run_steps(rank, stepped, parallel, 5)
    for a, b in zip(stepped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    # Eight parameters, remembered by name and restored.
    saved = state.state_dict()
    assert sum(key.endswith("/step") for key in saved["tensors"]) == 8
    optimizer_overlap_hooks.OptimizerState(name, **options).load_state_dict(saved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_backward_are_the_plain_ones(name):
    run_ranks(2, optimizer_in_backward, name)


def zero_steps(rank, name):
    make, options = OPTIMIZERS[name]
    plain = make_model(channels_last=True)
    optimizer = make(plain.parameters(), **options)
    run_steps(rank, plain, DistributedDataParallel(plain, bucket_cap_mb=0.01), 5, optimizer.step)

    def expect_plain(model):
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    stepped = make_model(channels_last=True)
    state = ddp_zero_hook.ZeroStepState(name, **options)
    parallel = TesseraDDP(stepped, bucket_cap_mb=0.01)
    parallel.register_comm_hook(state, ddp_zero_hook.zero_step_hook)
    run_steps(rank, stepped, parallel, 5)
    expect_plain(stepped)
    saved = state.state_dict()  # of all ranks, on each
    assert sum(key.endswith("/step") for key in saved["tensors"]) == 8
    ddp_zero_hook.ZeroStepState(name, **options).load_state_dict(saved)

    # With torch's wrapper and torch's optimizer, which would need NCCL for it.
    theirs = make_model(channels_last=True)
    parallel = DistributedDataParallel(theirs, bucket_cap_mb=0.01)
    zero = ZeroRedundancyOptimizer(theirs.parameters(), make, overlap_with_ddp=True, **options)
    for make_hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        hook = make_hook(default_hooks.allreduce_hook, parallel, zero)
        assert hook.step_state.lr == options["lr"]
    parallel.register_comm_hook(None, hook)
    run_steps(rank, theirs, parallel, 5)
    expect_plain(theirs)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ranks_share_the_step(name, backend):
    run_ranks(2, zero_steps, name, backend=backend)


def zero_mistakes(rank):
    model = make_model()
    parallel = TesseraDDP(model)
    plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="the optimizer was not made with overlap_with_ddp=True"):
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, parallel, plain)
    other = ZeroRedundancyOptimizer(model.parameters(), torch.optim.RMSprop, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ValueError, match="RMSprop cannot step in backward"):
        ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, parallel, other)


def test_mistakes_with_shared_steps_are_named():
    run_ranks(2, zero_mistakes)


def clipping(rank):
    plain = make_model()
    parallel = DistributedDataParallel(plain)
    norms = []

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05))

    generator = torch.Generator().manual_seed(100 + rank)
    parallel(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
    clip()

    clipped = make_model()
    state = checking_hooks.GradientClippingState(0.05)
    parallel = DistributedDataParallel(clipped)
    parallel.register_comm_hook(state, checking_hooks.gradient_clipping_hook)
    run_steps(rank, clipped, parallel, 1)
    assert norms[0] > 0.05
    assert state.total_norm == pytest.approx(norms[0].item(), rel=1e-6)
    for a, b in zip(clipped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)


def test_clipping_is_torchs():
    run_ranks(2, clipping)


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return gradient * float("nan")


class PoisonedModel(torch.nn.Module):
    def __init__(self, is_poisoned):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.is_poisoned = is_poisoned

    def forward(self, x):
        x = self.first(x)
        return self.second(Poison.apply(x) if self.is_poisoned else x)


def poisoned(rank, policy):
    model = PoisonedModel(rank == 1)
    state = checking_hooks.FiniteCheckState(policy)
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(state, checking_hooks.finite_check_hook)
    parallel(torch.ones(2, 4)).sum().backward()
    return state.skip_step, state.found, model.first.weight.grad


@pytest.mark.parametrize("size", [2, 3])
def test_nan_on_one_rank_is_named_on_all(size):
    for outcome in run_ranks_collecting(size, poisoned, "raise"):
        assert outcome.error.startswith(
            "RuntimeError: ddp.finite_check: step 1: rank 1 has NaN in the gradient of 'parameter 0'. "
            "It has not reached the other ranks; this step's gradients are void."
        ), outcome.error


def test_nan_on_one_rank_skips_the_step_on_all():
    for skip, found, gradient in run_ranks(2, poisoned, "skip"):
        assert skip and found == [(1, "parameter 0", "NaN")]
        assert gradient.isfinite().all()


def test_nan_on_one_rank_counts_as_zeros():
    for skip, found, gradient in run_ranks(2, poisoned, "zero"):
        assert not skip and found == [(1, "parameter 0", "NaN")]
        assert gradient.isfinite().all()


def optimizer_with_accumulation(rank):
    plain, stepped = make_model(), make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    theirs = DistributedDataParallel(plain)
    ours = TesseraDDP(stepped, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    state = optimizer_overlap_hooks.OptimizerState("adamw", lr=0.01)
    ours.register_comm_hook(state, optimizer_overlap_hooks.optimizer_hook)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        batches = torch.randn(2, 4, 3, 8, 8, generator=generator)
        for parallel in (theirs, ours):
            with parallel.no_sync():
                parallel(batches[0]).square().mean().backward()
            parallel(batches[1]).square().mean().backward()
        optimizer.step()
        assert all(p.grad is None for p in stepped.parameters())
    for a, b in zip(stepped.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "optimizer/0.weight/exp_avg" in state.state_dict()["tensors"]


def test_optimizer_in_backward_with_accumulation():
    run_ranks(2, optimizer_with_accumulation)


def mixed_precision(rank):
    precision = torch.nn.parallel.distributed._MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3, affine=False), make_model())
    parallel = TesseraDDP(model, mixed_precision=precision)
    assert model[0].running_mean.dtype == torch.bfloat16
    exact = torch.nn.Sequential(torch.nn.BatchNorm2d(3, affine=False), make_model())
    reference = DistributedDataParallel(exact)
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        model.zero_grad()
        exact.zero_grad()
        out = parallel(x)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        reference(x).square().mean().backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        ours = torch.cat([p.grad.flatten() for p in model.parameters()])
        theirs = torch.cat([p.grad.flatten() for p in exact.parameters()])
        # Eight bits of mantissa through seven layers and back.
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()
        assert not torch.equal(ours, theirs)


def test_mixed_precision_on_the_cpu():
    run_ranks(2, mixed_precision)


def poisoned_in_our_wrapper(rank):
    model = PoisonedModel(rank == 1)
    parallel = TesseraDDP(model)
    parallel.register_comm_hook(checking_hooks.FiniteCheckState(), checking_hooks.finite_check_hook)
    parallel(torch.ones(2, 4)).sum().backward()


def test_nan_is_named_by_parameter():
    for outcome in run_ranks_collecting(2, poisoned_in_our_wrapper):
        assert outcome.error.startswith(
            "RuntimeError: ddp.finite_check: step 1: rank 1 has NaN in the gradient of 'first."
        ), outcome.error
