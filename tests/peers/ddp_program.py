"""A training program as users of torch write it: data parallel, in mixed precision, saved and resumed.

Its one import that differs is that of DistributedDataParallel: from `torch.nn.parallel`, or with one word
before it from `tessera.nn.parallel`.

    torchrun --nproc-per-node 2 tests/peers/ddp_program.py --wrapper tessera.nn.parallel --folder /tmp/run
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

WRAPPERS = ("torch.nn.parallel", "tessera.nn.parallel")
CLASSES, BATCH, SAMPLES, ACCUMULATE = 5, 8, 168, 2


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm(self.conv(x)))


class Pictures(nn.Module):
    """Classify pictures by one of two heads, or by both; `frozen` never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, stride=2)
        self.blocks = nn.Sequential(Block(12), Block(12))
        self.heads = nn.ModuleList([nn.Linear(12, CLASSES), nn.Linear(12, CLASSES)])
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)

    def forward(self, x: torch.Tensor, head: int | None = None) -> torch.Tensor:
        rows = self.blocks(F.relu(self.stem(x))).mean((2, 3)) * self.frozen
        return self.heads[0](rows) + self.heads[1](rows) if head is None else self.heads[head](rows)


def pictures() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    # Every class has a pattern of its own under the noise, so that there is something to learn.
    patterns = torch.randn(CLASSES, 3, 12, 12, generator=generator)
    return TensorDataset(patterns[labels] + torch.randn(SAMPLES, 3, 12, 12, generator=generator), labels)


def build(wrapper: str, steps: int, precision: torch.dtype):
    DistributedDataParallel = importlib.import_module(wrapper).DistributedDataParallel
    # Ranks begin with different parameters: wrapping makes them rank 0's.
    torch.manual_seed(10 + dist.get_rank())
    model = DistributedDataParallel(
        Pictures().to(precision), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    return model, optimizer, OneCycleLR(optimizer, 0.02, total_steps=steps), torch.amp.GradScaler("cpu")


def train(wrapper: str, folder: str, mixed: bool = True) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train four epochs, from a checkpoint after the second; return this rank's losses and rank 0's state.

    Without `mixed` everything is in double precision, where sums in another order hardly show.
    """
    precision = torch.float32 if mixed else torch.float64
    rank, world = dist.get_rank(), dist.get_world_size()
    data = pictures()
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=5, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler)
    steps = 2 * len(loader) + 2 * -(-len(loader) // ACCUMULATE)
    model, optimizer, schedule, scaler = build(wrapper, steps, precision)
    file = os.path.join(folder, f"{wrapper}.pt")
    losses: list[float] = []
    for epoch in range(4):
        if epoch == 2:
            if rank == 0:
                parts = {"optimizer": optimizer, "schedule": schedule, "scaler": scaler}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({"model": model.module.state_dict(), **states}, file)
            dist.barrier()
            model, optimizer, schedule, scaler = build(wrapper, steps, precision)
            loaded = torch.load(file)
            model.module.load_state_dict(loaded["model"])
            for name, part in (("optimizer", optimizer), ("schedule", schedule), ("scaler", scaler)):
                part.load_state_dict(loaded[name])
        sampler.set_epoch(epoch)
        batches = list(loader)
        if epoch == 3:
            batches = batches[: len(batches) - rank % 2]  # some ranks have fewer: the others go on under join
        model.train()
        with model.join() if epoch == 3 else contextlib.nullcontext():
            for step, (x, labels) in enumerate(batches):
                accumulates = epoch in (1, 2)  # and then a head of its own for every batch
                waits = accumulates and step % ACCUMULATE != ACCUMULATE - 1 and step != len(batches) - 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                        logits = model(x.to(precision), step % 2 if accumulates else None)
                        loss = F.cross_entropy(logits, labels)
                    scaler.scale(loss / ACCUMULATE if accumulates else loss).backward()
                losses.append(loss.item())
                if waits:
                    continue
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
    model.eval()
    with torch.no_grad():
        right = torch.tensor(
            [float((model(x.to(precision)).argmax(1) == labels).sum()) for x, labels in loader]
        ).sum()
    dist.all_reduce(right)
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    return losses, {**state, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrapper", choices=WRAPPERS, default=WRAPPERS[0])
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses, state = train(options.wrapper, options.folder)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "right": state["right"].item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
