"""Criteo's files beside torchrec 1.8.0."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from two_sides import OURS, SIDES, THEIRS


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """Stand in for the package that torchrec opens files with."""

    class Paths:
        def get(self, key):
            return self

        def open(self, path, mode="r", **options):
            return open(path, mode, **options)

        def set_strict_kwargs_checking(self, is_on):
            pass

        def get_local_path(self, path):
            return path

    module = types.ModuleType("iopath.common.file_io")
    module.PathManagerFactory = module.PathManager = Paths
    for name, value in (
        ("iopath", types.ModuleType("iopath")),
        ("iopath.common", types.ModuleType("iopath.common")),
    ):
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setitem(sys.modules, "iopath.common.file_io", module)


def test_names():
    for name in ("INT_FEATURE_COUNT", "CAT_FEATURE_COUNT", "DEFAULT_CAT_NAMES", "DEFAULT_INT_NAMES", "DAYS",
                 "DEFAULT_LABEL_NAME", "DEFAULT_COLUMN_NAMES", "TOTAL_TRAINING_SAMPLES"):  # fmt: skip
        assert getattr(OURS("datasets.criteo"), name) == getattr(THEIRS("datasets.criteo"), name)


LINES = "".join(
    "\t".join([str(i % 2), *(str(5 * i + j - 3) if j != 2 else "" for j in range(13)),
               *(f"{i * 31 + j:x}" if j != 4 else "" for j in range(26))]) + "\n"
    for i in range(5)
)  # fmt: skip


def test_lines(tmp_path):
    file = tmp_path / "day_0"
    file.write_text(LINES)
    rows = [list(side("datasets.criteo").criteo_kaggle(str(file))) for side in SIDES]
    assert rows[0] == rows[1] and len(rows[0]) == 5
    made = []
    for side in SIDES:
        outs = [str(tmp_path / f"{side.root}_{kind}.npy") for kind in "dsl"]
        side("datasets.criteo").BinaryCriteoUtils.tsv_to_npys(str(file), *outs)
        made.append([np.load(out) for out in outs])
    for ours, theirs in zip(*made, strict=True):
        assert ours.dtype == theirs.dtype and np.allclose(ours, theirs)
    utils = OURS("datasets.criteo").BinaryCriteoUtils
    assert utils.get_shape_from_npy(outs[0]) == (5, 13)
    assert np.array_equal(utils.load_npy_range(outs[1], 1, 2), made[0][1][1:3])
    with pytest.raises(ValueError, match="which has 5"):
        utils.load_npy_range(outs[1], 4, 2)


@pytest.mark.parametrize(
    "given", [([10, 10], 0, 3), ([10, 10], 1, 3), ([3, 4, 5], 1, 2), ([3, 4, 5], 0, 2, 2, 9)]
)
def test_ranges(given):
    found = [
        side("datasets.criteo").BinaryCriteoUtils.get_file_row_ranges_and_remainder(*given) for side in SIDES
    ]
    assert found[0] == found[1]


def batches(side, tmp_path, files, **options):
    paths = [[str(tmp_path / f"{kind}{i}.npy") for i in range(files)] for kind in "dsl"]
    dataset = side("datasets.criteo").InMemoryBinaryCriteoIterDataPipe(
        options.pop("stage", "train"), *paths, **options
    )
    found = list(dataset)
    assert len(found) == len(dataset)
    return found


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ([7, 6], {"batch_size": 3, "world_size": 2}),
        ([7, 6], {"batch_size": 3, "world_size": 2, "drop_last": True}),
        ([7, 6], {"batch_size": 3, "world_size": 2, "stage": "val", "mmap_mode": True}),
        ([10, 11], {"batch_size": 4, "world_size": 3, "stage": "test", "hashes": [10] * 26}),
        ([20], {"batch_size": 3, "world_size": 2}),
        ([4], {"batch_size": 8, "world_size": 1}),
    ],
)
def test_batches(tmp_path, sizes, options):
    generator = np.random.default_rng(1)
    for i, size in enumerate(sizes):
        np.save(tmp_path / f"d{i}.npy", generator.random((size, 13), dtype=np.float32))
        np.save(tmp_path / f"s{i}.npy", generator.integers(0, 1000, (size, 26)).astype(np.int32))
        np.save(tmp_path / f"l{i}.npy", generator.integers(0, 2, (size, 1)).astype(np.int32))
    for rank in range(options["world_size"]):
        ours, theirs = [batches(side, tmp_path, len(sizes), rank=rank, **options) for side in SIDES]
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.dense_features, b.dense_features)
            assert torch.equal(a.labels, b.labels) and a.labels.dtype == b.labels.dtype
            mine, other = a.sparse_features, b.sparse_features
            assert mine.keys() == other.keys() and torch.equal(mine.values(), other.values())
            assert mine.values().dtype == other.values().dtype
            assert torch.equal(mine.lengths(), other.lengths()) and mine.stride() == other.stride()


def test_rows_dealt_anew(tmp_path):
    rows = np.arange(13)
    np.save(tmp_path / "d0.npy", np.zeros((13, 13), dtype=np.float32))
    np.save(tmp_path / "s0.npy", np.repeat(rows[:, None], 26, 1).astype(np.int32))
    np.save(tmp_path / "l0.npy", np.zeros((13, 1), dtype=np.int32))
    seen = []
    for rank in range(2):
        options = {"rank": rank, "world_size": 2, "batch_size": 3, "shuffle_training_set": True}
        for batch in batches(OURS, tmp_path, 1, shuffle_batches=True, **options):
            seen += batch.sparse_features["cat_0"].values().tolist()
    assert sorted(seen) == rows.tolist() and seen != rows.tolist()
