"""The newcomer: the commands of docs/your_data.md, as they stand there, from a table to predictions.

All of them together take less than three minutes.
"""

from __future__ import annotations

import csv
import os
import pathlib
import re
import shlex
import struct
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
PAGE = ROOT / "docs/your_data.md"
HAS_PARQUET = (pathlib.Path(TESSERA).parent.parent / "lib/libtessera_parquet.so").exists()
LIMIT = 100.0  # seconds a command may take; for a loaded machine, not a figure
THREE_MINUTES = 180.0  # all of them, from the table to the predictions
# The commands run before the first test, and count into its time.
pytestmark = pytest.mark.timeout(300)


def commands():
    page = PAGE.read_text()
    part = page[page.index("## From a table") : page.index("## Files")]
    blocks = re.findall(r"```sh\n(.*?)```", part, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Folder, what each command printed, and seconds; the folder held nothing but the examples."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = {"tessera": TESSERA, "python": sys.executable}
    env = {**os.environ, "TESSERA_CACHE": str(folder / "cache")}
    printed, begin = {}, time.monotonic()
    for command in commands():
        words = shlex.split(command)
        words[0] = programs.get(words[0], words[0])
        if "parquet" in command and not HAS_PARQUET:
            continue
        result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=env)
        assert result.returncode == 0, command + "\n" + result.stdout + result.stderr
        printed[command] = result.stdout
    return folder, printed, time.monotonic() - begin


def said(printed, beginning):
    return next(text for command, text in printed.items() if command.startswith(beginning))


def test_a_newcomer_needs_less_than_three_minutes(played):
    """From a table with texts, integers and several values in a cell to a model, its export and scores."""
    _, printed, seconds = played
    verbs = {" ".join(command.split()[:2]) for command in printed}
    assert {f"tessera {verb}" for verb in ("data", "train", "eval", "predict", "export")} <= verbs
    assert seconds < THREE_MINUTES


def test_the_page_shows_what_is_printed(played):
    _, printed, _ = played
    assert said(printed, "head -3 shop.csv") in PAGE.read_text()


def test_the_schema_is_guessed_and_the_log_remembers_it(played):
    folder, printed, _ = played
    schema = (folder / "shop.toml").read_text()
    kinds = re.findall(r'^\[+(\w+)\]+\ncolumn = "(\w+)"', schema, re.MULTILINE)
    assert kinds[:6] == [
        ("label", "clicked"),
        ("feature", "user"),
        ("feature", "item_id"),
        ("dense", "price"),
        ("dense", "visits"),
        ("feature", "tags"),
    ]
    shown = said(printed, "tessera data show")
    assert shown.startswith("samples  20000 in 1 blocks") and "tags" in shown and "mean" in shown


def test_the_model_has_learned(played):
    folder, printed, _ = played
    judged = re.search(r"judged   log loss ([\d.]+) \| auc ([\d.]+)", said(printed, "tessera train"))
    # The label's noise allows about 0.8; users and items alone are worth 0.75.
    assert float(judged[2]) > 0.7
    assert (folder / "shop-run/checkpoints/LATEST").exists() and (folder / "shop-run/best").is_dir()


def test_new_records_are_measured_and_scored(played):
    folder, printed, _ = played
    judged = re.search(r"judged   log loss ([\d.]+) \| auc ([\d.]+)", said(printed, "tessera eval"))
    assert float(judged[2]) > 0.7
    lines = (folder / "scores.csv").read_text().splitlines()
    assert lines[0] == "sample,probability" and len(lines) == 1001
    scores = [float(line.split(",")[1]) for line in lines[1:]]
    with open(folder / "new.csv", newline="") as file:
        clicked = [row["clicked"] == "1" for row in csv.DictReader(file)]
    assert all(0 < score < 1 for score in scores)
    of = {
        wanted: [s for s, c in zip(scores, clicked, strict=True) if c == wanted] for wanted in (True, False)
    }
    pairs = sum((a > b) + 0.5 * (a == b) for a in of[True] for b in of[False])
    assert pairs / (len(of[True]) * len(of[False])) > 0.7


@pytest.mark.skipif(not HAS_PARQUET, reason="built without Arrow")
def test_parquet_gives_the_same_bits(played):
    pq = pytest.importorskip("pyarrow.parquet")
    folder, printed, _ = played
    ours = sorted((folder / "shop-run/best").glob("*/*.safetensors"))
    theirs = sorted((folder / "parquet-run/best").glob("*/*.safetensors"))
    assert ours and [path.name for path in ours] == [path.name for path in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    table = pq.read_table(folder / "scores.parquet")
    lines = (folder / "scores.csv").read_text().splitlines()[1:]
    assert [struct.pack("f", float(line.split(",")[1])) for line in lines] == [
        struct.pack("f", score) for score in table["probability"].to_pylist()
    ]
    shown = said(printed, "tessera runs diff")
    assert re.search(r"^  data +\S*shop.click\S* +\S*shop.parquet", shown, re.MULTILINE)
    assert "schema" in shown and (folder / "parquet-run/compare.html").exists()
    assert re.search(r"^parquet-run +dlrm +finished", said(printed, "tessera runs ."), re.MULTILINE)


def test_the_model_is_exported(played):
    folder, *_ = played
    assert any((folder / "shop-model").iterdir())


def test_records_without_a_label_have_the_same_scores(played):
    folder, *_ = played
    with open(folder / "new.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in reversed(rows[0]) if name != "clicked"]
    with open(folder / "bare.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    for words in (
        [
            "data",
            "convert",
            "--schema",
            "shop-run/schema.toml",
            "bare.csv",
            "--out",
            "bare.click",
            "--no-label",
        ],
        ["predict", "shop-run", "--best", "--data", "bare.click", "--out", "bare-scores.csv"],
    ):
        subprocess.run([TESSERA, *words], cwd=folder, check=True, timeout=LIMIT, capture_output=True)
    assert (folder / "bare-scores.csv").read_bytes() == (folder / "scores.csv").read_bytes()


def test_a_log_of_another_schema_is_refused(played):
    folder, *_ = played
    schema = (folder / "shop.toml").read_text()
    (folder / "other.toml").write_text(schema.replace("log1p = true\n", "", 1))
    words = ["data", "convert", "--schema", "other.toml", "new.csv", "--out", "other.click"]
    subprocess.run([TESSERA, *words], cwd=folder, check=True, timeout=LIMIT, capture_output=True)
    words = ["predict", "shop-run", "--data", "other.click", "--out", "other-scores.csv"]
    result = subprocess.run([TESSERA, *words], cwd=folder, timeout=LIMIT, capture_output=True, text=True)
    assert result.returncode == 65 and "was made by another schema" in result.stderr
    assert not (folder / "other-scores.csv").exists()


def test_a_run_can_be_followed(played):
    folder, *_ = played
    words = [sys.executable, str(ROOT / "examples/follow_run.py"), "shop-run"]
    result = subprocess.run(words, cwd=folder, timeout=LIMIT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "'step/loss'" in result.stdout and "'evaluation/auc'" in result.stdout
    # With a stand-in for the package that the example hands the figures to.
    (folder / "stand-in").mkdir()
    (folder / "stand-in/wandb.py").write_text(
        "def init(project, name):\n    print('run', project, name)\n    return __import__('wandb')\n"
        "def log(figures, step):\n    print('given', step, sorted(figures))\n"
    )
    path = [str(folder / "stand-in"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    result = subprocess.run(words, cwd=folder, timeout=LIMIT, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    steps = sum(line.startswith('{"kind":"step"') for line in (folder / "shop-run/metrics.jsonl").open())
    assert lines[0] == "run tessera shop-run" and re.match(r"given 1 \[.*'step/loss'", lines[1])
    assert sum("'step/loss'" in line for line in lines) == steps > 0
