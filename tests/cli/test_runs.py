"""`tessera runs`: what is listed of run folders, whole and damaged, and two of them compared."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def runs(folder, *words, code=0):
    result = subprocess.run(
        [TESSERA, "runs", *map(str, words)], capture_output=True, text=True, timeout=30, cwd=folder
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code == 0 else result.stderr


def write_run(folder, name, rate, steps, ends=True):
    path = folder / "runs" / name
    path.mkdir(parents=True)
    (path / "config.toml").write_text(f'ranks = 2\nlr = {rate}\nbatch = 64\nsave = "{name}"\n')
    lines = [{"kind": "run", "workload": "dlrm", "ranks": 2, "unit": "samples", "started": "2026-11-15"}]
    for step in range(1, steps + 1):
        lines.append(
            {"kind": "step", "step": step, "loss": 1 / step, "seconds": 0.5, "samples_per_second": 128}
        )
        if step % 10 == 0:
            lines.append({"kind": "eval", "step": step, "log_loss": 2 / step + rate, "auc": 0.5 + rate})
    if ends:
        end = {"kind": "end", "steps": steps, "seconds": 0.5 * steps, "samples": 64, "status": "finished"}
        lines.append({**end, "best_step": 20, "peak_memory_bytes": [1000, 2000]})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, "2026-11-15-2", 0.25, 30)
    write_run(tmp_path, "2026-11-15-10", 0.125, 20)
    write_run(tmp_path, "2026-11-16-1", 0.5, 5, ends=False)
    broken = tmp_path / "runs/broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text('{"kind":"run"}\n{"kind"\n{"kind":"end"}\n')
    (tmp_path / "runs/no run").mkdir()
    return tmp_path


def test_runs_are_listed_in_order_and_a_broken_one_hides_none(folder):
    lines = runs(folder).splitlines()
    assert [line.split()[0] for line in lines] == [
        "run",
        "2026-11-15-2",
        "2026-11-15-10",
        "2026-11-16-1",
        "broken",
    ]
    assert lines[1].split()[1:4] == ["dlrm", "finished", "30"]
    assert lines[1].endswith("log loss 0.316667, auc 0.75")
    assert "not finished" in lines[3] and lines[3].endswith("loss 0.2")
    assert "damaged" in lines[4] and "line 2" in lines[4]
    told = json.loads(runs(folder, "--json"))
    assert [one["status"] for one in told] == ["finished", "finished", "not finished", "damaged"]
    assert (told[0]["auc"], told[0]["best_step"], told[2]["steps"]) == (0.75, 20, 5)
    assert runs(folder / "runs/no run") == "there is no run in runs\n"
    assert json.loads(runs(folder / "runs/no run", "--json")) == []


def test_two_runs_are_compared(folder):
    text = runs(folder, "diff", "2026-11-15-2", "runs/2026-11-15-10")
    assert "settings that differ\n  lr  0.25  0.125\n" in text
    cells = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    rows = {name: values for name, *values in cells}
    assert rows["steps"] == ["30", "20"] and rows["best at step"] == ["20", "20"]
    assert rows["last auc"] == ["0.75", "0.625"]
    page = (folder / "runs/2026-11-15-10/compare.html").read_text()
    assert "Training loss" in page and "http" not in re.sub(r"http-equiv|http:\" \+", "", page)
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    shown = json.loads(text)
    assert [run["name"] for run in shown["runs"]] == ["2026-11-15-2", "2026-11-15-10"]
    assert [len(run["evals"]) for run in shown["runs"]] == [3, 2]
    assert shown["settings"] == [["lr", "0.25", "0.125"]] and ["steps", "30", "20"] in shown["figures"]
    told = json.loads(
        runs(folder, "diff", "2026-11-15-2", "2026-11-15-10", "--json", "--out", folder / "page.html")
    )
    assert told["settings"] == {"lr": ["0.25", "0.125"]} and told["figures"]["steps"] == ["30", "20"]
    assert (folder / "page.html").read_text() == page
    assert "settings are the same" in runs(folder, "diff", "2026-11-15-2", "2026-11-15-2")


def test_settings_are_compared_by_what_they_say_not_by_how_they_are_written(folder):
    configs = [
        "lr = 0.25\ntop = \"a = b # c\"\nids = 'rows'\n[growth]\nbytes = 10\n",
        'ids="rows"\n# lr = 9\nlr = 2.5e-1  # as before\ntop = "a = d"\n[growth]\nbytes = 20\nshare = 1\n',
    ]
    for name, config in zip(("2026-11-15-2", "2026-11-15-10"), configs, strict=True):
        (folder / "runs" / name / "config.toml").write_text(config)
    told = json.loads(runs(folder, "diff", "2026-11-15-2", "2026-11-15-10", "--json"))
    assert told["settings"] == {
        "top": ["a = b # c", "a = d"],
        "growth.bytes": ["10", "20"],
        "growth.share": ["", "1"],
    }


def test_a_config_that_cannot_be_read_is_named(folder):
    (folder / "runs/2026-11-15-10/config.toml").write_text("lr = 0.25\nbatch: 64\n")
    said = runs(folder, "diff", "2026-11-15-2", "2026-11-15-10", code=78)
    assert "runs: 2026-11-15-10/config.toml, line 2: 'batch: 64' is not a setting" in said


def test_a_run_that_is_compared_is_not_written(folder):
    names = ("2026-11-15-2", "2026-11-15-10")
    (folder / "page.html").symlink_to(f"runs/{names[0]}/metrics.jsonl")
    for out in ("page.html", f"runs/{names[1]}/config.toml"):
        before = (folder / out).read_bytes()
        said = runs(folder, "diff", *names, "--out", out, code=65)
        assert said.startswith(f"error: runs: {out}: is read and cannot be written too.")
        assert (folder / out).read_bytes() == before


def test_what_is_no_run_is_named(folder):
    said = runs(folder, "diff", "2026-11-15-3", "2026-11-15-2", code=65)
    assert "there is no run in 2026-11-15-3" in said and "did you mean 2026-11-15-2" in said
    assert "there is no folder nowhere" in runs(folder, "nowhere", code=65)
    assert "compares two runs" in runs(folder, "diff", "2026-11-15-2", code=2)
    assert "cannot be written" in runs(
        folder, "diff", "2026-11-15-2", "2026-11-15-10", "--out", folder / "no/page.html", code=65
    )
    assert "line 2" in runs(folder, "diff", "2026-11-15-2", "broken", code=65)
