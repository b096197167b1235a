"""Collections that are made with an optimizer, beside torchrec's: the rows and what the rule keeps."""

from __future__ import annotations

import pytest
import torch
from two_sides import OURS, SIDES


def make(side, rule):
    config = side("modules.embedding_configs").EmbeddingBagConfig
    kind = getattr(torch.optim, rule, None) or getattr(side("optim"), rule)
    tables = [config(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])]
    modules = side("modules.fused_embedding_modules")
    return modules.FusedEmbeddingBagCollection(
        tables,
        optimizer_type=kind,
        optimizer_kwargs={"lr": 0.1, "eps": 1e-6} if rule != "SGD" else {"lr": 0.1},
    )


@pytest.mark.parametrize("rule", ["SGD", "Adagrad", "RowWiseAdagrad"])
def test_steps_and_state(rule):
    ours, theirs = (make(side, rule) for side in SIDES)
    ours.load_state_dict(theirs.state_dict())
    for step in range(3):
        ids = torch.tensor([0, 1, 1, 5, step])
        for side, module in zip(SIDES, (ours, theirs), strict=True):
            batch = side("sparse.jagged_tensor").KeyedJaggedTensor
            found = module(batch.from_lengths_sync(["f"], ids, torch.tensor([3, 2]))).values()
            (found * torch.arange(1.0, 9.0).view(2, 4)).sum().backward()
    torch.testing.assert_close(
        ours.embedding_bags["t"].weight.detach(), theirs.embedding_bags["t"].weight.detach()
    )
    kept = [module.fused_optimizer().state_dict()["state"] for module in (ours, theirs)]
    assert list(kept[0]) == list(kept[1])
    for name, state in kept[1].items():
        for entry, value in state.items():
            torch.testing.assert_close(kept[0][name][entry].reshape(-1), value.reshape(-1))


def test_the_names_are_there():
    assert OURS("distributed.fused_embeddingbag").FusedEmbeddingBagCollectionSharder
