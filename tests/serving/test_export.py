"""tessera export: from a run of two ranks to a package."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import time

import pytest
from conftest import NUM_ROWS, NUM_TABLES, TESSERA, tessera


def judged(run) -> dict:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "eval"][-1]


def test_the_package_predicts_as_the_trainer_did(run, tmp_path):
    out = tmp_path / "pkg"
    words = ["--out", out, "--dtype", "fp32", "--eval", "synthetic", "--eval-samples", 2000, "--json"]
    answer = json.loads(tessera("export", run, *words).stdout)
    trainer = judged(run)
    assert answer["judged"]["samples"] == trainer["samples"]
    assert answer["judged"]["auc_after"] == pytest.approx(trainer["auc"], abs=2e-6)
    assert answer["judged"]["log_loss_after"] == pytest.approx(trainer["log_loss"], abs=1e-6)
    assert list(tmp_path.glob("pkg.*")) == []


def test_judging_takes_nothing_away(run, tmp_path):
    """Neither a package that is named as the one it judges, nor data in the one that is replaced."""
    tessera("export", run, tmp_path / "pkg")
    tessera("export", run, tmp_path / "pkg.fp32")
    before = {path: path.read_bytes() for path in (tmp_path / "pkg.fp32").iterdir()}
    tessera("export", run, tmp_path / "pkg", "--eval", "synthetic", "--eval-samples", 500)
    assert {path: path.read_bytes() for path in (tmp_path / "pkg.fp32").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pkg", "pkg.fp32"]
    log = tmp_path / "pkg/log.click"
    tessera("data", "synth", log, "--features", NUM_TABLES, "--rows", NUM_ROWS, "--samples", 500)
    refused = tessera("export", run, tmp_path / "pkg", "--eval", log, check=False)
    assert refused.returncode == 65 and log.exists()
    assert f"{tmp_path}/pkg: is read and cannot be written too." in refused.stderr


def plan_in_rows(kind: str, ranks: int) -> dict:
    """Tables of 200 x 8 whose rows lie over the ranks of one host: types that have no flag."""
    shards = [[200 * r // ranks, 0, 200 * (r + 1) // ranks - 200 * r // ranks, 8, r] for r in range(ranks)]
    table = {"type": kind, "kernel": "fused", "ranks": list(range(ranks)), "shards": shards}
    return {"version": 1, "modules": {"tables": {f"cat_{i}": table for i in range(3)}}}


@pytest.mark.parametrize(
    "sharding", ["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid_shard"]
)
def test_a_run_of_any_sharding_is_exported(tmp_path, sharding):
    where = ["--sharding", sharding]
    if sharding in ("table_row_wise", "grid_shard"):
        (tmp_path / "plan.json").write_text(json.dumps(plan_in_rows(sharding, 3)))
        where = ["--plan", tmp_path / "plan.json"]
    tessera(
        "train", "dlrm", "--ranks", 3, "--steps", 20, "--batch", 64, "--tables", 3, "--rows", 200, "--dim", 8,
        "--bottom", "16,8", "--top", "16,1", "--eval-samples", 2000, *where, "--save", tmp_path / "run",
    )  # fmt: skip
    words = ["--dtype", "fp32", "--eval", "synthetic", "--eval-samples", 2000, "--json"]
    answer = json.loads(tessera("export", tmp_path / "run", tmp_path / "pkg", *words).stdout)
    trainer = judged(tmp_path / "run")
    assert answer["judged"]["auc_after"] == pytest.approx(trainer["auc"], abs=2e-6)
    assert answer["judged"]["log_loss_after"] == pytest.approx(trainer["log_loss"], abs=1e-6)


@pytest.mark.parametrize(("dtype", "row_bytes", "most"), [("int8", 20, 0.0005), ("int4", 12, 0.005)])
def test_few_bits_cost_little(run, tmp_path, dtype, row_bytes, most):
    out = tmp_path / "pkg"
    words = ["--out", out, "--dtype", dtype, "--eval", "synthetic", "--eval-samples", 2000, "--json"]
    answer = json.loads(tessera("export", run, *words, "--max-auc-drop", most).stdout)
    assert len(answer["tables"]) == NUM_TABLES
    assert [table["name"] for table in answer["tables"]] == [f"cat_{i}" for i in range(NUM_TABLES)]
    assert all(table["bytes_after"] == NUM_ROWS * row_bytes for table in answer["tables"])
    assert all(0 < table["mean_error"] <= table["worst_error"] < 0.3 for table in answer["tables"])


def test_four_bits_take_at_most_a_sixth_of_the_bytes(tmp_path):
    """Rows of 64 numbers: 36 bytes of 256. All files of the package count, those of the dense part too."""
    words = ["--tables", 4, "--rows", 20000, "--dim", 64, "--bottom", "32,64", "--top", "32,1"]
    tessera(
        "train",
        "dlrm",
        "--steps",
        1,
        "--batch",
        64,
        *words,
        "--eval-samples",
        100,
        "--save",
        tmp_path / "run",
    )
    sizes = {}
    for dtype in ("fp32", "int4"):
        tessera("export", tmp_path / "run", "--out", tmp_path / dtype, "--dtype", dtype)
        sizes[dtype] = sum(file.stat().st_size for file in (tmp_path / dtype).iterdir())
    assert sizes["int4"] <= 0.16 * sizes["fp32"]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Of all files below a folder."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


JUDGED = ["--dtype", "int2", "--eval", "synthetic", "--eval-samples", 2000]


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([*JUDGED, "--max-auc-drop", 0], "the AUC falls by"),
        (["--dtype", "int2", "--eval", "nowhere.tsv"], "nowhere.tsv"),
    ],
)
def test_what_is_not_judged_good_takes_nobodys_place(run, tmp_path, has_old, words, text):
    out = tmp_path / "pkg"
    if has_old:
        tessera("export", run, out)
    before = contents(tmp_path)
    result = tessera("export", run, out, *words, check=False)
    assert result.returncode == 65
    assert text in result.stderr
    assert contents(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == (["pkg"] if has_old else [])


def test_a_package_that_is_refused_is_reported_all_the_same(run, tmp_path):
    words = [run, tmp_path / "pkg", *JUDGED, "--max-auc-drop", 0]
    result = tessera("export", *words, check=False)
    assert f"{tmp_path / 'pkg'} is as it was" in result.stderr
    assert "\njudged   auc " in result.stdout
    assert "\npackage " not in result.stdout
    answer = json.loads(tessera("export", *words, "--json", check=False).stdout)
    assert answer["package"] is None
    assert answer["judged"]["auc_after"] < answer["judged"]["auc_before"]


def test_a_judgement_touches_no_package_of_another_name(run, tmp_path):
    """Also not one that is named like scratch of earlier versions."""
    names = ["pkg.fp32", "pkg.tmp-1", "pkg.tmp-0123456789abcdeX"]
    for name in names:
        tessera("export", run, tmp_path / name)
    before = contents(tmp_path)
    tessera("export", run, tmp_path / "pkg", *JUDGED)
    after = contents(tmp_path)
    assert {name: data for name, data in after.items() if not name.startswith("pkg/")} == before


# What an export has reached, by what lies in its scratch folder.
STAGES = [
    "dense.safetensors",
    "tables-1.safetensors",
    "MANIFEST.json",
    "unrounded",
    "unrounded/MANIFEST.json",
]


def pending(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("pkg.tmp-*"))


def start_export(run, out, stage) -> subprocess.Popen:
    """An export that has reached a stage of its work."""
    words = [TESSERA, "export", run, out, *JUDGED[:-1], 400_000]
    process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any((folder / stage).exists() for folder in pending(out.parent)):
        assert process.poll() is None, "it was done before it could be looked at"
        assert time.monotonic() < deadline
    return process


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_that_is_killed_leaves_what_was_there_and_the_next_cleans_up(run, tmp_path, stage):
    out = tmp_path / "pkg"
    tessera("export", run, out)
    before = contents(out)
    process = start_export(run, out, stage)
    process.kill()
    process.communicate()
    assert contents(out) == before
    assert len(pending(tmp_path)) == 1
    tessera("export", run, out, "--dtype", "int4")
    assert contents(out) != before
    assert pending(tmp_path) == []


def test_an_export_leaves_another_that_is_at_work_alone(run, tmp_path):
    out = tmp_path / "pkg"
    process = start_export(run, out, "unrounded")
    process.send_signal(signal.SIGSTOP)
    try:
        tessera("export", run, out, "--dtype", "int4")  # comes first, into a place that was free
        assert len(pending(tmp_path)) == 1
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=60) == 0, process.communicate()
    assert pending(tmp_path) == []
    assert {table["type"] for table in json.loads((out / "model.json").read_text())["tables"]} == {"int2"}


def test_any_name_of_the_checkpoint_will_do(run, tmp_path):
    names = [run, run / "checkpoints", run / "checkpoints" / "step-000000000040"]
    sums = set()
    for i, name in enumerate(names):
        tessera("export", name, "--out", tmp_path / f"pkg-{i}")
        sums.add((tmp_path / f"pkg-{i}" / "MANIFEST.json").read_text())
    assert len(sums) == 1


def test_the_package_may_be_named_behind_the_run(run, tmp_path):
    package = tmp_path / "pkg"
    report = json.loads(tessera("export", run, "--quantise", "int4", package, "--json").stdout)
    assert {table["type"] for table in report["tables"]} == {"int4"}
    assert (package / "MANIFEST.json").exists()
    assert "output_type" not in json.loads((package / "model.json").read_text())
    tessera("export", run, package, "--output-dtype", "fp16")
    assert json.loads((package / "model.json").read_text())["output_type"] == "fp16"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--out", "{out}", "--dtype", "int9"], 2, "unknown type 'int9'"),
        (["--dtype", "int8"], 2, "name the package to write"),
        (["{out}", "--out", "{out}"], 2, "named twice"),
        (["{out}", "more"], 2, "name one run or checkpoint"),
        (["{out}", "--quantise", "int3"], 2, "unknown type 'int3'"),
        (["{out}", "--output-dtype", "fp64"], 2, "--output-dtype"),
        (["--out", "{out}", "--table", "cat_0"], 2, "NAME=TYPE"),
        (["--out", "{out}", "--table", "nobody=int4"], 65, "no table 'nobody'"),
        (["--out", "{out}", "--align", "3"], 2, "1, 4 or 16"),
        (["--out", "{out}", "--step", "7"], 65, "step-000000000007"),
        (["--out", "{out}", "--max-auc-drop", "1"], 2, "needs --eval"),
        (["--out", "{out}", "--eval", "nowhere.tsv"], 65, "nowhere.tsv"),
    ],
)
def test_wrong_words_are_named(run, tmp_path, words, code, text):
    words = [word.format(out=tmp_path / "pkg") for word in words]
    result = tessera("export", run, *words, check=False)
    assert result.returncode == code, result.stderr
    assert text in result.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    result = tessera("export", tmp_path, "--out", tmp_path / "pkg", check=False)
    assert result.returncode == 65
    assert "there is no checkpoint" in result.stderr
