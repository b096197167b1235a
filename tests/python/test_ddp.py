"""torch's own DistributedDataParallel over the backend "shm"."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def train(rank, backend):
    group = dist.new_group(backend=backend)
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 257), torch.nn.ReLU(), torch.nn.Linear(257, 5, bias=False)
    )
    # A small bucket limit, so that several buckets are reduced while backward runs.
    parallel = torch.nn.parallel.DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=0.01, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    gradients = []
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(16, 33, generator=generator)).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return gradients


def compare(rank):
    ours, theirs = train(rank, "shm"), train(rank, "gloo")
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b), f"step {step}: gradients differ by {(a - b).abs().max()}"


@pytest.mark.parametrize("disable", ["0", "1"], ids=["buckets in the segment", "buckets outside"])
def test_gradients_equal_those_over_gloo_bit_for_bit(disable):
    run_ranks(2, compare, env={"DDP_DISABLE_COMM_MEM": disable})


def bucket_owners(rank):
    model = torch.nn.Linear(64, 64)
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel(torch.randn(2, 64)).sum().backward()
    address = model.weight.grad.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if first <= address < last:
                return line.split()[-1] if "deleted" not in line else line.split()[-2]
    raise AssertionError("the gradient is in no mapping")


def test_buckets_live_in_the_segment_when_torch_is_told_so():
    for name in run_ranks(2, bucket_owners, env={"DDP_DISABLE_COMM_MEM": "0"}):
        assert "tessera" in name
    for name in run_ranks(2, bucket_owners, env={"DDP_DISABLE_COMM_MEM": "1"}):
        assert "tessera" not in name


def unused(rank):
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers[rank](x)

    parallel = torch.nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
    parallel(torch.ones(1, 4)).sum().backward()
    return [layer.weight.grad.clone() for layer in layers]


def test_unused_parameters_are_found():
    first, second = run_ranks(2, unused)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine, torch.full((4, 4), 0.5))
