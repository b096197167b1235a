"""torch.jit.script of the same programs by either import: the same results."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils._pytree import tree_leaves
from two_sides import OURS, SIDES, THEIRS

METHODS = {
    "numbers": "return kjt.stride(), kjt.stride_per_key(), kjt.length_per_key(), kjt.offset_per_key()",
    "places": "return kjt.keys(), kjt.index_per_key(), kjt.lengths_offset_per_key()",
    "tensors": "return kjt.values(), kjt.lengths(), kjt.offsets(), kjt.weights_or_none()",
    "permute": "p = kjt.permute([1, 0, 1])\n    return p.keys(), p.values(), p.lengths()",
    "split": "p = kjt.split([1, 1])[1]\n    return p.keys(), p.values(), p.lengths(), p.weights_or_none()",
    "concat": "p = KJT.concat([kjt, kjt])\n    return p.keys(), p.values(), p.lengths()",
    "features": "p = kjt.to_dict()\n    return p['a'].values(), p['b'].lengths(), kjt['a'].offsets()",
    "back": "p = KJT.from_jt_dict(kjt.to_dict())\n    return p.keys(), p.values(), p.lengths()",
    "made": "p = KJT(keys=['x'], values=kjt.values(), lengths=kjt.lengths())\n    return p.stride()",
    "empty": "p = KJT.empty_like(kjt)\n    return p.keys(), p.values(), p.stride()",
    "sent": "return kjt.dist_labels(), kjt.dist_splits([1, 1]), kjt.dist_tensors()",
    "padded": "return kjt['a'].to_padded_dense(), kjt['b'].to_padded_dense(1, 3.0), kjt['a'].to_dense()",
}


def batch(side, is_weighted):
    return side("sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
        ["a", "b"],
        torch.tensor([3, 1, 4, 1, 5]),
        torch.tensor([2, 0, 1, 2]),
        weights=torch.arange(1.0, 6.0) if is_weighted else None,
    )


def function_of(side, name, folder):
    """Return a function of its own file, which torch.jit reads."""
    source = (
        f"from {side.root}.sparse.jagged_tensor import KeyedJaggedTensor as KJT\n\n\n"
        f"def function(kjt: KJT):\n    {METHODS[name]}\n"
    )
    file = folder / f"{side.root}_{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.function


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_batches(name, is_weighted, tmp_path):
    found = [torch.jit.script(function_of(side, name, tmp_path))(batch(side, is_weighted)) for side in SIDES]
    for one, other in zip(*map(tree_leaves, found), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, check_dtype=False)
        else:
            assert one == other


def models(side):
    config = side("modules.embedding_configs").EmbeddingBagConfig
    torch.manual_seed(1)
    ebc = side("modules.embedding_modules").EmbeddingBagCollection(
        [
            config(name=f"t_{key}", num_embeddings=6, embedding_dim=4, feature_names=[key])
            for key in ("a", "b")
        ]
    )
    dlrm, deepfm = side("models.dlrm"), side("models.deepfm")
    return {
        "dlrm": dlrm.DLRM(ebc, 3, [4, 4], [5, 1]),
        "dcn": dlrm.DLRM_DCN(ebc, 3, [4, 4], [5, 1], 2, 2),
        "deepfm": deepfm.SimpleDeepFMNN(3, ebc, 4, 3),
    }


@pytest.mark.parametrize("name", ["dlrm", "dcn", "deepfm"])
def test_models(name):
    ours, theirs = models(OURS)[name], models(THEIRS)[name]
    ours.load_state_dict(theirs.state_dict())
    dense = torch.rand(2, 3)
    expected = theirs(dense, batch(THEIRS, False))
    for side, model in ((OURS, ours), (THEIRS, theirs)):
        scripted = torch.jit.script(side("fx").symbolic_trace(model))
        torch.testing.assert_close(scripted(dense, batch(side, False)), expected)
    torch.testing.assert_close(torch.jit.script(ours)(dense, batch(OURS, False)), expected)
