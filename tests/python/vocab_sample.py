"""Logits of a small vocabulary, the ranks' shares of them, and log-probabilities of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

VOCAB = 96


def sample(shape=(2, 6), dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, VOCAB, generator=generator) * 3).to(dtype)
    return logits, torch.randint(VOCAB, shape, generator=generator)


def group_and_range(rank):
    group = dist.group.WORLD
    share = VOCAB // group.size()
    return group, rank * share, (rank + 1) * share


def shard(whole, start, end):
    return whole[..., start:end].clone().requires_grad_(True)


def reference_logprob(whole, target):
    return torch.log_softmax(whole.double(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
