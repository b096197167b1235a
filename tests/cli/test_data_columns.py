"""Parquet files and npz archives: the same logs as from CSV, and what is said where they do not fit."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
PLUGIN = pathlib.Path(TESSERA).parent.parent / "lib/libtessera_parquet.so"
pytestmark = pytest.mark.skipif(not PLUGIN.exists(), reason="built without Arrow")

SCHEMA = """
missing = ["", "NA"]
[label]
column = "clicked"
[[dense]]
column = "price"
log1p = true
clip = [0, 1000]
[[dense]]
column = "age"
missing = -1.5
[[dense]]
column = "score"
[[feature]]
column = "user"
rows = 1000
[[feature]]
column = "item"
kind = "integer"
rows = 500
[[feature]]
column = "item"
name = "item_hash"
rows = 77
[[feature]]
column = "tags"
rows = 64
separator = "|"
pooling = "mean"
[[feature]]
column = "colour"
kind = "vocabulary"
values = ["red", "blue"]
[[feature]]
column = "shop"
kind = "integer"
rows = 10
outside = "wrap"
missing = "empty"
"""
COUNT = 20000  # more than two blocks


def run(*words, env=None):
    return subprocess.run(
        [TESSERA, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **(env or {})},
    )


def convert(folder, name, schema="schema.toml", code=0):
    result = run("data", "convert", "--schema", folder / schema, folder / name, "--out", folder / "out.click")
    assert result.returncode == code, result.stdout + result.stderr
    return (folder / "out.click").read_bytes() if code == 0 else result.stderr


@pytest.fixture(scope="module")
def records():
    r = random.Random(3)
    return [
        {
            "clicked": int(r.random() < 0.3),
            "price": round(r.lognormvariate(3, 2), 2),
            "age": None if r.random() < 0.1 else r.randrange(100),
            "score": float(np.float32(r.gauss(0, 1e-3))),
            "user": f"ü-{r.randrange(5000)}" if r.random() < 0.9 else "NA",
            "item": r.randrange(500),
            "tags": r.sample(["a", "b", "c c", "dé"], r.randrange(4)),
            "colour": r.choice(["red", "blue", "green"]),
            "shop": None if r.random() < 0.2 else r.randrange(-5, 100),
            "when": r.randrange(10**9),
        }
        for _ in range(COUNT)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("columns")
    (folder / "schema.toml").write_text(SCHEMA)
    lines = [",".join(records[0])]
    for one in records:
        cells = ["" if v is None else "|".join(v) if isinstance(v, list) else v for v in one.values()]
        lines.append(",".join(map(str, cells)))
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    shutil.copy(folder / "table.csv", folder / "plain.csv")
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    return convert(folder, "plain.csv")


TYPES = {
    "plain": {},
    "small": {
        "clicked": pa.bool_(),
        "age": pa.int8(),
        "score": pa.float32(),
        "user": pa.large_string(),
        "item": pa.uint16(),
        "shop": pa.int32(),
        "colour": pa.dictionary(pa.int8(), pa.string()),
        "tags": pa.large_list(pa.string()),
    },
    # Pandas keeps whole numbers with gaps as floating point.
    "loose": {"clicked": pa.float64(), "age": pa.float64(), "shop": pa.float64(), "user": pa.binary()},
    "wide": {"item": pa.uint64(), "clicked": pa.int8()},
}


def table_of(records, types):
    names = list(records[0])
    arrays = []
    for name in names:
        values = [one[name] for one in records]
        kind = types.get(name)
        if kind == pa.binary():
            values = [value.encode() for value in values]
        if kind == pa.bool_():
            values = [bool(value) for value in values]
        arrays.append(pa.array(values, type=kind))
    arrays[-1] = arrays[-1].cast(pa.timestamp("s"))  # "when", which no key of the schema names
    return pa.table(arrays, names)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    "options", [{}, {"compression": "zstd", "row_group_size": 3001, "use_dictionary": False}]
)
def test_parquet_is_the_same_log(folder, records, plain, types, options):
    pq.write_table(table_of(records, TYPES[types]), folder / "table.parquet", **options)
    assert convert(folder, "table.parquet") == plain


def test_tags_as_texts_and_columns_in_another_order(folder, records, plain):
    joined = [{**one, "tags": "|".join(one["tags"])} for one in records]
    table = table_of(joined, {})
    pq.write_table(table.select(list(reversed(table.column_names))), folder / "table.parquet")
    assert convert(folder, "table.parquet") == plain


@pytest.mark.parametrize("index", [pa.int8(), pa.int32(), pa.int64()])
def test_dictionaries_are_the_same_log(folder, records, plain, index):
    """Of every kind of feature, with values that are missing, that no row has, and anew in every part."""
    texts = [
        {
            **one,
            "tags": "|".join(one["tags"]) or None,
            "item": str(one["item"]),
            "shop": None if one["shop"] is None else str(one["shop"]),
        }
        for one in records
    ]
    names = ["colour", "tags"] if index == pa.int8() else ["user", "item", "tags", "colour", "shop"]
    table = table_of(texts, {name: pa.dictionary(index, pa.string()) for name in names})
    unused = pa.array(["never"]).dictionary_encode()
    place = table.schema.get_field_index("colour")
    colours = pa.chunked_array([table["colour"].chunk(0)]).unify_dictionaries().chunk(0)
    values = pa.concat_arrays([unused.dictionary, colours.dictionary])
    codes = pa.array([code + 1 for code in colours.indices.to_pylist()], index)
    table = table.set_column(place, "colour", pa.DictionaryArray.from_arrays(codes, values))
    pq.write_table(table, folder / "table.parquet", row_group_size=3001)
    assert convert(folder, "table.parquet") == plain


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_the_same_log(folder, records, save):
    """Arrays have no missing values, so the table is one without."""
    whole = [
        {**one, "age": one["age"] or 0, "shop": one["shop"] or 0, "tags": (one["tags"] + ["a", "b"])[:2]}
        for one in records
    ]
    arrays = {name: np.array([one[name] for one in whole]) for name in whole[0]}
    assert arrays["tags"].shape == (COUNT, 2) and arrays["user"].dtype.kind == "U"
    save(folder / "table.npz", **arrays)
    lines = [",".join(whole[0])]
    for one in whole:
        lines.append(",".join("|".join(v) if isinstance(v, list) else str(v) for v in one.values()))
    (folder / "whole.csv").write_text("\n".join(lines) + "\n")
    assert convert(folder, "table.npz") == convert(folder, "whole.csv")


def test_bad_rows_are_named_and_may_be_left_out(folder, records):
    some = [dict(one) for one in records[:9000]]
    some[8500]["price"] = float("inf")
    some[8600]["item"] = 600
    some[8601]["clicked"] = 7
    pq.write_table(table_of(some, {}), folder / "bad.parquet")
    said = convert(folder, "bad.parquet", code=65)
    assert "bad.parquet: row 8501, column 'price': 'inf' is not a finite number." in said
    result = run("data", "check", folder / "bad.parquet", "--schema", folder / "schema.toml", "--json")
    told = json.loads(result.stdout)
    assert (result.returncode, told["samples"], told["bad_lines"]) == (65, 8997, 3)
    assert "row 8601, column 'item': id 600 is not in a table of 500 rows" in told["first_bad"][1]
    result = run(
        "data",
        "convert",
        "--skip-bad",
        "--schema",
        folder / "schema.toml",
        folder / "bad.parquet",
        "--out",
        folder / "left.click",
    )
    assert result.returncode == 0 and "wrote 8997 samples" in result.stdout


def test_what_does_not_fit_is_refused(folder, records, tmp_path):
    table = table_of(records[:10], {})
    pq.write_table(table.drop_columns(["price"]), folder / "bad.parquet")
    assert "there is no column 'price'" in convert(folder, "bad.parquet", code=65)
    (folder / "when.toml").write_text(SCHEMA.replace('column = "score"', 'column = "when"'))
    pq.write_table(table, folder / "bad.parquet")
    assert "column 'when': is a timestamp, neither number nor text" in convert(
        folder, "bad.parquet", "when.toml", code=65
    )
    good = (folder / "bad.parquet").read_bytes()
    (folder / "bad.parquet").write_bytes(good[:-40])
    assert "bad.parquet: cannot be read: " in convert(folder, "bad.parquet", code=65)
    piped = subprocess.run(
        [TESSERA, "data", "convert", "--schema", folder / "schema.toml", "-", "--out", tmp_path / "o.click"],
        input=good,
        capture_output=True,
        timeout=60,
    )
    assert piped.returncode == 65 and b"is a Parquet file, not text" in piped.stderr
    assert b"not from a pipe" in piped.stderr
    pq.write_table(table, folder / "table.parquet")
    result = run("data", "schema", folder / "table.parquet", env={"TESSERA_PARQUET": "/nowhere.so"})
    assert result.returncode == 65 and "Parquet needs Arrow" in result.stderr


@pytest.mark.parametrize(
    ("name", "make", "says"),
    [
        ("objects", lambda f: np.savez(f, a=np.array([{}, 1], dtype=object)), "holds Python objects"),
        (
            "lengths",
            lambda f: np.savez(f, a=np.arange(3), b=np.arange(4)),
            "array 'b' has 4 rows, array 'a' 3",
        ),
        ("cube", lambda f: np.savez(f, a=np.zeros((2, 2, 2))), "a column has one dimension, or two"),
        ("order", lambda f: np.savez(f, a=np.arange(3, dtype=">i4")), "whose bytes are in another order"),
        ("structures", lambda f: np.savez(f, a=np.zeros(3, dtype=[("x", "i4")])), "array of structures"),
        ("array", lambda f: f.write_bytes(b"\x93NUMPY\x01\x00"), "is a NumPy array, not text"),
        ("zip", lambda f: zipped(f), "is a zip archive without NumPy arrays"),
    ],
)
def test_archives_that_are_no_table(tmp_path, name, make, says):
    path = tmp_path / f"{name}.npz"
    make(path)
    result = run("data", "schema", path)
    assert result.returncode == 65 and says in result.stderr, result.stderr


def zipped(path):
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no arrays")


def test_damage_of_an_archive_is_found(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, clicked=np.arange(5000) % 2, item=np.arange(5000))
    good = path.read_bytes()
    for place in range(0, len(good), 97):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0x55]) + good[place + 1 :])
        result = run("data", "schema", path)
        assert result.returncode in (0, 65), (place, result.stderr)
    path.write_bytes(good[: len(good) // 2])
    assert "is cut short" in run("data", "schema", path).stderr


def test_a_schema_is_guessed(folder, records):
    pq.write_table(table_of(records, {}), folder / "table.parquet")
    guessed = run("data", "schema", folder / "table.parquet").stdout
    assert '# Left out, because it is a timestamp: "when"' in guessed
    assert "format" not in guessed.split("[label]")[0].replace("docs", "")
    (folder / "guessed.toml").write_text(guessed)
    convert(folder, "table.parquet", "guessed.toml")


SMALL = [
    "--dim",
    "4",
    "--bottom",
    "8,4",
    "--top",
    "8,1",
    "--batch",
    "64",
    "--steps",
    "20",
    "--eval-every",
    "10",
]


def test_training_and_prediction_read_tables_themselves(folder, records, tmp_path):
    """From CSV, Parquet and a log: the same model, bit for bit, and the same scores."""
    pq.write_table(table_of(records[:3000], {}), tmp_path / "table.parquet")
    lines = (folder / "plain.csv").read_text().splitlines()
    for part in range(3):
        text = "\n".join([lines[0], *lines[1 + 1000 * part : 1001 + 1000 * part]])
        (tmp_path / f"part-{part}.csv").write_text(text + "\n")
    shutil.copy(folder / "schema.toml", tmp_path / "s.toml")
    made = run(
        "data",
        "convert",
        "--schema",
        tmp_path / "s.toml",
        tmp_path / "table.parquet",
        "--out",
        tmp_path / "t.click",
    )
    assert made.returncode == 0, made.stderr
    env = {"TESSERA_CACHE": str(tmp_path / "cache")}
    prints = []
    for name in ("table.parquet", "part-*.csv", "t.click"):
        words = ["--data", tmp_path / name, "--json", "--save", tmp_path / f"run-{len(prints)}"]
        if not name.endswith("click"):
            words += ["--schema", tmp_path / "s.toml"]
        result = run("train", "dlrm", *SMALL, *words, env=env)
        assert result.returncode == 0, result.stderr
        assert ("converted 3000 samples" in result.stderr) == (not name.endswith("click"))
        prints.append(json.loads(result.stdout)["fingerprint"])
    assert len(set(prints)) == 1
    again = run("train", "dlrm", "--resume", tmp_path / "run-0", "--steps", "25", env=env)
    assert again.returncode == 0 and "converted" not in again.stderr, again.stderr
    # Names with commas between them are the same table; what is judged on may be several files too.
    names = ",".join(str(tmp_path / f"part-{part}.csv") for part in range(3))
    words = ["--schema", tmp_path / "s.toml", "--json", "--save", tmp_path / "listed"]
    listed = run("train", "dlrm", *SMALL, "--data", names, *words, env=env)
    assert listed.returncode == 0 and "converted" not in listed.stderr, listed.stderr
    assert json.loads(listed.stdout)["fingerprint"] == prints[0]
    words = [*words[:3], "--save", tmp_path / "judged", "--eval-data", tmp_path / "part-[12].csv"]
    judged = run("train", "dlrm", *SMALL, "--data", tmp_path / "part-0.csv", *words, env=env)
    assert judged.returncode == 0 and "converted 2000 samples" in judged.stderr, judged.stderr
    assert json.loads(judged.stdout)["samples"] == 2000
    head = json.loads((tmp_path / "judged/metrics.jsonl").read_text().splitlines()[0])
    assert [one["path"][-10:] for one in head["data"]] == ["part-0.csv", "part-1.csv", "part-2.csv"]
    missing = run("train", "dlrm", *SMALL, "--data", f"{names},{tmp_path}/none.csv", *words[:3], env=env)
    assert missing.returncode == 65
    assert f"{tmp_path}/none.csv: cannot be opened: No such file or directory." in missing.stderr
    pq.write_table(table_of(records[:3000], {}).drop_columns(["clicked"]), tmp_path / "bare.parquet")
    scores = {}
    for name, out in (("bare.parquet", "a.parquet"), ("t.click", "b.csv"), ("part-*.csv", "c.parquet")):
        result = run(
            "predict", tmp_path / "run-1", "--data", tmp_path / name, "--out", tmp_path / out, env=env
        )
        assert result.returncode == 0, result.stderr
        scores[out] = tmp_path / out
    table = pq.read_table(scores["a.parquet"])
    assert table.schema == pa.schema(
        [pa.field("sample", pa.int64()), pa.field("probability", pa.float32())]
    ) or table.column_names == ["sample", "probability"]
    assert table["sample"].to_pylist() == list(range(3000))
    assert table.equals(pq.read_table(scores["c.parquet"]))
    text = np.loadtxt(scores["b.csv"], delimiter=",", skiprows=1, dtype=np.float32)[:, 1]
    assert (text == table["probability"].to_numpy()).all()
    evaluated = run("eval", tmp_path / "run-1", "--data", tmp_path / "bare.parquet", env=env)
    assert evaluated.returncode == 65 and "there is no column 'clicked'" in evaluated.stderr
    result = run("train", "dlrm", "--data", tmp_path / "table.parquet", *SMALL, "--runs", tmp_path, env=env)
    assert result.returncode == 65 and "is a Parquet file, not text: it is read by a schema" in result.stderr


def piped(text, *words, env):
    return subprocess.run(
        [TESSERA, "train", "dlrm", *map(str, words)],
        input=text,
        capture_output=True,
        timeout=100,
        env={**os.environ, **env},
    )


def test_training_reads_standard_input(folder, records, tmp_path):
    """The same model as from the log, also packed; the run knows a log, which it goes on with."""
    text = "".join((folder / "plain.csv").read_text().splitlines(keepends=True)[:3001])
    (tmp_path / "t.csv").write_text(text)
    schema = ["--schema", folder / "schema.toml"]
    made = run("data", "convert", *schema, tmp_path / "t.csv", "--out", tmp_path / "t.click")
    assert made.returncode == 0, made.stderr
    log = run("train", "dlrm", *SMALL, "--data", tmp_path / "t.click", "--json", "--save", tmp_path / "log")
    wanted = json.loads(log.stdout)["fingerprint"]
    env = {"TESSERA_CACHE": str(tmp_path / "cache")}
    flags = [*SMALL, *schema, "--json", "--shuffle", "--ranks", 2]
    told = run("train", "dlrm", *flags, "--data", tmp_path / "t.click", "--save", tmp_path / "shuffled")
    (tmp_path / "run.toml").write_text('data = "-"\n')
    tries = {
        "plain": (text.encode(), [*SMALL, *schema, "--data", "-", "--json"], wanted),
        "gzip": (gzip.compress(text.encode()), [*SMALL, *schema, "--data=-", "--json"], wanted),
        "config": (text.encode(), [*SMALL, *schema, "--config", tmp_path / "run.toml", "--json"], wanted),
        "ranks": (text.encode(), ["--data", "-", *flags], json.loads(told.stdout)["fingerprint"]),
    }
    for name, (given, words, fingerprint) in tries.items():
        result = piped(given, *words, "--save", tmp_path / name, env=env)
        assert result.returncode == 0, result.stderr
        assert b"converted 3000 samples of standard input" in result.stderr, name
        assert json.loads(result.stdout)["fingerprint"] == fingerprint, name
        (kept,) = (tmp_path / "cache").iterdir()  # the same table is one log
        assert f'data="{kept}"' in (tmp_path / name / "config.toml").read_text()
    assert kept.read_bytes() == (tmp_path / "t.click").read_bytes()
    wanted = run("train", "dlrm", "--resume", tmp_path / "log", "--steps", 25, "--json")
    again = run("train", "dlrm", "--resume", tmp_path / "plain", "--steps", 25, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["fingerprint"] == json.loads(wanted.stdout)["fingerprint"]
    assert run("eval", tmp_path / "plain", "--json").returncode == 0
    # Another table is another log, and the first one stays.
    other = "".join(text.splitlines(keepends=True)[:2001]).encode()
    result = piped(other, *SMALL, *schema, "--data", "-", "--save", tmp_path / "other", env=env)
    assert result.returncode == 0 and len(list((tmp_path / "cache").iterdir())) == 2, result.stderr


def test_standard_input_that_is_no_table_is_refused(folder, records, tmp_path):
    pq.write_table(table_of(records[:10], {}), tmp_path / "table.parquet")
    head = (folder / "plain.csv").read_bytes().splitlines(keepends=True)
    env = {"TESSERA_CACHE": str(tmp_path / "cache")}
    words = [*SMALL, "--data", "-", "--runs", tmp_path / "runs"]
    schema = ["--schema", folder / "schema.toml"]
    tries = [
        (b"", schema, 65, "standard input: is empty."),
        (head[0], schema, 65, "standard input: there is no sample in it."),
        (head[0] + b"7" + head[1][1:], schema, 65, "standard input: line 2, column 'clicked'"),
        ((tmp_path / "table.parquet").read_bytes(), schema, 65, "is a Parquet file, not text"),
        (b"".join(head), [], 78, "--data - needs --schema"),
        (b"".join(head), [*schema, "--follow"], 78, "--follow is for --ids unlimited"),
        (b"".join(head), [*schema, "--eval-data", "-"], 65, "there is no file -"),
        (
            b"".join(head),
            [*schema, "--nnodes", 2, "--rdzv-endpoint", "localhost:1", "--insecure-no-auth"],
            78,
            "--data - is for one host",
        ),
    ]
    for given, more, code, says in tries:
        result = piped(given, *words, *more, env=env)
        assert result.returncode == code and says in result.stderr.decode(), result.stderr
        left = list((tmp_path / "cache").iterdir()) if (tmp_path / "cache").exists() else []
        assert left == [] and not (tmp_path / "runs").exists(), says
        if code == 65 and not more[2:]:
            assert (
                f"tessera data check - --schema {folder}/schema.toml names what is bad"
                in result.stderr.decode()
            )


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
