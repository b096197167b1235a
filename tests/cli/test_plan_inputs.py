"""What plans are made from: a machine that was measured, ids that were counted."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import time

import pytest
from report_data import data_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 120.0  # seconds; for a loaded machine, not a figure


def tessera(*words, code=0, **env):
    result = subprocess.run(
        [TESSERA, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "TESSERA_PROFILE": "assume", **env},
    )
    assert code is None or result.returncode == code, result.stdout + result.stderr
    return result


def profile(memory=20e9, host=4e9, row=10e-9, **changes):
    return {
        "kind": "tessera machine profile",
        "machine": "a processor",
        "version": "0.1.0",
        "engine": "shm",
        "ranks": 2,
        **changes,
        "threads_per_rank": 1,
        "spread": 0.01,
        "curves": {
            "rows": [[size, row + size / memory] for size in (64, 256, 1024)],
            "steps": [[size, 40e-9 + size / memory] for size in (200, 3000)],
            "host": [[size, 5e-6 + size / host] for size in (1e3, 1e6)],
            "all_reduce": [[size, 5e-6 + size / host] for size in (1e3, 1e6)],
            "dense": [[size, 1e-5 + size / 30e9] for size in (1e6, 1e9)],
        },
    }


def test_a_machine_is_measured_kept_and_used(tmp_path):
    kept = tmp_path / "cache" / "machine.json"
    told = tessera("doctor", "--profile", "--quick", "-n", 2, TESSERA_PROFILE=str(kept)).stdout
    assert f"profile  {kept}" in told and "assumed  links between hosts" in told
    found = json.loads(kept.read_text())
    assert found["ranks"] == 2 and found["engine"] == "shm"
    assert set(found["curves"]) == {"rows", "steps", "parts", "host", "all_reduce", "dense"}
    for curve in found["curves"].values():
        assert [point[1] for point in curve] == sorted(point[1] for point in curve)
    planned = tessera("plan", "tables", "--search", "-n", 2, TESSERA_PROFILE=str(kept)).stdout
    assert planned.splitlines()[1].endswith("; measured")
    assert "--out, --ranks and --nnodes are for --profile" in tessera("doctor", "-n", 2, code=2).stderr


def test_measuring_ends_in_the_time_that_is_promised(tmp_path):
    kept = tmp_path / "machine.json"
    begin = time.monotonic()
    told = tessera("doctor", "--profile", "-n", 2, "--out", kept).stdout
    assert time.monotonic() - begin <= 20
    found = json.loads(kept.read_text())
    # Four ways to cut tables in six loads, and what there was no time for is counted and told.
    left_out = found.get("left_out", 0)
    points = sum(len(found["curves"].get(key, ())) for key in ("rows", "parts", "host", "dense"))
    assert len(found.get("passes", ())) + points + left_out == 24 + 5 + 2 + 6 + 3
    assert (f"{left_out} things were not measured" in told) == (left_out > 0)


def test_hosts_are_measured_with_what_lies_between_them(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef0123456789")
    secret.chmod(0o600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["doctor", "--profile", "--quick", "-n", 2, "--nnodes", 2, "--secret-file", secret]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-timeout", 60]
    kept = [tmp_path / f"{host}.json" for host in (0, 1)]
    hosts = [
        subprocess.Popen(
            [TESSERA, *map(str, [*words, "--node-rank", host, "--out", kept[host]])],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for host in (0, 1)
    ]  # fmt: skip
    for host, process in enumerate(hosts):
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, out + err
        found = json.loads(kept[host].read_text())
        assert found["ranks"] == 2
        between = {"network", "network_all_reduce"}
        assert set(found["curves"]) == {"rows", "steps", "parts", "host", "all_reduce", "dense"} | between
        assert all(len(found["curves"][key]) + found.get("left_out", 0) >= 6 for key in between)
        assert " between hosts\n" in out and "assumed" not in out
        # Plans of several hosts go by it.
        plan = ["plan", "tables", "--search", "--json", "-n", 4, "--hosts", 2, "--profile", kept[host]]
        assert json.loads(tessera(*plan).stdout)["assumed"] == []
    assert "--nnodes are for --profile" in tessera("doctor", *words[5:], code=2).stderr
    bad = tessera("doctor", "--profile", "--nnodes", 2, code=2).stderr
    assert "doctor: --nnodes 2 needs --rdzv-endpoint" in bad


def test_speeds_are_those_of_the_profile_unless_given(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(profile()))
    shape = ["plan", "tables", "--search", "-n", 2, "--profile", file]
    line = tessera(*shape).stdout.splitlines()[1]
    assert line == "speeds   20 GB/s in memory, 4 in a host, 12.5 between hosts; measured"
    line = tessera(*shape, "--memory-speed", 51).stdout.splitlines()[1]
    assert line.startswith("speeds   51 GB/s in memory, 4 in a host")
    # The worker's table goes by the same.
    assert tessera(*shape[:2], *shape[3:]).stdout.splitlines()[1].endswith("; measured")
    file.write_text("{}")
    assert "is no profile of tessera doctor" in tessera(*shape, code=65).stderr
    assert "there is no file" in tessera(*shape[:-1], tmp_path / "other", code=65).stderr


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def test_a_profile_of_another_machine_is_not_used_unless_named(tmp_path):
    kept = tmp_path / "tessera" / "machine.json"
    kept.parent.mkdir()
    kept.write_text(json.dumps(profile()))
    shape = ["plan", "tables", "--search", "-n", 2]
    where = {"TESSERA_PROFILE": "", "XDG_CACHE_HOME": str(tmp_path)}
    elsewhere = f"profile  {kept} was measured on a processor (here {processor()})"
    for words in (shape, ["plan", "tables", "-n", 2]):  # the second one is the worker's
        done = tessera(*words, **where)
        assert done.stdout.splitlines()[1].endswith("; assumed")
        assert done.stderr.startswith(f"{elsewhere}, so it is not used: ")
        done = tessera(*words, "--profile", kept, **where)
        assert done.stdout.splitlines()[1].endswith("; measured")
        assert done.stderr == f"{elsewhere}: tessera doctor --profile measures again\n"
        done = tessera(*words, TESSERA_PROFILE=str(kept))
        assert done.stdout.splitlines()[1].endswith("; measured") and elsewhere in done.stderr
    # This machine's is used, but not for tables on GPUs; other ranks and another version are told.
    kept.write_text(json.dumps(profile(machine=processor())))
    for words in (shape, ["plan", "tables", "-n", 2]):
        done = tessera(*words, "--device", "cuda", **where)
        line = "speeds   963 GB/s in memory, 644 in a host, 13.4 between hosts; assumed"
        assert done.stdout.splitlines()[1] == line and done.stderr == ""
        done = tessera(*words, "--device", "cuda", "--profile", kept, **where)
        assert done.stdout.splitlines()[1].endswith("; measured")
        assert done.stderr == (
            f"profile  {kept} was measured on {processor()}, and the tables are on GPUs: --profile assume "
            "leaves it out\n"
        )
    done = tessera(*shape, **where)
    assert done.stdout.splitlines()[1].endswith("; measured") and done.stderr == ""
    kept.write_text(json.dumps(profile(machine=processor(), version="0.0.1")))
    done = tessera(*shape[:-1], 8, "--hosts", 2, **where)
    assert done.stdout.splitlines()[1].endswith("; measured")
    differs = "with 2 ranks (here 4), by version 0.0.1 (here 0.1.0)"
    assert done.stderr.startswith(f"profile  {kept} was measured {differs}: ")


def test_json_has_the_profile_and_what_is_assumed(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(profile(machine=processor())))
    shape = ["plan", "tables", "--search", "--json", "-n", 2]
    found = json.loads(tessera(*shape).stdout)
    assert found["profile"] is None
    assert found["assumed"] == ["memory", "links in a host", "links between hosts"]
    found = json.loads(tessera(*shape, "--profile", file, "--network-speed", 10).stdout)
    assert found["assumed"] == []
    key = {"machine": processor(), "ranks": 2, "engine": "shm", "version": "0.1.0"}
    assert found["profile"] == {**key, "spread": 0.01, "differs": ""}
    found = json.loads(tessera(*shape[:-1], 4, "--profile", file).stdout)
    assert found["assumed"] == ["links between hosts"]
    assert found["profile"]["differs"] == "with 2 ranks (here 4)"
    kept = tmp_path / "result.json"
    kept.write_text(json.dumps(found))
    words = [word for word in shape[:-1] if word != "--json"]
    assert "holds" in tessera(*words, 4, "--profile", file, "--check", kept).stdout


def test_every_rank_of_a_training_has_the_speeds_of_its_machine(tmp_path):
    # A worker for every rank, as if each ran on another host.
    for rank, memory in ((0, 5e8), (1, 2e10), (2, 5.5e8)):
        name = "fast" if rank == 1 else "slow"
        (tmp_path / f"{rank}.json").write_text(json.dumps(profile(memory, machine=name, ranks=3)))
    worker = tmp_path / "worker"
    real = os.environ.get("TESSERA_WORKER", str(pathlib.Path(TESSERA).with_name("tessera-worker")))
    worker.write_text(
        f'#!/bin/sh\n[ -n "$RANK" ] && export TESSERA_PROFILE={tmp_path}/$RANK.json\nexec {real} "$@"\n'
    )
    worker.chmod(0o755)
    train = ["train", "dlrm", "-n", 3, "--tables", 24, "--rows", 300, "--dim", 8, "--bottom", "16,8"]
    train += ["--top", "16,1", "--batch", 256, "--bag", 20, "--steps", 2, "--eval-samples", 64]
    out = tessera(*train, "--runs", tmp_path / "runs", TESSERA_WORKER=str(worker)).stdout
    for rank, machine in ((0, "slow"), (1, "fast"), (2, "slow")):
        assert f"{rank}.json, measured with 3 ranks on {machine} (1 of 3 ranks)" in out
        assert f"{rank}.json was measured on {machine} (here " in out
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    held = [0] * 3
    for line in lines:
        for shard in line.get("shards", ()) if line["kind"] == "table" else ():
            held[shard["rank"]] += shard["traffic"]
    # A much faster memory gets several times the rows; two machines of a kind are taken to be alike.
    assert held[1] > 3 * max(held[0], held[2]) and abs(held[0] - held[2]) <= 0.5 * held[0]
    # A file that is named is for all ranks; one that is none is told of its rank.
    (tmp_path / "2.json").write_text("{}")
    train += ["--runs", tmp_path / "more"]
    bad = tessera(*train, TESSERA_WORKER=str(worker), code=None)
    assert bad.returncode != 0 and "rank 2: plan: / is no profile of tessera doctor" in bad.stderr
    out = tessera(*train, "--profile", tmp_path / "1.json", TESSERA_WORKER=str(worker)).stdout
    assert "1.json, measured with 3 ranks on fast\n" in out


def test_a_training_says_what_was_predicted(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(profile()))
    train = ["train", "dlrm", "-n", 2, "--tables", 3, "--rows", 300, "--dim", 8, "--bottom", "16,8"]
    train += ["--top", "16,1", "--batch", 32, "--steps", 5, "--eval-samples", 64, "--runs", tmp_path]
    out = tessera(*train, "--profile", file).stdout
    assert f"speeds   of {file}, measured with 2 ranks on a processor" in out
    assert " a step, no plan can be under " in out and "plan     predicted " in out
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (plan,) = [line for line in lines if line["kind"] == "plan"]
    assert plan["speeds"] == "measured" and plan["bound"] <= plan["seconds"] * (1 + 1e-9)
    parts = [plan["predicted"][part] for part in ("links", "lookup", "dense", "backward", "other")]
    assert plan["predicted"]["total"] == pytest.approx(sum(parts))
    assert len(plan["ranks"]) == 2
    slowest = max(
        sum(rank[p] for p in ("ids", "lookup", "rows", "gradients", "step")) for rank in plan["ranks"]
    )
    assert slowest == pytest.approx(plan["seconds"])
    drawn = data_of((metrics.parent / "report.html").read_text())["plan"]
    assert drawn["predicted"] == pytest.approx(plan["predicted"])
    assert set(drawn["measured"]) >= {"links", "lookup", "dense", "backward"}
    # The run makes the profile better; a run without a prediction cannot.
    told = tessera("plan", "tables", "--profile", file, "--calibrate", metrics.parent).stderr
    assert told.startswith(f"calibrated {file}: links ")
    calibration = json.loads(file.read_text())["calibration"]
    assert calibration["run"] == str(metrics.parent)
    assert all(0.5 <= calibration[part] <= 2 for part in ("links", "lookup", "step", "dense"))
    # Factors are beside those of the prediction, not of today: the same run again changes nothing.
    assert plan["calibration"] == {"links": 1, "lookup": 1, "step": 1, "dense": 1}
    assert tessera("plan", "tables", "--profile", file, "--calibrate", metrics.parent).stderr == told
    assert json.loads(file.read_text())["calibration"] == calibration
    # One that does not tell its factors cannot calibrate.
    older = tmp_path / "of" / "old"
    older.mkdir(parents=True)
    del plan["calibration"]
    kept = [line if line["kind"] != "plan" else plan for line in lines]
    (older / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    words = ["plan", "tables", "--profile", file, "--calibrate", older]
    assert "does not say which calibration it was predicted with" in tessera(*words, code=65).stderr
    assert "speeds   assumed; tessera doctor --profile" in tessera(*train).stdout
    other = next(one for one in tmp_path.glob("*/metrics.jsonl") if one != metrics)
    words = ["plan", "tables", "--profile", file, "--calibrate", other.parent]
    assert "no prediction" in tessera(*words, code=65).stderr
    assert "no profile of this machine" in tessera(*words[:2], *words[4:], code=65).stderr


def test_a_plan_is_improved_by_moving_little(tmp_path):
    tables = [{"name": f"t{i}", "rows": 100_000 + i, "dim": 64, "ids": 5} for i in range(40)]
    listed, before, after = tmp_path / "t.json", tmp_path / "before.json", tmp_path / "after.json"
    listed.write_text(json.dumps({"tables": tables}))
    words = ["plan", "tables", "--search", "-n", 4, "--table-list", listed]
    tessera(*words, "--write", before)
    tables[7]["rows"] *= 2
    tables[7]["ids"] = 30
    tables[8]["name"] = "new"
    listed.write_text(json.dumps({"tables": tables}))
    told = tessera(*words, "--previous", before, "--max-moved", "5%", "--write", after).stdout
    assert "\nmoved    " in told and " -> " in told
    found = json.loads(tessera(*words, "--previous", before, "--json").stdout)
    assert 0 < found["moved_bytes"] <= 0.05 * found["total_bytes"]
    assert found["plan_seconds"] < found["previous_seconds"]
    assert found["appeared"] == ["new"] and found["vanished"] == ["t8"]
    assert found["changed"] == ["t7"]
    for line in ("new      1 table: new", "gone     1 table: t8", "changed  1 table: t7"):
        assert f"\n{line}\n" in told
    # Only what is listed has moved.
    old = json.loads(before.read_text())["modules"]["tables"]
    new = json.loads(after.read_text())["modules"]["tables"]
    changed = {name for name in old if name in new and old[name]["ranks"] != new[name]["ranks"]}
    assert changed <= {move["table"] for move in found["moves"]}
    result = tmp_path / "result.json"
    result.write_text(json.dumps(found))
    assert "holds" in tessera(*words[:2], *words[3:], "--check", result).stdout
    # What moves is paid back by the steps that are left.
    assert " paid back by " in told
    again = [*words, "--previous", before, "--json"]
    short = json.loads(tessera(*again, "--steps-left", 1).stdout)
    assert 0 < short["moved_bytes"] < found["moved_bytes"]
    assert 0 < short["moving_seconds"] < short["previous_seconds"] - short["plan_seconds"]
    assert json.loads(tessera(*again, "--steps-left", 1e12).stdout)["moves"] == found["moves"]
    assert "--steps-left is for --previous" in tessera(*words, "--steps-left", 9, code=2).stderr
    assert "--max-moved is for --previous" in tessera(*words, "--max-moved", "5%", code=2).stderr
    assert "--steps-left" in tessera(*again, "--steps-left", 0, code=2).stderr
    for share in ("much", "-1%", "101%"):
        refused = tessera(*words, "--previous", before, "--max-moved", share, code=2)
        assert "--max-moved" in refused.stderr


def test_ids_of_a_log_are_counted_and_change_the_plan(tmp_path):
    log, stats = tmp_path / "a.click", tmp_path / "stats.json"
    tessera("data", "synth", log, "--samples", 20000, "--features", 3, "--rows", "5000", "--bag", 4)
    told = tessera("data", "stats", log, "--write", stats).stdout.splitlines()
    assert len(told) == 4 and max(map(len, told)) <= 100
    found = json.loads(stats.read_text())["features"]
    assert [feature["name"] for feature in found] == ["cat_0", "cat_1", "cat_2"]
    for feature in found:
        assert feature["ids_per_sample"]["mean"] == 4 and feature["ids"] == 80000
        assert feature["curve"][-1] == [80000, feature["distinct"]]
        assert sum(feature["ranges"]) == 80000 and 0 < feature["distinct"] <= 5000
    # Fewer rows are touched than even ids would touch, so a step is shorter.
    shape = ["plan", "tables", "--search", "--json", "-n", 2, "--data", log, "--batch", 500]
    even = json.loads(tessera(*shape, "--bag", 4).stdout)
    counted = json.loads(tessera(*shape, "--stats", stats).stdout)
    assert {table["ids"] for table in counted["tables"]} == {4}
    assert counted["plan_seconds"] < even["plan_seconds"]
    # The same without --search, and what is said of every rank and sharding goes by them, too.
    table = ["plan", "tables", "--json", "-n", 2, "--data", log, "--batch", 500]
    shown, plain = (json.loads(tessera(*table, *more).stdout) for more in (["--stats", stats], ["--bag", 4]))
    assert {one["ids"] for one in shown["tables"]} == {4}
    assert shown["step_seconds"] == pytest.approx(counted["plan_seconds"])
    assert max(rank["seconds"]["total"] for rank in shown["per_rank"]) == pytest.approx(
        counted["plan_seconds"]
    )
    for one, other in zip(shown["choices"], plain["choices"], strict=True):
        assert one["slowest_rank_seconds"] < other["slowest_rank_seconds"], one["sharding"]
    stats.write_text(stats.read_text().replace("cat_", "dog_"))
    assert "has none of the tables" in tessera(*shape, "--stats", stats, code=65).stderr


def test_rows_are_cut_by_how_often_they_are_asked_for_and_train(tmp_path):
    log, stats, plan = tmp_path / "a.click", tmp_path / "stats.json", tmp_path / "plan.json"
    tessera("data", "synth", log, "--samples", 20000, "--features", 1, "--rows", "5000", "--bag", 8)
    tessera("data", "stats", log, "--write", stats)
    shape = ["plan", "tables", "--search", "--json", "-n", 2, "--data", log, "--dim", 4, "--batch", 500]
    even = json.loads(tessera(*shape).stdout)["tables"][0]
    found = json.loads(tessera(*shape, "--stats", stats, "--write", plan).stdout)["tables"][0]
    assert even["type"] == found["type"] == "row_wise"
    assert [shard[2] for shard in even["shards"]] == [2500, 2500]
    row, _, rows, _, _ = found["shards"][1]
    assert row != 2500 and row + rows == 5000
    (feature,) = json.loads(stats.read_text())["features"]
    ends = [(k + 1) * 5000 / 1024 for k in range(1024)]
    below = sum(count for end, count in zip(ends, feature["ranges"], strict=True) if end <= row)
    assert 0.45 <= below / feature["ids"] <= 0.55
    train = ["train", "dlrm", "-n", 2, "--data", log, "--dim", 4, "--bottom", "8,4", "--top", "8,1"]
    train += ["--batch", 64, "--steps", 3, "--eval-samples", 64, "--runs", tmp_path, "--plan", plan]
    assert "loss" in tessera(*train).stdout
