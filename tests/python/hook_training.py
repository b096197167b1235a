"""A small model trained under a hook: gradients of a few steps, to be compared."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel


def make_model(channels_last=False):
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 6 * 6, 40),
        torch.nn.Linear(40, 40),
        torch.nn.Linear(40, 5),
    )
    return model.to(memory_format=torch.channels_last) if channels_last else model


def run_steps(rank, model, parallel, steps, after_backward=None):
    """Run backwards on this rank's own samples and return all gradients."""
    generator = torch.Generator().manual_seed(100 + rank)
    gradients = []
    for _ in range(steps):
        model.zero_grad()
        parallel(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
        gradients.append([p.grad.clone() if p.grad is not None else None for p in model.parameters()])
        if after_backward is not None:
            after_backward()
    return gradients


def train(rank, state, hook, steps=3, channels_last=False, **options):
    model = make_model(channels_last)
    parallel = DistributedDataParallel(model, **options)
    parallel.register_comm_hook(state, hook)
    return run_steps(rank, model, parallel, steps)


def assert_same(ours, theirs, exact=True):
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(mine, other, strict=True):
            if exact:
                assert torch.equal(a, b), f"step {step}: differs by {(a - b).abs().max()}"
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, s=step: f"step {s}: {m}")
