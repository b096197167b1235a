"""`tessera data`: text and binary click logs, good and broken."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import time
from contextlib import suppress

import numpy as np
import pytest
from full_disk import full_disk

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def data(*words):
    return subprocess.run([TESSERA, "data", *map(str, words)], capture_output=True, text=True, timeout=60)


def answer(*words):
    result = data(*words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "clicks.tsv"
    made = answer("synth", path, "--format", "text", "--samples", 3000)
    assert made["samples"] == 3000
    assert 0.75 < made["ceiling"]["auc"] < 0.9
    return path


def test_text_and_binary_are_the_same_log(text, tmp_path):
    converted = tmp_path / "converted.click"
    told = answer("convert", text, "--to", converted)
    assert (told["samples"], told["bad_lines"]) == (3000, 0)
    direct = tmp_path / "direct.click"
    answer("synth", direct, "--samples", 3000)
    assert converted.read_bytes() == direct.read_bytes()


def test_show(text, tmp_path):
    path = tmp_path / "a.click"
    rows = ",".join(str(10 * (i + 1)) for i in range(26))
    answer("convert", text, "--to", path, "--rows", rows, "--half")
    told = answer("show", path)
    assert (told["samples"], told["dense"], told["dense_bits"], told["version"]) == (3000, 13, 16, 1)
    assert told["features"][25] == {"name": "cat_25", "rows": 260, "bag_size": 1}
    lines = data("show", path).stdout.splitlines()
    assert lines[0].startswith("samples  3000 in 1 blocks")
    assert lines[1] == "dense    13 numbers of 16 bits"
    assert len(lines) == 28


def test_bad_lines_are_left_out_and_named(text, tmp_path):
    lines = text.read_text().splitlines()
    lines[4] = "rubbish"
    lines[10] = "7" + lines[10][1:]
    broken = tmp_path / "broken.tsv"
    broken.write_text("\n".join(lines) + "\n")
    path = tmp_path / "a.click"
    told = answer("convert", broken, "--to", path)
    assert (told["lines"], told["samples"], told["bad_lines"]) == (3000, 2998, 2)
    assert told["first_bad"] == [
        {"line": 5, "reason": "has 1 fields; 40 are needed"},
        {"line": 11, "reason": "label is '7', not 0 or 1"},
    ]
    said = data("convert", broken, "--to", path).stdout
    assert "left out 2 bad lines\n  line 5 has 1 fields; 40 are needed\n" in said
    assert data("check", broken).returncode == 65
    assert data("check", text).returncode == 0


def test_criteos_text_comes_in_several_files(text, tmp_path):
    answer("convert", text, "--to", tmp_path / "whole.click")
    whole = (tmp_path / "whole.click").read_bytes()
    lines = text.read_bytes().splitlines(keepends=True)
    parts = [tmp_path / name for name in ("c0.tsv", "c1.tsv.gz", "c2.tsv")]
    parts[0].write_bytes(b"".join(lines[:1000]))
    parts[1].write_bytes(gzip.compress(b"".join(lines[1000:1700])))
    parts[2].write_bytes(b"".join(lines[1700:]).rstrip(b"\n"))
    for names in (parts, [tmp_path / "c*"], [parts[0], tmp_path / "c[12].*"]):
        told = answer("convert", *names, "--to", tmp_path / "parts.click")
        assert (told["lines"], told["samples"], told["bad_lines"]) == (3000, 3000, 0)
        assert (tmp_path / "parts.click").read_bytes() == whole
        (tmp_path / "parts.click").unlink()
        assert answer("check", *names)["samples"] == 3000
    # What is bad is named by its file, five of all.
    for part, number in ((parts[0], 7), (parts[2], 3)):
        broken = part.read_bytes().splitlines()
        broken[number - 1] = b"rubbish"
        part.write_bytes(b"\n".join(broken) + b"\n")
    told = answer("convert", *parts, "--to", tmp_path / "parts.click")
    assert (told["samples"], told["bad_lines"]) == (2998, 2)
    reason = "has 1 fields; 40 are needed"
    assert told["first_bad"] == [
        {"line": 7, "reason": reason, "file": str(parts[0])},
        {"line": 3, "reason": reason, "file": str(parts[2])},
    ]
    said = data("check", *parts)
    assert said.returncode == 65
    assert f"  {parts[0]}: line 7 {reason}\n  {parts[2]}: line 3 {reason}\n" in said.stdout
    failed = data("convert", *parts, "--to", tmp_path / "strict.click", "--strict")
    assert failed.returncode == 65 and f"{parts[0]}: line 7 {reason}." in failed.stderr
    assert not (tmp_path / "strict.click").exists()


def test_several_files_that_are_not_criteos_text_are_refused(text, tmp_path):
    (tmp_path / "a.csv").write_text(TABLE)
    (tmp_path / "b.csv").write_text(TABLE)
    out = tmp_path / "out.click"
    failed = data("convert", tmp_path / "a.csv", tmp_path / "b.csv", "--to", out)
    assert failed.returncode == 65
    says = f"{tmp_path}/a.csv and the others: hold no sample in Criteo's format: {tmp_path}/a.csv: line 1 has"
    assert says in failed.stderr
    failed = data("convert", text, tmp_path / "none.tsv", "--to", out)
    assert failed.returncode == 65 and "none.tsv: cannot be opened: No such file" in failed.stderr
    failed = data("convert", tmp_path / "day_*.tsv", "--to", out)
    assert failed.returncode == 65 and "day_*.tsv: no file has such a name." in failed.stderr
    assert not out.exists()
    copy = tmp_path / "copy.tsv"
    shutil.copy(text, copy)
    failed = data("convert", text, tmp_path / "copy*", "--to", copy)
    assert failed.returncode == 65 and "is read and cannot be written too" in failed.stderr
    assert copy.read_bytes() == text.read_bytes()
    answer("convert", text, "--to", out)
    failed = data("check", text, out)
    assert failed.returncode == 2
    assert f"data: check reads one click log at a time, and {out} is one" in failed.stderr


def test_criteos_text_comes_through_standard_input(text, tmp_path):
    answer("convert", text, "--to", tmp_path / "whole.click")
    whole = (tmp_path / "whole.click").read_bytes()

    def piped(given, *words):
        command = [TESSERA, "data", *map(str, words)]
        return subprocess.run(command, input=given, capture_output=True, timeout=60)

    plain = text.read_bytes()
    for given in (plain, gzip.compress(plain), zstd(plain)):
        if given is None:
            continue
        result = piped(given, "convert", "-", "--to", tmp_path / "piped.click", "--json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["samples"] == 3000
        assert (tmp_path / "piped.click").read_bytes() == whole
        (tmp_path / "piped.click").unlink()
        assert piped(given, "check", "-").returncode == 0
    with open(text, "rb") as file:  # no pipe
        words = [TESSERA, "data", "convert", "-", "--to", str(tmp_path / "file.click")]
        subprocess.run(words, stdin=file, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "file.click").read_bytes() == whole
    # A pipe by its path loses nothing to who asks what it holds.
    script = f"{TESSERA} data check <(cat {text})"
    subprocess.run(["bash", "-c", script], check=True, capture_output=True, timeout=60)
    says = {
        b"": b"standard input: holds no sample in Criteo's format. For columns of your own: tessera data"
        b" schema -, then",
        TABLE.encode(): b"standard input: holds no sample in Criteo's format: line 1 has 1 fields",
        whole: b"standard input: is a click log already, not text",
    }
    for given, words in says.items():
        failed = piped(given, "convert", "-", "--to", tmp_path / "none.click")
        assert failed.returncode == 65 and words in failed.stderr, failed.stderr
        assert not (tmp_path / "none.click").exists()
    bad = b"rubbish\n" + plain
    told = piped(bad, "convert", "-", "--to", tmp_path / "bad.click", "--strict")
    assert told.returncode == 65
    assert b"standard input: line 1 has 1 fields; 40 are needed." in told.stderr


def test_the_error_of_a_pipe_is_told_while_the_pipe_is_silent(text, tmp_path):
    words = [TESSERA, "data", "convert", "-", "--to", str(tmp_path / "a.click"), "--strict"]
    lines = text.read_bytes()
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(words, **pipes) as process:
        with suppress(BrokenPipeError):  # told already
            # Two blocks of 4 MiB; then nothing, and nobody closes it.
            process.stdin.write(b"rubbish\n" + lines * ((9 << 20) // len(lines) + 1))
        assert process.wait(timeout=60) == 65
        assert b"standard input: line 1 has 1 fields" in process.stderr.read()


def test_strict_leaves_nothing_behind(text, tmp_path):
    broken = tmp_path / "broken.tsv"
    broken.write_text(text.read_text() + "rubbish\n")
    result = data("convert", broken, "--to", tmp_path / "a.click", "--strict")
    assert result.returncode == 65
    assert f"{broken}: line 3001 has 1 fields; 40 are needed." in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["broken.tsv"]


def test_damage_is_found(text, tmp_path):
    path = tmp_path / "a.click"
    answer("convert", text, "--to", path)
    assert answer("check", path)["good"]
    whole = bytearray(path.read_bytes())
    whole[1000] ^= 1
    path.write_bytes(whole)
    assert data("show", path).returncode == 0
    result = data("check", path)
    assert result.returncode == 65
    assert f"{path}: block 0 (samples from 0) is damaged: its sum is wrong." in result.stderr
    path.write_bytes(whole[:-5])
    result = data("show", path)
    assert result.returncode == 65
    assert "It is cut short or something was added." in result.stderr


def test_other_shapes_can_be_made(tmp_path):
    path = tmp_path / "a.click"
    words = ("--samples", 500, "--features", 3, "--bag", 0, "--rows", 50, "--zipf", 0.5, "--seed", 9)
    answer("synth", path, *words)
    told = answer("show", path)
    assert [f["bag_size"] for f in told["features"]] == [0, 0, 0]
    assert answer("check", path)["samples"] == 500
    result = data("synth", path, "--format", "text", "--features", 3)
    assert result.returncode == 65
    assert "only 13 numbers and 26 bags of 1 id can be written as lines" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "data: say what to do"),
        (("shwo", "a"), "data: there is no 'shwo': did you mean show?"),
        (("show",), "data: name a file"),
        (("show", "a", "b"), "data: name one file"),
        (("convert", "a"), "data: convert needs --out PATH"),
        (("convert", "a", "--to", "b", "--rows", "1,x"), "data: --rows is a number of rows or a list"),
        (("convert", "a", "--to", "b", "--rows", "1,2"), "data: --rows lists 2 tables, there are 26"),
        (("synth", "a", "--format", "csv"), "data: --format is binary or text, not 'csv'"),
        (("synth", "a", "--samples", "0"), "data: --samples is 1 or more"),
        (("synth", "a", "--features", "0"), "data: --features is 1 or more"),
        (("show", "a", "--sed", "1"), "data: unknown flag --sed: did you mean --seed?"),
    ],
)
def test_wrong_usage(words, message):
    result = data(*words)
    assert result.returncode == 2
    assert message in result.stderr


def test_missing_files(tmp_path):
    for verb in ("show", "check"):
        result = data(verb, tmp_path / "none")
        assert result.returncode == 65
        assert "none: cannot be opened: No such file or directory." in result.stderr


def test_help_fits_a_screen():
    result = data("--help")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) <= 35
    assert max(map(len, result.stdout.splitlines())) <= 80


# ---- Tables of one's own

TABLE = "clicked,user,item,price,tags\n1,ann,3,2.5,a|b\n0,bob,4,,\n1,ann,5,7,c\n"
SCHEMA = """
[label]
column = "clicked"
[[dense]]
column = "price"
[[feature]]
column = "user"
rows = 100
[[feature]]
column = "item"
kind = "integer"
rows = 10
[[feature]]
column = "tags"
rows = 50
separator = "|"
"""


@pytest.fixture
def table(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


def test_packed_piped_and_several_files_are_the_same_log(table):
    schema = table / "schema.toml"
    told = answer("convert", "--schema", schema, table / "table.csv", "--out", table / "plain.click")
    assert (told["samples"], told["bad_lines"]) == (3, 0)
    plain = (table / "plain.click").read_bytes()
    for name, packed in (("gzip", gzip.compress(TABLE.encode())), ("zstd", zstd(TABLE.encode()))):
        if packed is None:
            continue
        (table / f"packed.{name}").write_bytes(packed)
        answer("convert", "--schema", schema, table / f"packed.{name}", "--out", table / "packed.click")
        assert (table / "packed.click").read_bytes() == plain, name
        (table / f"short.{name}").write_bytes(packed[: len(packed) - 6])
        failed = data("convert", "--schema", schema, table / f"short.{name}", "--out", table / "packed.click")
        assert failed.returncode == 65 and "is cut short" in failed.stderr, name
    command = [TESSERA, "data", "convert", "--schema", schema, "-", "--out", table / "piped.click"]
    subprocess.run(command, input=TABLE.encode(), check=True, timeout=60, capture_output=True)
    assert (table / "piped.click").read_bytes() == plain
    lines = TABLE.splitlines()
    for i, line in enumerate(lines[1:]):
        (table / f"part-{i}.csv").write_text(f"{lines[0]}\n{line}\n")
    answer("convert", "--schema", schema, table / "part-*.csv", "--out", table / "parts.click")
    assert (table / "parts.click").read_bytes() == plain
    told = answer("show", table / "plain.click")
    assert [feature["bag_size"] for feature in told["features"]] == [1, 1, 0]
    assert told["dense_names"] == ["price"] and 'column = "tags"' in told["schema"]


def zstd(text):
    program = shutil.which("zstd")
    if program is None:
        return None
    return subprocess.run([program, "-c"], input=text, check=True, capture_output=True).stdout


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("clicks.parquet", b"PAR1\x15\x04\x15\x10" + bytes(100), "is a Parquet file, not text"),
        ("clicks.csv", TABLE.encode(), "holds no sample in Criteo's format: line 1 has 1 fields"),
        ("clicks.tsv", b"", "holds no sample"),
        ("clicks.npz", b"PK\x03\x04", "is a zip or npz archive"),
        ("clicks.tsv", gzip.compress(b"1\t2\n"), "holds no sample in Criteo's format: line 1 has 2 fields"),
        ("clicks.gz", gzip.compress(b"PAR1" + bytes(100)), "(unpacked): is a Parquet file, not text"),
        ("clicks.tsv", b"BZh91AY&SY", "is bzip2, not text"),
    ],
)
def test_what_is_not_criteo_is_refused_and_a_good_file_stays(text, tmp_path, name, content, says):
    good = tmp_path / "good.click"
    answer("convert", text, "--to", good)
    before = good.read_bytes()
    (tmp_path / name).write_bytes(content)
    failed = data("convert", tmp_path / name, "--to", good)
    assert failed.returncode == 65 and says in failed.stderr, failed.stdout + failed.stderr
    assert good.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"good.click", name})
    runs = ["--runs", tmp_path / "runs"]
    command = [TESSERA, "train", "dlrm", "--data", tmp_path / name, "--steps", 1, *runs]
    trained = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert trained.returncode == 65 and says in trained.stderr, trained.stdout + trained.stderr


def test_criteos_text_is_read_packed(text, tmp_path):
    plain = answer("convert", text, "--to", tmp_path / "plain.click")
    stats = answer("stats", text)
    for name, packed in (("gzip", gzip.compress(text.read_bytes())), ("zstd", zstd(text.read_bytes()))):
        if packed is None:
            continue
        (tmp_path / name).write_bytes(packed)
        told = answer("convert", tmp_path / name, "--to", tmp_path / "packed.click")
        assert (told["samples"], told["bytes"]) == (plain["samples"], plain["bytes"])
        assert (tmp_path / "packed.click").read_bytes() == (tmp_path / "plain.click").read_bytes()
        assert data("check", tmp_path / name).returncode == 0
        assert answer("stats", tmp_path / name) == stats
        (tmp_path / "short").write_bytes(packed[: len(packed) // 2])
        failed = data("convert", tmp_path / "short", "--to", tmp_path / "packed.click")
        assert failed.returncode == 65 and "is cut short" in failed.stderr
        # Each rank unpacks it for itself.
        small = [
            "--dim",
            "8",
            "--bottom",
            "16,8",
            "--top",
            "16,1",
            "--batch",
            "32",
            "--steps",
            "3",
            "--ranks",
            "2",
        ]
        prints = [
            json.loads(
                subprocess.run(
                    [TESSERA, "train", "dlrm", *small, "--data", log, "--runs", tmp_path, "--json"],
                    check=True,
                    capture_output=True,
                    timeout=120,
                ).stdout
            )["fingerprint"]
            for log in (text, tmp_path / name)
        ]
        assert prints[0] == prints[1]


def test_criteos_text_is_known_through_its_packing(text, tmp_path):
    """Also where the data need no schema, because ids of any size are taken."""
    head = b"".join(text.read_bytes().splitlines(keepends=True)[:300])
    logs = {"plain": head, "gzip": gzip.compress(head), "zstd": zstd(head)}
    small = ["--dim", "8", "--bottom", "16,8", "--top", "16,1", "--batch", "32", "--steps", "3"]
    told = {}
    for name, content in logs.items():
        if content is None:
            continue
        (tmp_path / name).write_bytes(content)
        words = ["--ids", "unlimited", "--data", name, "--runs", "runs", "--json"]
        done = subprocess.run(
            [TESSERA, "train", "dlrm", *small, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, name + done.stdout + done.stderr
        answered = json.loads(done.stdout)
        told[name] = (answered["ids"], answered["fingerprint"])
    assert len(told) > 1 and len(set(told.values())) == 1 and told["plain"][0] > 26


def test_a_file_is_not_read_and_written_at_once(table):
    for path in (table / "table.csv", table / "link.csv"):
        if path.name == "link.csv":
            path.symlink_to("table.csv")
        failed = data("convert", "--schema", table / "schema.toml", path, "--out", table / "table.csv")
        assert failed.returncode == 65 and "is read and cannot be written too" in failed.stderr
    failed = data("schema", table / "table.csv", "--out", table / "table.csv")
    assert failed.returncode == 65
    assert (table / "table.csv").read_text() == TABLE


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """The same records as CSV, TSV, JSON lines and npz, which has neither gaps nor lists of any length."""
    folder = tmp_path_factory.mktemp("kinds")
    draw = random.Random(5)
    records = [
        {
            "clicked": int(draw.random() < 0.3),
            "user": f"u, {draw.randrange(20)}",
            "item": draw.randrange(10),
            "price": round(draw.uniform(0, 9), 2),
            "tags": draw.sample(["new", "sale", "ré d", "used"], 2),
        }
        for _ in range(400)
    ]
    cells = [["|".join(v) if isinstance(v, list) else str(v) for v in one.values()] for one in records]
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([records[0], *cells])
    (folder / "table.tsv").write_text("".join("\t".join(one) + "\n" for one in [records[0], *cells]))
    (folder / "table.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    np.savez(folder / "table.npz", **{name: np.array([one[name] for one in records]) for name in records[0]})
    (folder / "schema.toml").write_text(SCHEMA)
    for name in ("tsv", "jsonl"):
        (folder / f"{name}.toml").write_text(f'format = "{name}"\n' + SCHEMA)
    answer("convert", "--schema", folder / "schema.toml", folder / "table.csv", "--out", folder / "csv.click")
    return folder


@pytest.mark.parametrize("name", ["tsv", "jsonl", "npz"])
def test_kinds_of_tables_are_the_same_log(kinds, tmp_path, name):
    out = tmp_path / "out.click"
    told = answer("convert", "--schema", kinds / "schema.toml", kinds / f"table.{name}", "--out", out)
    assert (told["samples"], told["bad_lines"]) == (400, 0)
    assert out.read_bytes() == (kinds / "csv.click").read_bytes()
    if name == "npz":
        return
    # The same where the schema says what it is, and packed; the log differs in the text of the schema.
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress((kinds / f"table.{name}").read_bytes()))
    answer("convert", "--schema", kinds / f"{name}.toml", packed, "--out", out)
    found, wanted = out.read_bytes(), (kinds / "csv.click").read_bytes()
    (directory,) = struct.unpack_from("<Q", wanted, 40)
    assert found[64:directory] == wanted[64:directory]
    other = {"tsv": "jsonl", "jsonl": "tsv"}[name]
    failed = data("convert", "--schema", kinds / f"{other}.toml", packed, "--out", tmp_path / "other.click")
    says = {"tsv": "line 1 is not a JSON object", "jsonl": "there is no column 'clicked'"}[name]
    assert failed.returncode == 65 and says in failed.stderr and not (tmp_path / "other.click").exists()


def test_kinds_of_tables_train_the_same_model(kinds, tmp_path):
    small = ["--dim", "4", "--bottom", "8,4", "--top", "8,1", "--batch", "32", "--steps", "4", "--json"]
    prints = {}
    for name in ("csv.click", "table.tsv", "table.jsonl", "table.npz"):
        words = ["--data", kinds / name, "--schema", kinds / "schema.toml", "--save", tmp_path / name]
        done = subprocess.run(
            [TESSERA, "train", "dlrm", *small, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "TESSERA_CACHE": str(tmp_path / "cache")},
        )
        assert done.returncode == 0, name + done.stdout + done.stderr
        assert ("converted 400 samples" in done.stderr) == (name != "csv.click")
        prints[name] = json.loads(done.stdout)["fingerprint"]
    assert len(set(prints.values())) == 1, prints


@pytest.mark.parametrize("name", ["tsv", "jsonl"])
def test_schemas_of_text_are_guessed_alike(kinds, tmp_path, name):
    guesses = {}
    for one in ("csv", name):
        answered = data("schema", kinds / f"table.{one}")
        assert answered.returncode == 0, answered.stderr
        said, _, guesses[one] = answered.stdout.partition("[label]\n")
        assert f'\nformat = "{one}"\n' in said
    assert 'column = "clicked"\n' in guesses["csv"] and '[[dense]]\ncolumn = "price"\n' in guesses["csv"]
    # Without comments, which count what was seen: lists are not texts.
    keys = {
        one: [line for line in guess.splitlines() if not line.startswith("#")]
        for one, guess in guesses.items()
    }
    assert keys["csv"] == keys[name]
    (tmp_path / "guess.toml").write_text(data("schema", kinds / f"table.{name}").stdout)
    told = answer(
        "convert", "--schema", tmp_path / "guess.toml", kinds / f"table.{name}", "--out", tmp_path / "o.click"
    )
    assert (told["samples"], told["bad_lines"]) == (400, 0)
    features = answer("show", tmp_path / "o.click")["features"]
    assert [(one["name"], one["bag_size"]) for one in features] == [("user", 1), ("item", 1), ("tags", 0)]


def test_a_json_array_is_named(kinds, tmp_path):
    records = [json.loads(line) for line in (kinds / "table.jsonl").read_text().splitlines()]
    for name, indent in (("a.json", None), ("b.json", 2)):
        (tmp_path / name).write_text(json.dumps(records, indent=indent))
        schema = ["--schema", kinds / "schema.toml"]
        for words in (["schema"], ["check", *schema], ["convert", *schema, "--out", tmp_path / "o.click"]):
            failed = data(*words, tmp_path / name)
            assert failed.returncode == 65
            assert f"{name}: is one JSON array, not JSON lines. Write an object per line" in failed.stderr


def refused_to_write(out, *words):
    """Also under other names; nothing is changed and nothing left."""
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    (out.parent / "link").symlink_to(out.name)
    (out.parent / "twin").hardlink_to(out)
    names = [
        out,
        out.parent / "link",
        out.parent / "twin",
        out.parent / "." / ".." / out.parent.name / out.name,
    ]
    for name in names:
        failed = data(*words, name)
        assert failed.returncode == 65, failed.stdout + failed.stderr
        assert f"{name}: is read and cannot be written too. Name another file to write." in failed.stderr
    (out.parent / "link").unlink()
    (out.parent / "twin").unlink()
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before


def test_the_schema_of_a_conversion_is_not_written(table):
    (table / "users.txt").write_text("ann\nbob\n")
    text = SCHEMA.replace(
        'column = "user"\nrows = 100', 'column = "user"\nkind = "vocabulary"\nvocabulary = "users.txt"'
    )
    (table / "schema.toml").write_text(text)
    for name in ("schema.toml", "users.txt"):
        words = ("convert", "--schema", table / "schema.toml", table / "table.csv", "--out")
        refused_to_write(table / name, *words)


def test_a_log_is_not_written_over_by_its_statistics(tmp_path):
    for name, flags in (("a.click", []), ("a.tsv", ["--format", "text"])):
        answer("synth", tmp_path / name, "--samples", 50, *flags)
        refused_to_write(tmp_path / name, "stats", tmp_path / name, "--write")
    # A draft has a name that no file of the user's has.
    shutil.copy(tmp_path / "a.click", tmp_path / "a.json.new")
    answer("stats", tmp_path / "a.json.new", "--write", tmp_path / "a.json")
    assert (tmp_path / "a.json.new").read_bytes() == (tmp_path / "a.click").read_bytes()
    assert len(json.loads((tmp_path / "a.json").read_text())["features"]) == 26


@pytest.mark.parametrize(
    "words",
    [
        ("synth", "--samples", "3000", "--format", "text"),
        ("synth", "--samples", "3000"),
        ("stats", "log.click", "--sample", "100", "--write"),
        ("convert", "log.tsv", "--out"),
        ("schema", "wide.csv", "--out"),
    ],
    ids=lambda words: " ".join(words[:1] + words[-1:]),
)
def test_what_cannot_be_written_leaves_the_file_before(tmp_path, words):
    answer("synth", tmp_path / "log.click", "--samples", 100, "--features", 100)
    answer("synth", tmp_path / "log.tsv", "--samples", 1000, "--format", "text")
    wide = ",".join(f"column_{i}" for i in range(500))
    (tmp_path / "wide.csv").write_text(f"{wide}\n{'1,' * 499}1\n")
    (tmp_path / "out").write_text("good")
    before = sorted(tmp_path.iterdir())
    command = [TESSERA, "data", *words, "out"]
    done = subprocess.run(
        command, cwd=tmp_path, preexec_fn=full_disk, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 65 and "File too large" in done.stderr, done.stdout + done.stderr
    assert (tmp_path / "out").read_text() == "good" and sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("flags", [["--format", "text"], []], ids=["text", "binary"])
def test_a_log_that_is_made_and_killed_leaves_the_one_before(tmp_path, flags):
    if not has_files_without_names(tmp_path):
        pytest.skip("no file without a name here")
    (tmp_path / "out").write_text("good")
    command = [TESSERA, "data", "synth", "out", "--samples", "1000000000", "--features", "26", *flags]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    written = pathlib.Path(f"/proc/{process.pid}/io")
    while int(re.search(r"^wchar: (\d+)", written.read_text(), re.MULTILINE)[1]) < 1 << 20:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert (tmp_path / "out").read_text() == "good" and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    answer("synth", tmp_path / "log.tsv", "--samples", 20, "--format", "text")
    command = [TESSERA, "data", "synth", str(pipe), "--samples", "20", "--format", "text"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        assert pipe.read_bytes() == (tmp_path / "log.tsv").read_bytes()
        assert process.wait(60) == 0
    with subprocess.Popen(command[:-2], stderr=subprocess.PIPE, text=True) as process:
        assert pipe.read_bytes() == b""
        assert (
            process.wait(60) == 65 and "pipe: cannot be written from its beginning" in process.stderr.read()
        )
    assert pipe.is_fifo()


def has_files_without_names(folder):
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("verb", ["convert", "train"])
def test_a_conversion_that_is_ended_leaves_nothing(table, verb, number):
    """Of a pipe that goes on: more was taken out of it than it holds, so the log was begun."""
    if not has_files_without_names(table):
        pytest.skip("no file without a name here")
    out = ["data", "convert", "-", "--out", table / "out.click"]
    words = out if verb == "convert" else ["train", "dlrm", "--data", "-", "--runs", table / "runs"]
    process = subprocess.Popen(
        [TESSERA, *map(str, words), "--schema", str(table / "schema.toml")],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TESSERA_CACHE": str(table / "cache")},
    )
    lines = TABLE.partition("\n")[2].encode()
    process.stdin.write(TABLE.encode() + lines * 200_000)
    process.stdin.flush()
    process.send_signal(number)
    assert process.wait(60) == -number
    process.stdin.close()
    left = {path.name for path in table.rglob("*")} - {"cache"}
    assert left == {"table.csv", "schema.toml"}


def has_open(pid, path):
    try:
        return str(path) in [os.readlink(one) for one in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    except FileNotFoundError:  # closed while it was looked at
        return False


def test_who_converts_for_a_training_ends_with_it(table):
    if not has_files_without_names(table):
        pytest.skip("no file without a name here")
    lines = TABLE.partition("\n")[2].encode()
    (table / "long.csv").write_bytes(TABLE.encode() + lines * 1_000_000)
    words = ["train", "dlrm", "--data", "long.csv", "--schema", "schema.toml", "--runs", "runs"]
    process = subprocess.Popen(
        [TESSERA, *words],
        cwd=table,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TESSERA_CACHE": str(table / "cache")},
    )
    of = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (children := of.read_text().split()):
        assert process.poll() is None
    while not has_open(children[0], table / "long.csv"):
        assert process.poll() is None
    os.kill(int(children[0]), signal.SIGSTOP)  # in the midst of it
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    deadline = time.monotonic() + 30
    while pathlib.Path(f"/proc/{children[0]}").exists():
        state = pathlib.Path(f"/proc/{children[0]}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # nobody asked how it ended
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list((table / "cache").iterdir()) == []


def test_bad_cells_of_a_table_are_named(table):
    schema = table / "schema.toml"
    (table / "bad.csv").write_text(TABLE + "1,ann,3,inf,a\n1,ann,3\n")
    out = table / "out.click"
    failed = data("convert", "--schema", schema, table / "bad.csv", "--out", out)
    assert failed.returncode == 65 and not out.exists()
    assert "bad.csv: line 5, column 'price' (4): 'inf' is not a finite number." in failed.stderr
    told = answer("convert", "--schema", schema, table / "bad.csv", "--out", out, "--skip-bad")
    assert (told["samples"], told["bad_lines"]) == (3, 2)
    checked = data("check", table / "bad.csv", "--schema", schema)
    assert checked.returncode == 65 and "line 6 has 3 cells; there are 5 columns" in checked.stdout
    assert data("check", table / "table.csv", "--schema", schema).returncode == 0
    (table / "head.csv").write_text(TABLE.splitlines()[0])
    failed = data("convert", "--schema", schema, table / "head.csv", "--out", out)
    assert failed.returncode == 65 and "there is no sample in" in failed.stderr


def test_numbers_of_json_lines_that_are_not_finite_are_named(table):
    """As Python and others write them; a guess takes NaN for no value."""
    good = {"clicked": 1, "user": "ann", "item": 3, "price": 2.5, "tags": ["a"]}
    lines = [json.dumps({**good, "price": price}) for price in (1, float("nan"), float("-inf"))]
    lines += [json.dumps({**good, "clicked": 0}), json.dumps(good).replace("2.5", "1e999")]
    (table / "t.jsonl").write_text("\n".join(lines) + "\n")
    checked = data("check", table / "t.jsonl", "--schema", table / "schema.toml")
    assert checked.returncode == 65
    for line, number in ((2, "NaN"), (3, "-Infinity"), (5, "1e999")):
        assert f"line {line}, column 'price': '{number}' is not a finite number" in checked.stdout
    guess = data("schema", table / "t.jsonl").stdout
    assert '[[dense]]\ncolumn = "price"\n' in guess and 'missing = ["", "NaN"]' in guess


@pytest.mark.parametrize(
    ("name", "more"), [("table.csv", []), ("out.click", []), ("table.csv", ["--ids", "unlimited"])]
)
def test_a_table_without_numbers_is_not_trained_on(table, name, more):
    (table / "schema.toml").write_text(SCHEMA.replace('[[dense]]\ncolumn = "price"\n', ""))
    answer("convert", "--schema", table / "schema.toml", table / "table.csv", "--out", table / "out.click")
    words = ["--data", name, "--schema", "schema.toml", "--steps", "1", "--runs", "runs", *more]
    failed = subprocess.run(
        [TESSERA, "train", "dlrm", *words],
        cwd=table,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TESSERA_CACHE": str(table / "cache")},
    )
    assert failed.returncode == 78, failed.stdout + failed.stderr
    assert "error: train: there are no dense numbers in the data\n" in failed.stderr
    assert "\n  try: name a column of numbers under [[dense]] in the schema; one that" in failed.stderr


def test_numbers_of_a_log_that_are_not_finite_are_found(table):
    log = table / "log.click"
    answer("convert", "--schema", table / "schema.toml", table / "table.csv", "--out", log)
    content = bytearray(log.read_bytes())
    # The dense number of sample 2: after 3 labels, which fill 8 bytes, of the block at byte 64.
    struct.pack_into("<f", content, 64 + 8 + 8, float("nan"))
    log.write_bytes(content)
    failed = data("check", log)
    assert failed.returncode == 65 and "its sum is wrong" in failed.stderr
    directory, size = struct.unpack_from("<QQ", content, 40)
    begin, length = struct.unpack_from(
        "<QQ", content, directory + sum(16 + len(n) for n in ("user", "item", "tags"))
    )
    place = directory + sum(16 + len(n) for n in ("user", "item", "tags")) + 20
    struct.pack_into("<I", content, place, crc32c(content[begin : begin + length]))
    struct.pack_into("<I", content, 56, crc32c(content[directory : directory + size]))
    struct.pack_into("<I", content, 60, crc32c(content[:60]))
    log.write_bytes(content)
    failed = data("check", log)
    assert failed.returncode == 65
    assert "sample 2, number 0 ('price'), is nan" in failed.stderr
    # A training that meets it names it, too, and not the learning rate.
    words = [
        "--data",
        log,
        "--steps",
        2,
        "--batch",
        1,
        "--dim",
        8,
        "--bottom",
        "8,8",
        "--runs",
        table / "runs",
    ]
    failed = subprocess.run([TESSERA, "train", "dlrm", *map(str, words)], capture_output=True, text=True)
    assert failed.returncode == 65
    assert "sample 2, number 0 ('price'), is nan" in failed.stderr


def test_a_log_without_samples_is_an_error(tmp_path):
    """Of a program that writes by the description of the format."""
    directory = struct.pack("<QII", 100, 1, 4) + b"user"
    head = struct.pack("<8sIIQIIIIQQ", b"TSRCLICK", 1, 0, 0, 13, 1, 65536, 0, 64, len(directory))
    head += struct.pack("<I", crc32c(directory))
    (tmp_path / "log.click").write_bytes(head + struct.pack("<I", crc32c(head)) + directory)
    told = answer("show", tmp_path / "log.click")
    assert (told["samples"], told["dense"], told["features"][0]["name"]) == (0, 13, "user")
    train = ["train", "dlrm", "--steps", 1, "--runs", tmp_path / "runs", "--data"]
    for words in (["data", "check"], ["data", "stats"], train, [*train[:-1], "--ids", "unlimited", "--data"]):
        failed = subprocess.run(
            [TESSERA, *map(str, words), tmp_path / "log.click"], capture_output=True, text=True, timeout=120
        )
        assert failed.returncode == 65, failed.stdout + failed.stderr
        assert "log.click: there is no sample in it." in failed.stderr


def crc32c(content):
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
