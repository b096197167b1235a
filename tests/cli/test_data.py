"""`tessera data`: text and binary click logs, good and broken."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

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
        (("show",), "data: name one file"),
        (("show", "a", "b"), "data: name one file"),
        (("convert", "a"), "data: convert needs --to PATH"),
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
    assert max(map(len, result.stdout.splitlines())) <= 100
