"""Models that are made ready to predict, by either import: rounded, sharded and wrapped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from two_sides import OURS, SIDES, THEIRS

CPU = torch.device("cpu")


def model(side, processed=True):
    """Return a model with pooled tables, with single rows, and with weights by position."""
    configs, modules = side("modules.embedding_configs"), side("modules.embedding_modules")

    def bags(names, weighted=False):
        tables = [
            configs.EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=20, feature_names=[feature], need_pos=weighted
            )
            for name, feature in names.items()
        ]
        return modules.EmbeddingBagCollection(tables=tables, is_weighted=weighted)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = bags({"a": "f", "b": "g"})
            self.inner = nn.ModuleDict({"more": bags({"c": "g"})})
            self.rows = modules.EmbeddingCollection(
                [configs.EmbeddingConfig(name="d", embedding_dim=8, num_embeddings=20, feature_names=["f"])]
            )
            if processed:
                weights = side("modules.feature_processor_").PositionWeightedModuleCollection({"f": 4})
                self.inner["processed"] = side(
                    "modules.fp_embedding_modules"
                ).FeatureProcessedEmbeddingBagCollection(bags({"e": "f"}, True), weights)
            self.layer = nn.Linear(24, 3)

        def forward(self, features):
            pooled = torch.cat([self.bags(features).values(), self.inner["more"](features).values()], 1)
            found = [self.layer(pooled), self.rows(features)["f"].values()]
            if processed:
                found.append(self.inner["processed"](features.split([1, 1])[0]).values())
            return found

    made = Model()
    with torch.no_grad():
        for seed, weight in enumerate(made.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    return made


def features(side):
    ids = torch.tensor([3, 19, 0, 7, 7, 2, 11])
    return side("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
        ["f", "g"], ids, torch.tensor([2, 0, 1, 3, 1, 0])
    )


OPTIONS = [
    {},
    {"quantization_dtype": torch.quint4x2, "fp_weight_dtype": torch.float16},
    {"output_dtype": torch.float16, "quantization_dtype": torch.float16},
    {"per_table_weight_dtype": {"b": torch.quint4x2, "c": torch.float16}},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_models_are_rounded(options):
    found = []
    for side in SIDES:
        plain = model(
            side, "per_table_weight_dtype" not in options
        ).eval()  # torchrec's has types of all or none
        if "output_dtype" in options:
            plain.layer.half()
        made = side("inference.modules").quantize_inference_model(plain, **copy.deepcopy(options))
        assert made is plain
        types = [str(config.data_type) for config in made.bags.embedding_bag_configs()]
        found.append((made(features(side)), types, type(made.rows).__name__))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    assert found[0][1:] == found[1][1:]


def test_models_are_prepared():
    """Rows at multiples of other numbers of bytes, and scales that stand apart."""
    found = []
    for side in SIDES:
        prepare, plain = side("quant.embedding_modules"), model(side, processed=False)
        kinds = [type(plain.bags), type(plain.rows)]
        prepare.quant_prep_customize_row_alignment(plain, kinds, 4)
        prepare.quant_prep_enable_quant_state_dict_split_scale_bias_for_types(plain, [type(plain.bags)])
        prepare.quant_prep_enable_register_tbes(plain, [])
        prepare.quant_prep_enable_cache_features_order(plain, kinds)
        seen = []
        prepare.for_each_module_of_type_do(
            plain, kinds, lambda part, seen=seen: seen.append(type(part).__name__)
        )
        made = side("inference.modules").quantize_inference_model(plain)
        state = {name: rows for name, rows in made.state_dict().items() if "tbes" not in name}
        found.append((sorted(seen), sorted(state), {name: rows.shape for name, rows in state.items()}, state))
    assert found[0][:3] == found[1][:3]
    assert found[0][2]["rows.embeddings.d.weight"] == (20, 12)  # 8 codes and what they are scaled by
    for name, rows in found[0][3].items():
        torch.testing.assert_close(rows, found[1][3][name])


def test_a_mapping_of_ones_own():
    for side in SIDES:
        module = side("inference.modules")
        only = {name: kind for name, kind in module.DEFAULT_QUANT_MAPPING.items() if "Bag" in name}
        assert len(only) == 1 and len(module.DEFAULT_QUANT_MAPPING) == 2
        plain = model(side, processed=False)
        rows = plain.rows
        made = module.quantize_inference_model(plain, quantization_mapping=only)
        assert made.rows is rows and made.bags.embedding_bags["a"].weight.dtype == torch.uint8
        assert module.FEATURE_PROCESSED_EBC_TYPE.endswith(
            "fp_embedding_modules.FeatureProcessedEmbeddingBagCollection"
        )


@pytest.mark.parametrize("world", [1, 2])
def test_tables_go_whole_to_devices(world):
    found = []
    for side in SIDES:
        switch = side("distributed.global_settings").set_propogate_device
        switch(True)  # torchrec asks for GPUs else
        try:
            made = side("inference.modules").quantize_inference_model(model(side, processed=False))
            expected = made(features(side))
            if side is THEIRS:
                del made.rows
            sharded, plan = side("inference.modules").shard_quant_model(
                made, world_size=world, compute_device="cpu", sharding_device="cpu"
            )
        finally:
            switch(False)
        if side is OURS:
            torch.testing.assert_close(sharded(features(side)), expected)
        kinds = [type(part).__name__ for part in (sharded.bags, sharded.inner["more"])]
        plans = {
            (path, table): how.sharding_type for path, own in plan.plan.items() for table, how in own.items()
        }
        found.append((kinds, {key: kind for key, kind in plans.items() if key[0] != "rows"}))
    assert found[0] == found[1]
    assert set(found[0][1].values()) == {"table_wise"} and len(found[0][1]) == 3


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_tables_are_cut(kind):
    module = OURS("inference.modules")
    made = module.quantize_inference_model(model(OURS))
    expected = made(features(OURS))
    constraint = OURS("distributed.planner").ParameterConstraints
    wishes = {name: constraint(sharding_types=[kind], compute_kernels=["quant"]) for name in "abc"}
    wishes["e"] = constraint(sharding_types=["table_wise"], compute_kernels=["quant"])
    sharded, plan = module.shard_quant_model(made, world_size=2, compute_device="cpu", constraints=wishes)
    assert {how.sharding_type for path in ("bags", "inner.more") for how in plan.plan[path].values()} == {
        kind
    }
    torch.testing.assert_close(sharded(features(OURS)), expected, rtol=1e-5, atol=1e-5)
    assert all(f"{name}  " in str(plan) for name in "abc")
    again, same = module.shard_quant_model(
        module.quantize_inference_model(model(OURS)), 2, "cpu", "cpu", sharding_plan=plan
    )
    assert same is plan
    torch.testing.assert_close(again(features(OURS)), expected, rtol=1e-5, atol=1e-5)


def test_tables_behind_processors_have_types_of_their_own():
    types = {"a": torch.quint4x2, "e": torch.float16}
    made = OURS("inference.modules").quantize_inference_model(model(OURS), per_table_weight_dtype=types)
    assert [config.data_type.value for config in made.bags.embedding_bag_configs()] == ["INT4", "INT8"]
    assert made.inner["processed"].embedding_bags["e"].weight.shape == (20, 16)
    assert made.inner["more"].embedding_bags["c"].weight.shape == (20, 16)


def test_tables_that_are_not_there():
    types = {"a": torch.qint8, "z": torch.qint8}
    for quantise in ("quantize_inference_model", "quantize_embeddings"):
        options = {"dtype": torch.qint8, "inplace": True} if quantise == "quantize_embeddings" else {}
        with pytest.raises(ValueError, match=r"there are no tables \['z'\], for which types are given"):
            getattr(OURS("inference.modules"), quantise)(model(OURS), per_table_weight_dtype=types, **options)


def factory_of(module):
    """Return what a program writes to serve a model."""

    class Predict(module.PredictModule):
        def predict_forward(self, batch):
            assert not torch.is_grad_enabled() and not self.predict_module.training
            return {"default": self.predict_module(batch["x"])}

    class Factory(module.PredictFactory):
        def create_predict_module(self):
            torch.manual_seed(3)
            inner = nn.ModuleDict({"layer": nn.Linear(2, 2)})
            inner.forward = lambda x: inner["layer"](x)
            return Predict(inner, "cpu")

        def batching_metadata(self):
            return {"x": module.BatchingMetadata(type="dense", device="cpu", pinned=["lengths"])}

        def result_metadata(self):
            return "dict_of_tensor"

        def run_weights_independent_tranformations(self, predict_module):
            return predict_module

        def run_weights_dependent_transformations(self, predict_module):
            return module.quantize_dense(predict_module, torch.half)

        def qualname_metadata(self):
            return {"forward": module.QualNameMetadata(need_preproc=True)}

    return Factory()


def test_modules_that_predict():
    found = []
    x = torch.tensor([[1.0, 2.0]])
    for side in SIDES:
        module = side("inference.modules")
        factory = factory_of(module)
        made = factory.create_predict_module()
        full = made({"x": x})["default"]
        with pytest.raises(NotImplementedError):
            module.quantize_dense(made, torch.bfloat16)
        made = factory.run_weights_independent_tranformations(made)
        half = factory.run_weights_dependent_transformations(made)({"x": x})["default"]
        with pytest.raises(TypeError):
            module.PredictFactory()
        found.append(
            (
                factory.batching_metadata_json(),
                factory.qualname_metadata_json(),
                factory.model_inputs_data(),
                {name: value.tolist() for name, value in made.state_dict().items()},
                (full.tolist(), half.tolist(), half.dtype),
                module.trim_torch_package_prefix_from_typename("<torch_package_3>.a.B"),
            )
        )
        given = (x, x.double(), torch.ones(1, dtype=torch.long), "text")
        changed = module.quantize_feature(made, given)
        assert [getattr(value, "dtype", value) for value in changed] == [
            torch.half,
            torch.half,
            torch.long,
            "text",
        ]
    assert found[0] == found[1]
