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


def test_pipes_are_split_and_cut_short():
    from torch.utils.data.datapipes.iter import IterableWrapper

    found = []
    for side in SIDES:
        utils, rows = side("datasets.utils"), IterableWrapper(range(40))
        drawn = utils.rand_split_train_val(rows, 0.7, random_seed=3)
        numbered = utils.idx_split_train_val(rows, 0.75, decimal_places=1, key_fn=abs)
        short = utils.Limit(rows, 3)
        joined = utils.ParallelReadConcat(IterableWrapper("ab"), short)
        pipes = (*drawn, *numbered, short, joined)
        found.append([list(pipe) for pipe in pipes])
        assert [list(pipe) for pipe in pipes] == found[-1]  # the same in every pass
        assert sorted(found[-1][0] + found[-1][1]) == list(range(40))
        for split in (utils.rand_split_train_val, utils.idx_split_train_val):
            with pytest.raises(ValueError):
                split(rows, 1.0)
        assert utils.safe_cast("7", int, 0) == 7 and utils.safe_cast("x", float, 0.5) == 0.5
    assert found[0] == found[1]


def of_workers(side):
    from torch.utils.data.datapipes.iter import IterableWrapper

    pipes = [IterableWrapper([10 * number, 10 * number + 1]) for number in range(5)]
    loader = torch.utils.data.DataLoader(
        side("datasets.utils").ParallelReadConcat(*pipes), batch_size=None, num_workers=2
    )
    return sorted(loader)


def test_workers_share_pipes():
    assert of_workers(OURS) == of_workers(THEIRS) == [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]


@pytest.mark.parametrize("films", [False, True])
@pytest.mark.parametrize("name", ["movielens_20m", "movielens_25m"])
def test_ratings_of_films(tmp_path, name, films):
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,99\n4,5,,x\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n2,"A, B",Drama\n5,C,Comedy|War\n')
    found = []
    for side in SIDES:
        module = side("datasets.movielens")
        read = getattr(module, name)
        rows = list(read(str(tmp_path), include_movies_data=films))
        plain = list(read(str(tmp_path), include_movies_data=films, row_mapper=None))
        found.append((rows, plain, module.DEFAULT_COLUMN_NAMES, module.DEFAULT_RATINGS_COLUMN_NAMES))
    assert found[0] == found[1]
    assert found[0][0][1]["rating"] == 0.0 and ("title" in found[0][0][0]) == films


def test_files_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("x;y\n1;2\n")
    for side in SIDES:
        utils = side("datasets.utils")
        files = utils.LoadFiles([str(tmp_path / "a.csv")], mode="t", length=1)
        assert len(files) == 1
        assert list(utils.ReadLinesFromCSV(files, skip_first_line=True, delimiter=";")) == [["1", "2"]]
        with pytest.raises(ValueError):
            utils.LoadFiles([], mode="w")
        with pytest.raises(TypeError):
            next(iter(utils.LoadFiles([3])))
        with pytest.raises(NotImplementedError):
            len(utils.LoadFiles([]))


@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_ids_are_numbered(tmp_path, threshold):
    generator = np.random.default_rng(threshold)
    paths = []
    for day, rows in enumerate((40, 1, 25)):
        paths.append(str(tmp_path / f"day_{day}_sparse.npy"))
        np.save(
            paths[-1],
            generator.integers(0, 2**31 - 1, 18)[generator.integers(0, 18, (rows, 4))].astype(np.int32),
        )
    found = []
    for side in SIDES:
        folder = tmp_path / side("types").__name__
        folder.mkdir()
        utils = side("datasets.criteo").BinaryCriteoUtils
        utils.sparse_to_contiguous(paths, str(folder), threshold, columns=4, output_file_suffix="_n.npy")
        found.append({file.name: np.load(file) for file in sorted(folder.iterdir())})
    assert list(found[0]) == list(found[1]) == [f"day_{day}_sparse_n.npy" for day in range(3)]
    for name, rows in found[0].items():
        assert rows.dtype == found[1][name].dtype and (rows == found[1][name]).all()


def days_of(folder, sizes, largest):
    generator = np.random.default_rng(5)
    for day, size in enumerate(sizes):
        np.save(folder / f"day_{day}_dense.npy", generator.random((size, 2)).astype(np.float32))
        np.save(folder / f"day_{day}_sparse.npy", generator.integers(0, largest, (size, 3)).astype(np.int32))
        np.save(folder / f"day_{day}_labels.npy", generator.integers(0, 2, (size, 1)).astype(np.int32))
    return dict(enumerate(sizes))


@pytest.mark.parametrize("seed", [0, 7])
def test_rows_of_days_are_dealt_anew(tmp_path, seed):
    rows = days_of(tmp_path, (5, 9, 3, 4), 2**24)
    del rows[3]
    found = []
    for side in SIDES:
        folder, whole = tmp_path / side("types").__name__, tmp_path / f"{side('types').__name__}.whole"
        folder.mkdir(), whole.mkdir()
        side("datasets.criteo").BinaryCriteoUtils.shuffle(
            str(tmp_path),
            str(tmp_path),
            str(folder),
            rows,
            str(whole),
            days=4,
            int_columns=2,
            sparse_columns=3,
            random_seed=seed,
        )
        files = [*sorted(folder.iterdir()), *whole.iterdir()]
        found.append({file.name: np.load(file) for file in files})
    assert list(found[0]) == list(found[1]) and len(found[0]) == 13
    for name, array in found[0].items():
        assert array.dtype == found[1][name].dtype and (array == found[1][name]).all(), name


def test_large_ids_stay_as_they_are(tmp_path):
    """torchrec's go through float32; and rows of the last day, where they are counted, come as zeros."""
    rows = days_of(tmp_path, (6, 6, 100), 2**31 - 1)
    (tmp_path / "out").mkdir()
    shuffle = OURS("datasets.criteo").BinaryCriteoUtils.shuffle
    folders, widths = (
        (str(tmp_path), str(tmp_path), str(tmp_path / "out")),
        {"int_columns": 2, "sparse_columns": 3},
    )
    shuffle(*folders, rows, days=3, **widths)
    given = np.concatenate([np.load(tmp_path / f"day_{day}_sparse.npy") for day in range(2)])
    dealt = np.concatenate([np.load(tmp_path / "out" / f"day_{day}_sparse.npy") for day in range(2)])
    assert sorted(given.tolist()) == sorted(dealt.tolist()) and given.tolist() != dealt.tolist()
    with pytest.raises(
        ValueError, match=r"day_0_dense\.npy has another number of rows than rows_per_day says"
    ):
        shuffle(*folders, {0: 5, 1: 6}, days=3, **widths)
    with pytest.raises(ValueError, match="files of dense rows have 2 columns, not 13"):
        shuffle(*folders, rows, days=3)


def test_casters_of_columns():
    for name in ("criteo", "movielens"):
        ours, theirs = (side(f"datasets.{name}").COLUMN_TYPE_CASTERS for side in SIDES)
        assert [[cast(text) for text in ("7", "x", "")] for cast in ours] == [
            [cast(text) for text in ("7", "x", "")] for cast in theirs
        ]
