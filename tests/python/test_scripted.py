"""Programs with jagged batches and tables in torch.jit.script: the same results as without."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Dict, List, Optional, Tuple  # noqa: UP035  (what torch.jit reads)

import pytest
import torch
from tessera.fx import symbolic_trace
from tessera.models.deepfm import SimpleDeepFMNN
from tessera.models.dlrm import DLRM, DLRM_DCN
from tessera.modules.embedding_configs import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.feature_processor import PositionWeightedModule, PositionWeightedProcessor
from tessera.modules.feature_processor_ import PositionWeightedModule as OneFeature
from tessera.modules.feature_processor_ import PositionWeightedModuleCollection
from tessera.modules.regroup import KTRegroupAsDict
from tessera.quant import embedding_modules as quant
from tessera.sparse.jagged_tensor import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
)


def batch(is_weighted: bool = False) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        ["a", "b", "c"],
        torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]),
        torch.tensor([2, 0, 1, 3, 0, 2]),
        torch.arange(1.0, 9.0) / 4 if is_weighted else None,
    )


def variable_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(
        ["a", "b", "c"],
        torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]),
        torch.tensor([2, 1, 3, 0, 2]),
        stride_per_key_per_rank=[[2], [1], [2]],
        inverse_indices=(["a", "b", "c"], torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 1]])),
    )


def read_batch(kjt: KeyedJaggedTensor):
    numbers = (kjt.stride(), kjt.stride_per_key(), kjt.length_per_key(), kjt.offset_per_key())
    more = (kjt.lengths_offset_per_key(), kjt.index_per_key(), kjt.keys(), kjt.variable_stride_per_key())
    tensors = (kjt.values(), kjt.lengths(), kjt.offsets(), kjt.device(), kjt.stride_per_key_per_rank())
    return numbers, more, tensors


def travel(kjt: KeyedJaggedTensor):
    return kjt.dist_labels(), kjt.dist_splits([2, 1]), kjt.dist_tensors(), str(kjt), kjt.size_in_bytes()


def change_batch(kjt: KeyedJaggedTensor) -> List[KeyedJaggedTensor]:  # noqa: UP006
    changed = [kjt.permute([2, 0, 2]), KeyedJaggedTensor.concat([kjt, kjt]), kjt.to(torch.device("cpu"))]
    changed.extend(kjt.split([1, 0, 2]))
    changed.append(KeyedJaggedTensor.from_jt_dict(kjt.to_dict()))
    changed.append(kjt.flatten_lengths())
    changed.append(KeyedJaggedTensor.empty_like(kjt))
    changed.append(KeyedJaggedTensor.from_offsets_sync(["x"], kjt.values(), kjt.offsets()))
    return changed


def read_feature(
    jt: JaggedTensor,
) -> Tuple[List[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor, str]:  # noqa: UP006
    return jt.to_dense(), jt.to_padded_dense(), jt.to_padded_dense(2, -1.0), jt.offsets(), str(jt)


def read_weights(
    jt: JaggedTensor,
) -> Tuple[Optional[List[torch.Tensor]], Optional[torch.Tensor], torch.Tensor]:  # noqa: UP006, UP045
    return jt.to_dense_weights(), jt.to_padded_dense_weights(), jt.weights()


def make_features(values: torch.Tensor, lengths: torch.Tensor) -> List[JaggedTensor]:  # noqa: UP006
    return [
        JaggedTensor(values, lengths=lengths),
        JaggedTensor.from_dense([values, values[:1]]),
        JaggedTensor.from_dense_lengths(values.reshape(2, -1), torch.tensor([1, 3])),
        JaggedTensor.empty(),
    ]


def use_columns(
    kt: KeyedTensor,
) -> Tuple[List[torch.Tensor], Dict[str, torch.Tensor], torch.Tensor, List[int], str]:  # noqa: UP006
    other = KeyedTensor.from_tensor_list(["y"], [kt["a"]])
    grouped = KeyedTensor.regroup([kt, other], [["y", "b"], ["a"]])
    named = KeyedTensor.regroup_as_dict([kt], [["b", "a"], ["b"]], ["one", "two"])
    made = KeyedTensor(["u", "v"], [1, 2], kt.values())
    return grouped, named, made["v"], kt.offset_per_key(), str(kt)


def assert_same(one, other) -> None:
    if isinstance(one, KeyedJaggedTensor):
        assert kjt_is_equal(one, other) and one.stride() == other.stride()
    elif isinstance(one, JaggedTensor):
        assert jt_is_equal(one, other)
    elif isinstance(one, KeyedTensor):
        assert one.keys() == other.keys() and one.length_per_key() == other.length_per_key()
        assert_same(one.values(), other.values())
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for own, theirs in zip(one, other, strict=True):
            assert_same(own, theirs)
    else:
        assert one == other


@pytest.mark.parametrize(
    "kjt", [batch(), batch(True), variable_batch()], ids=["plain", "weighted", "variable"]
)
def test_batches(kjt):
    assert_same(torch.jit.script(read_batch)(kjt), read_batch(kjt))
    if not kjt.variable_stride_per_key():
        assert_same(torch.jit.script(change_batch)(kjt), change_batch(kjt))
    labels, splits, tensors, _, size = torch.jit.script(travel)(kjt)
    assert_same((labels, splits, tensors), (kjt.dist_labels(), kjt.dist_splits([2, 1]), kjt.dist_tensors()))
    assert size == kjt.size_in_bytes()


def test_texts():
    kjt = batch()
    assert torch.jit.script(travel)(kjt)[3] == str(kjt)
    jt = kjt["a"]
    assert torch.jit.script(read_feature)(jt)[4] == str(jt)
    kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert torch.jit.script(use_columns)(kt)[4] == str(kt)


def test_features_and_columns():
    jt = batch(True)["b"]
    assert_same(torch.jit.script(read_feature)(jt)[:4], read_feature(jt)[:4])
    assert_same(torch.jit.script(read_weights)(jt), read_weights(jt))
    values, lengths = torch.arange(6.0), torch.tensor([1, 0, 5])
    assert_same(torch.jit.script(make_features)(values, lengths), make_features(values, lengths))
    kt = KeyedTensor(["a", "b"], [1, 2], torch.rand(4, 3))
    assert_same(torch.jit.script(use_columns)(kt)[:4], use_columns(kt)[:4])


def give_back(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return kjt


def make_wrong(values: torch.Tensor, lengths: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], values, lengths, lengths)


def test_what_comes_out_of_a_script_is_a_batch_like_any_other():
    out = torch.jit.script(give_back)(batch(True))
    assert type(out) is KeyedJaggedTensor and out.permute([1, 0, 2]).keys() == ["b", "a", "c"]
    with pytest.raises(Exception, match="not as many weights as values"):
        torch.jit.script(make_wrong)(torch.arange(3), torch.tensor([3]))


# ---- tables ----


def bag_tables(data_type=DataType.FP32, **options) -> EmbeddingBagCollection:
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(10, 4, "sums", data_type, ["a", "b"]),
        EmbeddingBagConfig(12, 3, "means", data_type, ["b", "c"], pooling=PoolingType.MEAN),
    ]
    return EmbeddingBagCollection(tables, **options)


def row_tables(data_type=DataType.FP32, **options) -> EmbeddingCollection:
    torch.manual_seed(3)
    tables = [
        EmbeddingConfig(10, 4, "one", data_type, ["a", "b"]),
        EmbeddingConfig(12, 4, "two", data_type, ["b", "c"]),
    ]
    return EmbeddingCollection(tables, **options)


def saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def gradients(module, features) -> dict[str, torch.Tensor]:
    module.zero_grad()
    found = module(features)
    parts = [found.values()] if isinstance(found, KeyedTensor) else [jt.values() for jt in found.values()]
    sum((part * torch.arange(part.numel()).view(part.shape)).sum() for part in parts).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {name: grad.to_dense() if grad.is_sparse else grad.clone() for name, grad in grads.items()}


@pytest.mark.parametrize("make", [bag_tables, row_tables])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
def test_collections(make, data_type):
    module = make(data_type)
    for features in (batch(), variable_batch()):
        expected = module(features)
        for form in (
            torch.jit.script(module),
            saved_and_loaded(module),
            symbolic_trace(module),
            torch.jit.script(symbolic_trace(module)),
        ):
            assert_same(form(features), expected)
    if data_type == DataType.FP32:
        assert_same(gradients(torch.jit.script(module), batch()), gradients(module, batch()))


def test_options_of_collections():
    module = bag_tables(is_weighted=True)
    assert_same(torch.jit.script(module)(batch(True)), module(batch(True)))
    module = row_tables(need_indices=True)
    assert_same(torch.jit.script(module)(batch()), module(batch()))
    module = bag_tables(sparse_gradients=True)
    assert_same(gradients(torch.jit.script(module), batch()), gradients(module, batch()))
    outside = KeyedJaggedTensor.from_lengths_sync(
        ["a", "b", "c"], torch.tensor([99, 1, -1]), torch.tensor([1, 1, 1])
    )
    module = bag_tables(bounds_check_mode=BoundsCheckMode.IGNORE)
    assert_same(torch.jit.script(module)(outside), module(outside))
    with pytest.raises(Exception, match="embedding_bag"):
        torch.jit.script(bag_tables())(outside)


def test_tables_that_backward_steps_are_scripted_for_reading_alone():
    from tessera import _C

    module = bag_tables(optimizer=_C.embedding.OptimizerOptions())
    scripted = torch.jit.script(module)
    with torch.no_grad():
        assert_same(scripted(batch()), module(batch()))
    with pytest.raises(Exception, match="backward steps these rows"):
        scripted(batch())


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint4x2, torch.quint2x4, torch.float16, torch.float32])
def test_quantised_collections(dtype):
    for make, cls in (
        (bag_tables, quant.EmbeddingBagCollection),
        (row_tables, quant.EmbeddingCollection),
    ):
        module = make()
        module.qconfig = quant.QuantConfig.of(dtype)
        rounded = cls.from_float(module)
        expected = rounded(batch())
        for form in (torch.jit.script(rounded), torch.jit.script(symbolic_trace(rounded))):
            assert_same(form(batch()), expected)
        assert_same(saved_and_loaded(rounded)(batch()), expected)


def test_scales_beside_the_codes_are_not_scripted():
    module = bag_tables()
    module.qconfig = quant.QuantConfig.of(torch.qint8)
    quant.quant_prep_enable_quant_state_dict_split_scale_bias(module)
    rounded = quant.EmbeddingBagCollection.from_float(module)
    for make in (torch.jit.script, symbolic_trace):
        with pytest.raises(ValueError, match="scales that stand beside the codes"):
            make(rounded)


# ---- models and parts of them ----


def one_width() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in ("a", "b", "c")]
    return EmbeddingBagCollection(tables)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DLRM(one_width(), 3, [4, 4], [5, 1]),
        lambda: DLRM_DCN(one_width(), 3, [4, 4], [5, 1], 2, 2),
        lambda: SimpleDeepFMNN(3, one_width(), 4, 3),
    ],
    ids=["dlrm", "dcn", "deepfm"],
)
def test_models(make):
    model = make()
    dense = torch.rand(2, 3)
    expected = model(dense, batch())
    graph = symbolic_trace(model)
    for form in (torch.jit.script(model), saved_and_loaded(model), graph, torch.jit.script(graph)):
        assert_same(form(dense, batch()), expected)


def test_processors():
    features = batch()
    for processor in (
        PositionWeightedProcessor({"a": 3, "b": 3}),
        PositionWeightedModuleCollection({"b": 3}),
    ):
        for weight in processor.position_weights.values():
            torch.nn.init.uniform_(weight)
        assert_same(torch.jit.script(processor)(features), processor(features))
    by_name = PositionWeightedModule({"a": 3})
    torch.nn.init.uniform_(by_name.position_weights["a"])
    assert_same(torch.jit.script(by_name)(features.to_dict()), by_name(features.to_dict()))
    one = OneFeature(3)
    assert_same(torch.jit.script(one)(features["b"]), one(features["b"]))
    with pytest.raises(Exception, match="index"):
        torch.jit.script(OneFeature(1))(features["b"])


def test_regrouping():
    kt = KeyedTensor(["a", "b"], [1, 2], torch.rand(4, 3))
    for dtype in (None, DataType.FP16):
        module = KTRegroupAsDict([["b", "a"], ["a"]], ["x", "y"], emb_dtype=dtype)
        expected = module([kt])
        for form in (torch.jit.script(module), symbolic_trace(module)):
            assert_same(form([kt]), expected)


class FromTensors(torch.nn.Module):
    """Makes its batch inside, as what is served does."""

    def __init__(self):
        super().__init__()
        self.tables = bag_tables()

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor.from_lengths_sync(["a", "b", "c"], values, lengths)
        return self.tables(features).values()


def test_a_saved_script_needs_torch_alone(tmp_path):
    model = FromTensors()
    torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    features = batch()
    given = [features.values(), features.lengths()]
    torch.save([*given, model(*given).detach()], tmp_path / "expected.pt")
    program = """
import sys, torch
values, lengths, expected = torch.load("expected.pt")
torch.testing.assert_close(torch.jit.load("model.pt")(values, lengths), expected)
assert not any(name.startswith("tessera") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, check=True)
