"""tessera.data: logs written from Python are those of the command line, and are read back."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess

import pytest
import torch
from tessera.data import ClickFile, ClickWriter, DataError, Feature, convert

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
FEATURES = [Feature("user", 1000), Feature("pair", 50, bag_size=2), Feature("tags", 20, 0, "mean")]


def samples(count, seed=1):
    numbers = random.Random(seed)
    tags = [[numbers.randrange(20) for _ in range(numbers.randrange(4))] for _ in range(count)]
    return {
        "labels": [numbers.randrange(2) for _ in range(count)],
        "dense": [[numbers.gauss(0, 1), float(i)] for i in range(count)],
        "ids": {
            "user": [numbers.randrange(1000) for _ in range(count)],
            "pair": torch.randint(0, 50, (count, 2), generator=torch.Generator().manual_seed(seed)),
            "tags": tags,
        },
    }


@pytest.mark.parametrize("count", [1, 3, 70000])
def test_what_is_written_is_read_back(tmp_path, count):
    path = tmp_path / "a.click"
    all_samples = samples(count)
    with ClickWriter(path, FEATURES, dense=["x", "y"]) as writer:
        writer.append(**all_samples)
        assert not path.exists()
    log = ClickFile(path)
    log.verify()
    assert (len(log), log.features, log.dense_names) == (count, FEATURES, ["x", "y"])
    batch = log[:]
    assert batch.labels.tolist() == all_samples["labels"]
    assert torch.equal(batch.dense, torch.tensor(all_samples["dense"], dtype=torch.float32))
    assert torch.equal(batch.ids["pair"].view(-1, 2), all_samples["ids"]["pair"])
    tags = [part.tolist() for part in batch.ids["tags"].split(batch.lengths["tags"].tolist())]
    assert tags == all_samples["ids"]["tags"]
    assert log[count - 1 :].ids["user"].tolist() == all_samples["ids"]["user"][-1:]
    assert log[5:5].labels.numel() == 0
    result = subprocess.run([TESSERA, "data", "check", path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_a_log_without_samples_is_not_finished(tmp_path):
    path = tmp_path / "a.click"
    empty = {"user": [], "pair": torch.empty(0, 2, dtype=torch.int64), "tags": []}
    says = r"a\.click: there is no sample in it; append some before finish"
    with pytest.raises(DataError, match=says), ClickWriter(path, FEATURES, dense=2) as writer:
        writer.append([], empty, [])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="the log is finished"):
        writer.append(**samples(1))
    path.write_bytes(b"good")
    writer = ClickWriter(path, FEATURES, dense=2)
    with pytest.raises(DataError, match="there is no sample in it"):
        writer.finish()
    assert path.read_bytes() == b"good"
    writer.append(**samples(3))
    writer.finish()
    assert len(ClickFile(path)) == 3


def test_parts_and_other_forms_of_bags_are_the_same_bytes(tmp_path):
    whole = samples(100)
    with ClickWriter(tmp_path / "a.click", FEATURES, dense=2) as writer:
        writer.append(**whole)
    tags = whole["ids"]["tags"]
    with ClickWriter(tmp_path / "b.click", FEATURES, dense=2) as writer:
        for begin, end in ((0, 1), (1, 1), (1, 60), (60, 100)):
            part = tags[begin:end]
            writer.append(
                torch.tensor(whole["labels"][begin:end]),
                {
                    "tags": ([i for bag in part for i in bag], [len(bag) for bag in part]),
                    "pair": whole["ids"]["pair"][begin:end].tolist(),
                    "user": torch.tensor(whole["ids"]["user"][begin:end], dtype=torch.int32),
                },
                torch.tensor(whole["dense"][begin:end]).reshape(-1, 2),
            )
    assert (tmp_path / "a.click").read_bytes() == (tmp_path / "b.click").read_bytes()


def test_mistakes_are_named_and_leave_nothing_behind(tmp_path):
    path = tmp_path / "a.click"
    good = samples(2)

    def fails(kind, says, **changes):
        with pytest.raises(kind, match=says), ClickWriter(path, FEATURES, dense=2) as writer:
            writer.append(**{**good, **changes})
        assert list(tmp_path.iterdir()) == []

    fails(
        DataError, "feature 'user' has id 1000, its table 1000 rows", ids={**good["ids"], "user": [1, 1000]}
    )
    fails(DataError, "feature 'pair' has a bag of 1 ids", ids={**good["ids"], "pair": [1, 2]})
    fails(DataError, "is neither 0 nor 1", labels=[0, 2])
    fails(DataError, "is not finite", dense=[[0, 1], [float("nan"), 1]])
    fails(ValueError, "dense has shape .2, 1.; 2 samples of 2 numbers", dense=[[0], [1]])
    fails(ValueError, "ids are of .'user'.", ids={"user": [1, 2]})
    fails(ValueError, "'tags' has 1 bags; there are 2 labels", ids={**good["ids"], "tags": [[1]]})
    with pytest.raises(DataError, match="cannot be made"):
        ClickWriter(tmp_path / "no/a.click", FEATURES)
    with pytest.raises(ValueError, match="pooling is 'sum' or 'mean'"):
        Feature("a", 1, pooling="max")
    with pytest.raises(DataError, match="cannot be"):
        ClickFile(path)
    path.write_bytes(b"no log at all, whatever its name may say about it")
    with pytest.raises(DataError, match=r"a\.click"):
        ClickFile(path)


SCHEMA = """
[label]
column = "clicked"
[[dense]]
column = "price"
[[feature]]
column = "user"
rows = 100
[[feature]]
column = "tags"
rows = 50
separator = "|"
"""


def test_a_table_in_memory_is_converted_as_its_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table(
        {
            "clicked": [1, 0, 1],
            "price": [2.5, None, 7.0],
            "user": ["ann", "bob", None],
            "tags": [["a", "b"], [], None],
        }
    )
    (tmp_path / "t.csv").write_text("clicked,price,user,tags\n1,2.5,ann,a|b\n0,,bob,\n1,7.0,,\n")
    (tmp_path / "s.toml").write_text(SCHEMA)
    words = [TESSERA, "data", "convert", "--schema", tmp_path / "s.toml", tmp_path / "t.csv"]
    subprocess.run([*words, "--out", tmp_path / "a.click"], check=True, capture_output=True, timeout=60)
    for schema in (SCHEMA, tmp_path / "s.toml"):
        for part in (table, table.to_reader(max_chunksize=1), pa.concat_tables([table, table])[2:5]):
            report = convert(part, schema, tmp_path / "b.click")
            assert (report.records, report.samples, report.bad) == (3, 3, 0)
    convert(table, SCHEMA, tmp_path / "b.click")
    assert (tmp_path / "a.click").read_bytes() == (tmp_path / "b.click").read_bytes()
    bad = table.set_column(1, "price", pa.array([1.0, float("inf"), 2.0]))
    with pytest.raises(DataError, match="the table: row 2, column 'price': 'inf' is not a finite number"):
        convert(bad, SCHEMA, tmp_path / "c.click")
    assert not (tmp_path / "c.click").exists()
    report = convert(bad, SCHEMA, tmp_path / "c.click", skip_bad=True)
    assert (report.records, report.samples, report.bad) == (3, 2, 1)
    with pytest.raises(DataError, match="there is no column 'price'"):
        convert(table.drop_columns(["price"]), SCHEMA, tmp_path / "d.click")
    with pytest.raises(TypeError, match="list has no __arrow_c_stream__"):
        convert([], SCHEMA, tmp_path / "d.click")
    (tmp_path / "link").symlink_to("s.toml")
    with pytest.raises(DataError, match="link: is read and cannot be written too"):
        convert(table, tmp_path / "s.toml", tmp_path / "link")
    assert (tmp_path / "s.toml").read_text() == SCHEMA
