"""The DLRM workload beside torchrec 1.8.0: both models with their gradients, and the metrics of clicks."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.ne import compute_logloss, compute_ne, get_ne_states
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("TESSERA_DLRM_NUMBERS", str(ROOT / "build/release/bin/dlrm_numbers"))
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
FEATURES = ["a", "b", "c"]
DIM = 4


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    if not pathlib.Path(PROGRAM).exists():
        pytest.skip(f"{PROGRAM} is not built; the workloads are not part of every build")
    path = tmp_path_factory.mktemp("dlrm") / "numbers.pt"
    subprocess.run([PROGRAM, path], check=True, timeout=60)
    return torch.load(path, weights_only=False)  # a file of the program above


def of(numbers, prefix):
    return {
        name[len(prefix) + 1 :]: value for name, value in numbers.items() if name.startswith(prefix + ".")
    }


def tables(rows):
    """A collection whose table of a feature is its rows: sample i looks up row i."""
    batch = rows.size(0)
    configs = [
        EmbeddingBagConfig(num_embeddings=batch, embedding_dim=DIM, name=f, feature_names=[f])
        for f in FEATURES
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    with torch.no_grad():
        for place, feature in enumerate(FEATURES):
            part = rows[:, place * DIM : (place + 1) * DIM]
            bags.embedding_bags[feature].weight.copy_(part)
    ids = KeyedJaggedTensor.from_lengths_sync(
        FEATURES,
        torch.arange(batch).repeat(len(FEATURES)),
        torch.ones(len(FEATURES) * batch, dtype=torch.int64),
    )
    return bags, ids


def pair_order():
    """Where torchrec has the products that we have in order: ours row by row below the diagonal."""
    count = len(FEATURES) + 1
    above = torch.triu_indices(count, count, offset=1).T.tolist()
    return [above.index([j, i]) for i in range(count) for j in range(i)]


def linears(module):
    return [part for part in module.modules() if isinstance(part, torch.nn.Linear)]


def check_model(given, model, ids, columns=None):
    """Fill torchrec's model with our parameters; logits and all gradients must agree."""
    parameters = of(given, "parameter")
    gradients = of(given, "gradient")
    bottom = [(f"bottom.layer_{i}", layer) for i, layer in enumerate(linears(model.dense_arch))]
    top = [(f"top.layer_{i}", layer) for i, layer in enumerate(linears(model.over_arch))]
    pairs = []
    for name, layer in bottom + top:
        pairs += [(f"{name}.weight", layer.weight), (f"{name}.bias", layer.bias)]
    crossnet = getattr(model.inter_arch, "crossnet", None)
    for i in range(crossnet._num_layers if crossnet is not None else 0):
        pairs.append((f"cross.down_{i}.weight", crossnet.V_kernels[i]))
        pairs.append((f"cross.up_{i}.weight", crossnet.W_kernels[i]))
        pairs.append((f"cross.up_{i}.bias", crossnet.bias[i]))
    assert sorted(name for name, _ in pairs) == sorted(parameters)

    def theirs(name, value):
        if columns is None or name != "top.layer_0.weight":
            return value
        moved = torch.empty_like(value)
        moved[:, :DIM] = value[:, :DIM]
        moved[:, [DIM + place for place in columns]] = value[:, DIM:]
        return moved

    with torch.no_grad():
        for name, parameter in pairs:
            parameter.copy_(theirs(name, parameters[name]))
    logits = model(given["dense"], ids).squeeze(1)
    torch.testing.assert_close(given["logits"], logits, **CLOSE)
    (torch.arange(1, len(logits) + 1) * logits).sum().backward()
    for name, parameter in pairs:
        torch.testing.assert_close(theirs(name, gradients[name]), parameter.grad, **CLOSE, msg=name)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    rows_grad = torch.cat([bags[feature].weight.grad for feature in FEATURES], 1)
    torch.testing.assert_close(given["rows_grad"], rows_grad, **CLOSE)


def test_dlrm(numbers):
    given = of(numbers, "dot")
    bags, ids = tables(given["rows"])
    model = DLRM(bags, given["dense"].size(1), [6, 4], [8, 3, 1])
    check_model(given, model, ids, pair_order())


def test_dcn(numbers):
    given = of(numbers, "cross")
    bags, ids = tables(given["rows"])
    model = DLRM_DCN(bags, given["dense"].size(1), [6, 4], [8, 3, 1], 2, 3)
    check_model(given, model, ids)


def test_metrics(numbers):
    given = of(numbers, "metrics")
    labels = given["labels"].double().unsqueeze(0)
    chances = given["logits"].double().sigmoid().unsqueeze(0)
    weights = torch.ones_like(labels)
    eta = 1e-12
    states = get_ne_states(labels, chances, weights, eta)
    cross_entropy, samples = states["cross_entropy_sum"], states["weighted_num_samples"]
    clicks, others = states["pos_labels"], states["neg_labels"]
    ours = {name: value.item() for name, value in given.items() if value.dim() == 0}
    theirs = {
        "normalised_entropy": compute_ne(cross_entropy, samples, clicks, others, eta),
        "log_loss": compute_logloss(
            cross_entropy * torch.log(torch.tensor(2.0).double()), clicks, others, eta
        ),
        "calibration": compute_calibration(**get_calibration_states(labels, chances, weights)),
    }
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value.item(), rel=1e-8), name
    # torchrec's own AUC takes tied scores in the order they come in; torchmetrics counts them half.
    auc = binary_auroc(chances.squeeze(0), given["labels"].long()).item()
    assert ours["auc"] == pytest.approx(auc, abs=2e-6)  # theirs sums in float
    assert abs(ours["streaming_auc"] - ours["auc"]) <= ours["streaming_error"]
