"""`tessera train dlrm`: the same curve however tables lie, interruptions, bad input, its report."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
from report_data import data_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {"TESSERA_PROFILE": "assume"}  # a profile of this machine would change the plans
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 180.0  # seconds; for a loaded machine, not a figure
SMALL = ["--tables", "5", "--rows", "200", "--bag", "2", "--dim", "8", "--bottom", "16,8", "--top", "16,1"]
SMALL += ["--eval-samples", "600"]


def train(runs, *flags, code=0):
    command = [TESSERA, "train", "dlrm", "--runs", str(runs), *SMALL, *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def metrics(folder):
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return lambda kind: [line for line in lines if line["kind"] == kind]


def answer(runs, *flags):
    result = json.loads(train(runs, "--json", *flags).stdout)
    return result, metrics(pathlib.Path(result["report"]).parent)


# Sums over ranks and shards are taken in another order, so curves differ by rounding: a few units of
# float32. Measured: 2.3e-7 of the value after 24 steps.
SAME = 3e-6
# The AUC counts pairs in the right order, and rounding may swap two samples whose scores are nearly
# equal. At most two such pairs, of 600 samples with a quarter of clicks or more.
SAME_AUC = 2 / (150 * 450)


def parts(size, count):
    """Cut `size` into `count` parts, the first ones larger: (begin, length) of each."""
    whole = -(-size // count)
    begins = [min(i * whole, size) for i in range(count)]
    return [(begin, min(whole, size - begin)) for begin in begins]


def plan_of(kind, ranks):
    """A plan for the five tables of 200 x 8 of a type that has no flag, all ranks on one host."""
    if kind == "table_column_wise":
        width = 8 // ranks
        wide = [width + (i < 8 % ranks) for i in range(ranks)]
        shards = [[0, sum(wide[:r]), 200, wide[r], r] for r in range(ranks)]
    else:
        shards = [[begin, 0, rows, 8, r] for r, (begin, rows) in enumerate(parts(200, ranks))]
    table = {"type": kind, "kernel": "fused", "ranks": list(range(ranks)), "shards": shards}
    return json.dumps({"version": 1, "modules": {"tables": {f"cat_{i}": table for i in range(5)}}})


FLAGS = ["auto", "balanced", "table_wise", "row_wise", "column_wise", "data_parallel"]
PLANS = ["table_row_wise", "table_column_wise", "grid_shard"]
SOME = [(1, "auto"), (2, "table_wise"), (2, "row_wise"), (2, "column_wise"), (2, "data_parallel")]
SOME += [(2, "balanced"), (3, "auto"), (3, "column_wise"), (4, "row_wise")]
ALL = [(ranks, sharding) for ranks in (1, 2, 3, 4) for sharding in FLAGS + PLANS]


@pytest.mark.parametrize(
    ("optimizer", "steps", "arrangements"), [("sgd", 24, SOME), ("rowwise_adagrad", 8, ALL)]
)
def test_the_curve_does_not_depend_on_ranks_and_sharding(tmp_path, optimizer, steps, arrangements):
    flags = ["--steps", str(steps), "--eval-every", str(steps // 2), "--table-lr", "0.3"]
    flags += ["--table-optimizer", optimizer]
    curves, aucs = [], []
    for ranks, sharding in arrangements:
        where = ["--sharding", sharding]
        if sharding in PLANS:
            plan = tmp_path / f"{sharding}-{ranks}.json"
            plan.write_text(plan_of(sharding, ranks))
            where = ["--plan", str(plan)]
        _, lines = answer(tmp_path, "-n", str(ranks), *where, "--batch", str(48 // ranks), *flags)
        curve = [line["loss"] for line in lines("step")]
        judged = [line[key] for line in lines("eval") for key in ("log_loss", "calibration")]
        assert len(curve) == steps and len(judged) == 4 and len(lines("breakdown")) == ranks
        if sharding not in ("auto", "balanced"):
            assert {line["sharding"] for line in lines("table")} == {sharding}
        curves.append(curve + judged)
        aucs.append([line["auc"] for line in lines("eval")])
    assert curves[0][0] != curves[0][steps - 1]
    worst = max(abs(a / b - 1) for curve in curves[1:] for a, b in zip(curve, curves[0], strict=True))
    print(f"{optimizer}: curves differ by {worst:.1e}")
    for arrangement, curve, auc in zip(arrangements, curves, aucs, strict=True):
        assert curve == pytest.approx(curves[0], rel=SAME), arrangement
        assert auc == pytest.approx(aucs[0], abs=SAME_AUC), arrangement


def test_a_plan_file_is_followed_and_checked(tmp_path):
    shards = {f"cat_{i}": [[0, 0, 200, 8, i % 2]] for i in range(4)}
    shards["cat_4"] = [[0, 0, 120, 8, 0], [120, 0, 80, 8, 1]]
    kind = {name: "row_wise" if len(list_) == 2 else "table_wise" for name, list_ in shards.items()}
    tables = {
        name: {"type": kind[name], "kernel": "fused", "ranks": [s[4] for s in list_], "shards": list_}
        for name, list_ in shards.items()
    }
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "modules": {"tables": tables}}))
    _, lines = answer(tmp_path, "-n", "2", "--plan", str(plan), "--batch", "16", "--steps", "3")
    rows = {line["name"]: [shard["rows"] for shard in line["shards"]] for line in lines("table")}
    assert rows["cat_4"] == [120, 80] and rows["cat_0"] == [200]
    tables["cat_4"]["shards"][1][2] = 79
    plan.write_text(json.dumps({"version": 1, "modules": {"tables": tables}}))
    refused = train(tmp_path, "-n", "2", "--plan", str(plan), code=78)
    assert "cat_4" in refused.stderr and "the shards end before the table" in refused.stderr


def test_auto_is_the_plan_that_the_planner_shows(tmp_path):
    # Three equal tables on two ranks: whole ones would leave one rank waiting.
    shape = ["-n", "2", "--tables", "3", "--rows", "500", "--bag", "4", "--batch", "16"]
    _, lines = answer(tmp_path, *shape, "--steps", "2")
    words = [TESSERA, "plan", "tables", "--json", *shape, "--dim", "8", "--memory", "8GB"]
    planned = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    places = {table["name"]: (table["sharding"], table["shards"]) for table in planned["tables"]}
    keys = places["cat_0"][1][0].keys()  # a training also notes what a shard moves
    trained = {
        line["name"]: (line["sharding"], [{key: shard[key] for key in keys} for shard in line["shards"]])
        for line in lines("table")
    }
    assert trained == places
    assert {kind for kind, _ in trained.values()} > {"table_wise"}


def test_a_plan_whose_tables_nobody_would_step_is_refused(tmp_path):
    shards = [[0, 0, 200, 8, rank] for rank in range(2)]
    table = {"type": "data_parallel", "kernel": "dense", "ranks": [0, 1], "shards": shards}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "modules": {"tables": {f"cat_{i}": table for i in range(5)}}}))
    refused = train(tmp_path, "-n", "2", "--plan", str(plan), code=78)
    assert "has the kernel dense, whose rows no optimizer of this training steps" in refused.stderr


LONG = ["-n", "2", "--steps", "60", "--batch", "24", "--checkpoint-every", "7", "--optimizer", "adam"]
LONG += [
    "--table-optimizer",
    "partial_rowwise_adam",
    "--sharding",
    "row_wise",
    "--warmup",
    "10",
    "--decay",
    "cosine",
]


def start(runs, *flags):
    command = [TESSERA, "train", "dlrm", "--runs", str(runs), *SMALL, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(runs, step):
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        for path in pathlib.Path(runs).glob("*/metrics.jsonl"):
            if f'"step":{step},' in path.read_text():
                return path.parent
        time.sleep(0.005)
    raise AssertionError(f"step {step} never came")


def test_after_a_kill_the_parameters_are_those_of_an_undisturbed_run(tmp_path):
    whole, lines = answer(tmp_path / "whole", *LONG)
    seed = random.randrange(1 << 30)
    step = random.Random(seed).randrange(8, 50)
    process = start(tmp_path / "cut", *LONG)
    folder = wait_for_step(tmp_path / "cut", step)
    process.kill()
    process.communicate(timeout=LIMIT)
    command = [TESSERA, "train", "dlrm", "--resume", str(folder), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 0, f"seed {seed}: {result.stdout}{result.stderr}"
    resumed = json.loads(result.stdout)
    assert 0 <= resumed["first_step"] <= 60 and resumed["first_step"] % 7 == 0, f"seed {seed}"
    for key in ("fingerprint", "loss", "auc", "log_loss"):
        assert resumed[key] == whole[key], f"seed {seed}, killed at step {step}"
    # The folder tells one story: every step once, with the same losses.
    losses = [line["loss"] for line in lines("step")]
    assert [line["loss"] for line in metrics(folder)("step")] == losses
    assert metrics(folder)("end")[-1]["steps"] == 60 and (folder / "report.html").exists()


def test_sigterm_saves_and_leaves_with_zero(tmp_path):
    flags = ["-n", "2", "--steps", "100000", "--batch", "24", "--eval-every", "0"]
    process = start(tmp_path, *flags)
    folder = wait_for_step(tmp_path, 20)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    stopped = re.search(r"stopped  at step (\d+); go on with tessera train dlrm --resume (\S+)\n", output)
    assert stopped[2] == str(folder)
    saved = json.loads((folder / "checkpoints" / f"step-{int(stopped[1]):012}" / "MANIFEST.json").read_text())
    assert saved["values"]["step"] == int(stopped[1])
    assert "report   " in output and (folder / "report.html").exists()


def resume(folder, *flags, code=0):
    command = [TESSERA, "train", "dlrm", "--resume", str(folder), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture
def finished(tmp_path):
    """The folder of a run of four steps with 24 samples each."""
    result, _ = answer(tmp_path, "--steps", "4", "--batch", "24", "--checkpoint-every", "2")
    return pathlib.Path(result["report"]).parent


def test_a_checkpoint_of_another_job_is_refused(finished):
    config = finished / "config.toml"
    config.write_text(config.read_text().replace("batch=24", "batch=12"))
    told = resume(finished, "--steps", "9", code=78).stderr
    assert "is of a job with 24 samples per step over all ranks and seed 1; this one has 12" in told


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (
            ["--batch", "12"],
            [
                "error: train: a step of {} has 24 samples over all ranks, one of this call 12",
                "  why: the run has --ranks 1 --batch 24, this call has --ranks 1 --batch 12",
                "  try: --batch 24",
            ],
        ),
        (
            ["-n", "2"],
            [
                "error: train: a step of {} has 24 samples over all ranks, one of this call 48",
                "  why: the run has --ranks 1 --batch 24, this call has --ranks 2 --batch 24",
                "  try: --batch 12",
            ],
        ),
        (
            ["-n", "5"],
            [
                "error: train: a step of {} has 24 samples over all ranks, one of this call 120",
                "  why: the run has --ranks 1 --batch 24, this call has --ranks 5 --batch 24",
                "  try: --ranks and --batch whose product is 24",
            ],
        ),
        (
            ["--dim", "16", "--bottom", "16,16", "--table_optimizer=sgd", "--seed", "2"],
            [
                "error: train: {} has --dim 8, --bottom 16,8, --table-optimizer rowwise_adagrad, --seed 1; "
                "this call has --dim 16, --bottom 16,16, --table-optimizer sgd, --seed 2",
                "  why: its checkpoints hold the parameters and the place in the data of that run",
                "  try: leave these flags out, or start a new run without --resume",
            ],
        ),
    ],
    ids=["batch", "ranks", "odd ranks", "model"],
)
def test_a_run_does_not_go_on_as_another(finished, flags, lines):
    told = resume(finished, *flags, code=78).stderr.splitlines()
    assert told == [line.format(finished) for line in lines]


def test_a_run_goes_on_with_other_rates_and_ranks(finished):
    result = resume(finished, "-n", "2", "--batch", "12", "--lr", "0.01", "--decay", "linear", "--steps", "6")
    assert (
        f"note: train: {finished} goes on with --lr 0.01 (was 0.05), --decay linear (was none)\n"
        in result.stderr
    )
    assert "resumed  at step 4\n" in result.stdout
    assert "note:" not in resume(finished, "--steps", "7").stderr


def test_bfloat16_learns_nearly_the_same(tmp_path):
    flags = ["--steps", "30", "--batch", "256", "--lr", "0.05"]
    plain, _ = answer(tmp_path, *flags)
    half, _ = answer(tmp_path, *flags, "--precision", "bfloat16")
    assert half["fingerprint"] != plain["fingerprint"]
    assert half["log_loss"] == pytest.approx(plain["log_loss"], rel=0.02)


@pytest.mark.parametrize("is_mixed_first", [True, False])
def test_the_running_auc_is_that_of_the_last_steps_and_left_out_where_there_is_none(tmp_path, is_mixed_first):
    """Clicks of both kinds in the first 49 steps of 60, or in the last 11, which are a window."""
    samples = [(i, i % 2 if (i < 49 * 4) == is_mixed_first else 0) for i in range(240)]
    samples += [(i, i % 2 if is_mixed_first else 0) for i in range(30)]  # kept to judge on
    (tmp_path / "log.csv").write_text("user,one,clicked\n" + "".join(f"{i},1,{y}\n" for i, y in samples))
    schema = '[label]\ncolumn = "clicked"\n[[dense]]\ncolumn = "one"\n'
    (tmp_path / "s.toml").write_text(f'{schema}[[feature]]\ncolumn = "user"\nkind = "integer"\nrows = 240\n')
    words = ["train", "dlrm", "--data", "log.csv", "--schema", "s.toml", "--steps", "60", "--batch", "4"]
    told = subprocess.run(
        [TESSERA, *words, "--dim", "8", "--bottom", "16,8", "--top", "16,1", "--eval-samples", "30"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "TESSERA_CACHE": str(tmp_path / "cache")},
    )
    assert told.returncode == 0, told.stderr
    first, *_, last = [line for line in told.stdout.splitlines() if line.startswith("step ")]
    with_one, without = (first, last) if is_mixed_first else (last, first)
    assert re.match(r"step +\d+/60 \| loss [\d.]+ \| train auc [\d.]+ \| \S+ samples/s", with_one)
    assert re.match(r"step +\d+/60 \| loss [\d.]+ \| \S+ samples/s", without)
    judged = r"auc [\d.]+" if is_mixed_first else "no auc, all are of one class"
    assert re.search(rf"^judged   log loss [\d.]+ \| {judged}$", told.stdout, re.MULTILINE)
    assert "nan" not in told.stdout


def test_prints_placement_progress_and_report(tmp_path):
    lines = train(tmp_path, "-n", "2", "--steps", "5", "--batch", "64").stdout.splitlines()
    assert lines[0] == "tables   5 on 2 ranks, largest 6.40 kB, imbalance 1.00"
    assert re.search(r"cat_0 +table_wise +fused +[01] ", "\n".join(lines))
    step = (
        r"step +5/5 \| loss [\d.]+ \| train auc [\d.]+ \| \S+ samples/s \| [\d.]+ ms \(exposed comm [\d.]+\)"
    )
    assert re.fullmatch(step + r" \| mem \d+ MB \| eta 0s", lines[-4])
    assert re.fullmatch(r"judged   log loss [\d.]+ \| auc [\d.]+, best possible 0\.\d+", lines[-3])
    report = pathlib.Path(re.fullmatch(r"report   (\S+)", lines[-1])[1])
    metrics = [json.loads(line) for line in report.with_name("metrics.jsonl").read_text().splitlines()]
    times = [line for line in metrics if line["kind"] == "breakdown"]
    assert [line["rank"] for line in times] == [0, 1]
    for line in times:
        assert len(line["exposed_comm_us"]) == len(line["data_us"]) == 5
        waited = sum(phase["waited"] for phase in line["phases"].values())
        assert sum(line["exposed_comm_us"]) == pytest.approx(1e6 * waited, abs=5)
    drawn = data_of(report.read_text())
    assert {table["name"] for table in drawn["tables"]} == {f"cat_{i}" for i in range(5)}
    # Gradients may be reduced beside backward, where nobody waits: their part is not always there.
    assert "input_dist" in str(drawn["breakdowns"]) and "lookup" in drawn["timeline"]["phases"]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--sharding", "diagonal"], 2, "diagonal"),
        (["--bottom", "16,x"], 2, "'16,x' is not a list of widths"),
        (["--dim", "16"], 78, "--bottom ends with 8 and --top with 1, --dim is 16"),
        (["--data", "/nowhere.tsv"], 65, "there is no file /nowhere.tsv"),
        (["--data", "/nowhere/day_*.tsv"], 65, "/nowhere/day_*.tsv: no file has such a name."),
        (["--data", "/nowhere/a.tsv,b.tsv"], 65, "/nowhere/a.tsv: there is no such file."),
        (["--data", ","], 65, ",: names no file."),
        (
            ["--data", "day_*.csv", "--ids", "unlimited"],
            65,
            "patterns and several files are for tables, whose columns --schema",
        ),
        (["--plan", "/nowhere.json"], 78, "there is no file /nowhere.json"),
        (["-n", "9", "--sharding", "column_wise"], 78, "cat_0"),
        (["--lr", "nan"], 2, "--lr: 'nan' is not a number from 0 on"),
        (["--table-lr", "inf"], 2, "--table-lr: 'inf' is not a number from 0 on"),
        (["--lr", "-1"], 2, "--lr: '-1' is not a number from 0 on"),
        (["--seed", "18446744073709551616"], 2, "--seed: Value 18446744073709551616 not in range"),
        (["--resume", "/nowhere"], 65, "there is no run in /nowhere"),
    ],
)
def test_refuses_what_makes_no_sense(tmp_path, flags, code, words):
    assert words in train(tmp_path, *flags, code=code).stderr


def test_flags_may_have_underscores(tmp_path):
    _, lines = answer(tmp_path, "--eval_every", "2", "--steps", "4", "--batch", "8")
    assert [line["step"] for line in lines("eval")] == [2, 4]


@pytest.mark.parametrize("steps", [1, 20])
def test_a_loss_that_is_not_a_number_ends_the_run_with_a_report(tmp_path, steps):
    """With one step the parameters break after the only loss: judging finds them."""
    flags = ["-n", "2", "--batch", "32", "--steps", str(steps), "--checkpoint-every", "1"]
    rates = ["--optimizer", "sgd", "--lr", "1e38", "--table-optimizer", "sgd", "--table-lr", "1e38"]
    result = train(tmp_path, *flags, *rates, code=1)
    told = re.search(r"error: train: the loss is not a number at step (\d+) of (\d+): ", result.stderr)
    assert told and int(told[2]) == steps
    assert "with --lr 1e+38 and --table-lr 1e+38 the parameters have grown" in result.stderr
    assert "error: rank 0 failed first: train: the loss is not a number" in result.stderr
    folder = next(tmp_path.glob("*/report.html")).parent
    assert str(folder / "report.html") in result.stdout and "judged" not in result.stdout
    lines = metrics(folder)
    assert len(lines("step")) == int(told[1])
    assert (lines("eval") if steps == 1 else lines("step"))[-1]["log_loss" if steps == 1 else "loss"] is None
    assert not (folder / "checkpoints" / f"step-{int(told[1]):012d}").exists()


def test_a_resumed_run_says_what_it_begins_with(tmp_path):
    flags = ["--batch", "32", "--steps", "6", "--checkpoint-every", "3"]
    whole, _ = answer(tmp_path, *flags)
    folder = pathlib.Path(whole["report"]).parent
    config = folder / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("dim=8", "dim=16").replace('bottom="16,8"', 'bottom="16,16"'))
    wider = resume(folder, code=65).stderr
    assert "tensor 'tables.embedding_bags.cat_0.weight' is F32 [200, 8], the state wants [200, 16]" in wider
    config.write_text(text)
    newest = folder / "checkpoints" / "step-000000000006"
    for file in newest.glob("*.safetensors"):
        os.truncate(file, 100)
    result = resume(folder)
    assert "resumed  at step 3\n" in result.stdout
    assert "step 3 is loaded instead of a newer one: " in result.stderr and str(newest) in result.stderr
    shutil.rmtree(folder / "checkpoints")
    assert f"resumed  at the beginning: {folder} has no checkpoint\n" in resume(folder).stdout


def criteo_line(generator):
    numbers = ["" if generator.random() < 0.1 else str(generator.randrange(100)) for _ in range(13)]
    words = ["" if generator.random() < 0.1 else f"{generator.randrange(1 << 32):08x}" for _ in range(26)]
    return "\t".join([str(generator.randrange(2)), *numbers, *words])


def test_a_criteo_file_with_broken_lines(tmp_path):
    generator = random.Random(3)
    lines = [criteo_line(generator) for _ in range(600)]
    lines[10] = "0\t1\t2"
    lines[200] = lines[200].replace("\t", " ")
    lines[599] = "x" + lines[599][1:]
    data = tmp_path / "day.tsv"
    data.write_text("\n".join(lines) + "\n")
    flags = ["-n", "2", "--data", str(data), "--batch", "50", "--steps", "8", "--rows", "50"]
    result = train(tmp_path, *flags)
    assert f"data     3 bad lines of 600 in {data} are left out" in result.stdout
    assert "line 11: " in result.stdout and "line 201: " in result.stdout
    folder = next(tmp_path.glob("*/metrics.jsonl")).parent
    assert len(metrics(folder)("step")) == 8  # more than the file has in one go
    assert metrics(folder)("eval")[-1]["samples"] == 59  # a tenth of 597
    data.write_text("nothing\n")
    assert train(tmp_path, *flags, code=65).stderr.count("error: ") >= 1


def test_criteos_text_in_several_files_trains_as_in_one(tmp_path):
    text = tmp_path / "whole.tsv"
    words = ["data", "synth", text, "--format", "text", "--samples", "1500", "--rows", "50"]
    subprocess.run([TESSERA, *map(str, words)], check=True, capture_output=True, timeout=LIMIT)
    lines = text.read_bytes().splitlines(keepends=True)
    (tmp_path / "part_0.tsv").write_bytes(b"".join(lines[:400]))
    (tmp_path / "part_1.tsv.gz").write_bytes(gzip.compress(b"".join(lines[400:])))
    flags = ["-n", "2", "--rows", "50", "--batch", "50", "--steps", "10", "--checkpoint-every", "5"]
    whole, _ = answer(tmp_path / "whole", "--data", str(text), *flags)
    names = [str(tmp_path / name) for name in ("part_0.tsv", "part_1.tsv.gz")]
    for name, data in (("pattern", str(tmp_path / "part_*")), ("list", ",".join(names))):
        found, _ = answer(tmp_path / name, "--data", data, *flags)
        assert (found["fingerprint"], found["auc"]) == (whole["fingerprint"], whole["auc"]), name
        folder = pathlib.Path(found["report"]).parent
        head = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
        assert [file["path"] for file in head["data"]] == names
    resume(folder, "--steps", "12")
    judged = [TESSERA, "eval", str(folder), "--data", str(tmp_path / "part_*"), "--json"]
    done = subprocess.run(judged, check=True, capture_output=True, timeout=LIMIT)
    assert json.loads(done.stdout)["samples"] == 1500
    # Bad lines are named by their file; a log among texts is refused.
    broken = [b"rubbish\n", *lines[1:400]]
    (tmp_path / "part_0.tsv").write_bytes(b"".join(broken))
    result = train(tmp_path / "bad", *flags, "--data", str(tmp_path / "part_*"))
    assert f"data     1 bad lines of 1500 in {tmp_path}/part_* are left out" in result.stdout
    assert f"         {names[0]}: line 1: has 1 fields; 40 are needed" in result.stdout
    log = tmp_path / "part_2.click"
    subprocess.run(
        [TESSERA, "data", "convert", str(text), "--rows", "50", "--out", str(log)],
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    failed = train(tmp_path / "mixed", *flags, "--data", str(tmp_path / "part_*"), code=65)
    assert f"{log}: is a click log, which is read alone; only texts may be several." in failed.stderr


def test_a_converted_log_trains_as_its_text_and_resumes(tmp_path):
    text, binary = tmp_path / "day.tsv", tmp_path / "day.click"
    for words in (
        ["synth", text, "--format", "text", "--samples", "1500", "--rows", "50"],
        ["convert", text, "--to", binary, "--rows", "50"],
    ):
        command = [TESSERA, "data", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    flags = ["-n", "2", "--rows", "50", "--batch", "50", "--steps", "17", "--checkpoint-every", "5"]
    whole, lines = answer(tmp_path / "text", "--data", str(text), *flags)
    again, _ = answer(tmp_path / "binary", "--data", str(binary), *flags)
    assert again["fingerprint"] == whole["fingerprint"] and again["auc"] == whole["auc"]
    # 1350 samples are trained on: the log begins anew at step 13, in the pipeline's lookahead too.
    assert lines("eval")[-1]["samples"] == 150
    folder = pathlib.Path(again["report"]).parent
    shutil.rmtree(folder / "checkpoints" / "step-000000000017")
    command = [TESSERA, "train", "dlrm", "--resume", str(folder), "--json"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT)
    resumed = json.loads(result.stdout)
    assert resumed["first_step"] == 15
    for key in ("fingerprint", "loss", "auc", "log_loss"):
        assert resumed[key] == whole[key]


def test_help_fits_a_screen():
    for verb in (["train"], ["train", "dlrm"], ["report"]):
        result = subprocess.run([TESSERA, *verb, "--help"], capture_output=True, text=True, timeout=LIMIT)
        assert result.returncode == 0
        assert len(result.stdout.splitlines()) <= 60 and max(map(len, result.stdout.splitlines())) <= 80


def test_damage_that_is_found_while_reading_ahead_is_told(tmp_path):
    path = tmp_path / "clicks.click"
    command = [TESSERA, "data", "synth", str(path), "--samples", "4000", "--features", "3", "--rows", "50"]
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
    flags = ["-n", "2", "--steps", "20", "--batch", "64", "--data", str(path)]
    whole, _ = answer(tmp_path, *flags)
    assert whole["steps"] == 20
    raw = bytearray(path.read_bytes())
    raw[64 + 2000] = 7  # a label: the first block begins with them; of rank 1 in step 16
    path.write_bytes(raw)
    told = train(tmp_path, *flags, code=65).stderr
    assert f"{path}: block 0 is damaged: it holds a label that is neither 0 nor 1." in told
    last = max(tmp_path.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime_ns).parent
    assert len(metrics(last)("step")) in (13, 14)  # it comes when the pipeline asks for the batch
