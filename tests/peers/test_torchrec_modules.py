"""Dense modules, whole models and random batches beside torchrec 1.8.0: the same seed, the same numbers."""

from __future__ import annotations

import pytest
import torch
from two_sides import SIDES

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def compare(make, *inputs, grow=True):
    """Make a module on both sides from one seed; parameters, outputs and gradients agree."""
    found = []
    for side in SIDES:
        torch.manual_seed(11)
        module = make(side)
        if grow:  # away from biases of zero
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(
                        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 4
                    )
        state = {name: value.clone() for name, value in module.state_dict().items()}
        given = [value(side) if callable(value) else value for value in inputs]
        output = module(*given)
        output.square().sum().backward()
        found.append((state, output.detach(), {n: p.grad for n, p in module.named_parameters()}))
    (state, output, gradients), (their_state, their_output, their_gradients) = found
    assert list(state) == list(their_state)
    for name, value in state.items():
        torch.testing.assert_close(value, their_state[name], rtol=0, atol=0, msg=name)
    torch.testing.assert_close(output, their_output, **CLOSE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], rtol=1e-4, atol=1e-5, msg=name)


ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "sigmoid", "bias": False},
        {"activation": "swish_layernorm"},
        {"activation": torch.nn.Tanh, "activation_on_last": False},
        {"activation": torch.tanh, "dtype": torch.float32},
    ],
)
def test_mlp(options):
    compare(lambda side: side("modules.mlp").MLP(5, [6, 3], **options), ROWS)


def test_perceptron():
    compare(lambda side: side("modules.mlp").Perceptron(5, 3, activation=torch.nn.Sigmoid()), ROWS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("CrossNet", {}),
        ("LowRankCrossNet", {"low_rank": 2}),
        ("VectorCrossNet", {}),
        ("LowRankMixtureCrossNet", {"low_rank": 2, "num_experts": 3}),
        ("LowRankMixtureCrossNet", {"low_rank": 2, "num_experts": 1, "activation": torch.sigmoid}),
    ],
)
def test_cross_networks(name, options):
    compare(lambda side: getattr(side("modules.crossnet"), name)(5, 3, **options), ROWS)


def test_deepfm():
    parts = [torch.randn(4, 2, 3), torch.randn(4, 5)]
    compare(lambda side: side("modules.deepfm").DeepFM(torch.nn.Linear(11, 2)), parts)
    for part in (side("modules.deepfm").FactorizationMachine()(parts) for side in SIDES[:1]):
        torch.testing.assert_close(part, SIDES[1]("modules.deepfm").FactorizationMachine()(parts), **CLOSE)


def test_helpers():
    for side in SIDES:
        utils = side("modules.utils")
        linear = torch.nn.Linear(3, 2)
        assert utils.get_module_output_dimension(linear, 3) == 2
        assert utils.check_module_output_dimension([linear, torch.nn.Linear(3, 2)], 3, 2)
        assert not utils.check_module_output_dimension(linear, 3, 4)
        assert isinstance(utils.extract_module_or_tensor_callable(torch.nn.ReLU), torch.nn.ReLU)
        assert utils.extract_module_or_tensor_callable(torch.relu) is torch.relu
        with pytest.raises(ValueError):
            utils.extract_module_or_tensor_callable(lambda: 3)
        nested = utils.construct_modulelist_from_single_module(linear, (2, 3))
        assert [len(part) for part in nested] == [3, 3] and nested[0][0].bias.abs().sum() == 0
        with pytest.raises(AssertionError):
            utils.convert_list_of_modules_to_modulelist([linear], (2,))
        ids, places = utils.deterministic_dedup(torch.tensor([5, 3, 5, 1, 3]))
        assert (ids.tolist(), places.tolist()) == ([1, 3, 5], [3, 4, 2])


def tables(side, dim=4):
    config = side("modules.embedding_configs").EmbeddingBagConfig
    made = [
        config(num_embeddings=10, embedding_dim=dim, name="t", feature_names=["f", "g"]),
        config(num_embeddings=7, embedding_dim=dim, name="u", feature_names=["h"]),
    ]
    bags = side("modules.embedding_modules").EmbeddingBagCollection(tables=made, device=torch.device("cpu"))
    with torch.no_grad():
        for seed, weight in enumerate(bags.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    torch.manual_seed(4)  # whatever the tables have drawn
    return bags


def ids(side):
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(0, 3, (12,), generator=generator)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=generator)
    return side("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(["f", "g", "h"], values, lengths)


@pytest.mark.parametrize("name", ["DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN"])
def test_models(name):
    def make(side):
        bags = tables(side)
        if name == "SimpleDeepFMNN":
            return side("models.deepfm").SimpleDeepFMNN(5, bags, 6, 3)
        more = {"DLRM_DCN": (2, 3), "DLRM_Projection": ([6, 8], [6, 12])}.get(name, ())
        return getattr(side("models.dlrm"), name)(bags, 5, [6, 4], [7, 1], *more)

    compare(make, ROWS, ids)


def test_training_module_and_errors():
    found = []
    for side in SIDES:
        dlrm = side("models.dlrm")
        model = dlrm.DLRMTrain(dlrm.DLRM(tables(side), 5, [6, 4], [7, 1]))
        batch = side("datasets.utils").Batch(ROWS, ids(side), torch.tensor([0, 1, 1, 0]))
        loss, (detached, logits, labels) = model(batch)
        assert not detached.requires_grad and not logits.requires_grad
        found.append((loss.item(), logits.tolist(), labels.tolist()))
        assert model.model.sparse_arch.sparse_feature_names == ["f", "g", "h"]
        assert (model.model.sparse_arch.F, model.model.sparse_arch.D) == (3, 4)
        with pytest.raises(ValueError):
            dlrm.DLRM(tables(side), 5, [6, 3], [7, 1])
        with pytest.raises(ValueError):
            dlrm.OverArch(5, [1])
        with pytest.raises(ValueError):
            dlrm.DLRM_Projection(tables(side), 5, [6, 4], [7, 1], [6, 7], [6, 8])
        assert dlrm.choose(5, 2) == 10
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize(
    "options",
    [
        {"hash_size": 10, "ids_per_feature": 3},
        {"hash_sizes": [10, 50], "ids_per_features": [2, 5], "min_ids_per_features": [0, 1]},
        {"min_ids_per_feature": 1, "num_generated_batches": 2},
        {"num_generated_batches": -1},
        {},
    ],
)
def test_random_batches(options):
    found = []
    for side in SIDES:
        dataset = side("datasets.random").RandomRecDataset(
            ["f", "g"], 3, num_dense=4, manual_seed=7, num_batches=5, **options
        )
        assert len(dataset) == 5
        found.append(
            [
                [b.dense_features, b.sparse_features.lengths(), b.sparse_features.values(), b.labels]
                for b in [*dataset, *dataset]
            ]
        )
    assert len(found[0]) == len(found[1]) == 10
    for ours, theirs in zip(*found, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
