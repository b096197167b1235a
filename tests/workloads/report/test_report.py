"""report.html holds the numbers of metrics.jsonl as JSON, and a browser draws them."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import pytest
import sample_run
from browser import needs_browser
from report_data import data_of

ROOT = pathlib.Path(__file__).resolve().parents[3]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
DLRM = ["--tables", "3", "--rows", "100", "--dim", "8", "--bottom", "16,8", "--top", "16,1", "--batch", "16"]
DLRM += ["--eval-samples", "200"]
LOOKS = [(width, dark) for width in (390, 768, 1280) for dark in (False, True)]


def make_report(folder: pathlib.Path, **shape) -> tuple[list[dict], str]:
    lines = sample_run.write(folder, **shape)
    result = subprocess.run([TESSERA, "report", folder], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"report   {folder}/report.html\n"
    return lines, (folder / "report.html").read_text()


def of_kind(lines: list[dict], kind: str) -> list[dict]:
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 300), (5, 3000), (1, 1)])
def test_the_page_holds_the_numbers(tmp_path, num_ranks, num_steps):
    lines, text = make_report(tmp_path, num_ranks=num_ranks, num_steps=num_steps)
    data = data_of(text)
    steps = {line["step"]: line for line in of_kind(lines, "step")}
    series = data["series"]
    assert len(series["step"]) == num_steps if num_steps <= 1600 else 800 <= len(series["step"]) <= 1602
    assert {1, num_steps} <= set(series["step"])
    names = {
        "loss": "loss",
        "speed": "samples_per_second",
        "seconds": "seconds",
        "exposed": "exposed_comm_seconds",
    }
    for shown, name in names.items():
        expected = [steps[step][name] for step in series["step"]]
        assert series[shown] == pytest.approx(expected, rel=1e-5), name
    if num_steps > 100:
        # Smooth: between the extremes, with the mean of what it smooths, and not moved to the right.
        losses, smooth = series["loss"], series["loss_mean"]
        assert min(losses) < min(smooth) and max(smooth) < max(losses)
    for row, line in zip(data["evals"], of_kind(lines, "eval"), strict=True):
        assert row == pytest.approx({key: value for key, value in line.items() if key != "kind"}, rel=1e-5)
    for row, line in zip(data["breakdowns"], of_kind(lines, "breakdown"), strict=True):
        for phase, time in line["phases"].items():
            assert row["phases"][phase] == [time["seconds"], time["waited"]]
    for row, line in zip(data["tables"], of_kind(lines, "table"), strict=True):
        assert row["name"] == line["name"]
        for shown, shard in zip(row["shards"], line["shards"], strict=True):
            assert shown == pytest.approx(shard, rel=1e-5)
    assert data["config"] == (tmp_path / "config.toml").read_text()
    assert data["num_logged"] == num_steps
    if num_steps > 1:
        assert data["resumed"] == [num_steps // 2]
        assert data["timeline"]["lanes"] == [[rank, 0] for rank in range(num_ranks)]


def test_nothing_of_the_run_becomes_markup(tmp_path):
    _, text = make_report(tmp_path)
    assert "<b>user" not in text and "<host>" not in text and "alert(" in text
    assert text.count("<script") == 2 and "http://" not in text and "https://" not in text


def test_a_killed_run_has_a_page(tmp_path):
    sample_run.write(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole[: len(whole) // 2])
    (tmp_path / "trace.json").unlink()
    subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60)
    data = data_of((tmp_path / "report.html").read_text())
    assert not data["has_ended"] and data["timeline"] is None and data["steps"] > 50


def test_a_folder_without_a_run_is_refused(tmp_path):
    result = subprocess.run([TESSERA, "report", tmp_path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 65
    assert f"report: cannot read {tmp_path}/metrics.jsonl: No such file or directory." in result.stderr
    result = subprocess.run([TESSERA, "report"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "error: report: name a run folder, as in runs/2026-11-15-1\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("run")
    make_report(folder, num_ranks=3)
    return folder


def cells(page, table: str) -> list[list[str]]:
    rows = page.evaluate(f"""[...document.querySelectorAll("#{table} tbody tr")].map(
        row => [...row.children].map(cell => cell.textContent.replaceAll("\\u202f", "")))""")
    assert rows, table
    return rows


@needs_browser
class TestInChromium:
    def test_complaints_would_be_seen(self, browser, tmp_path):
        (tmp_path / "broken.html").write_text(
            "<script>throw new Error('seen')</script><p style='width:2000px'>x"
        )
        page = browser.open(f"file://{tmp_path}/broken.html", 800)
        assert any("seen" in line for line in page.complaints)
        assert page.overflow() == ["P."]

    @pytest.mark.parametrize(("width", "dark"), LOOKS)
    def test_fits_and_says_nothing_against_the_page(self, browser, folder, width, dark):
        page = browser.open(f"file://{folder}/report.html", width, dark)
        assert page.complaints == [] and page.overflow() == []
        assert page.requests == [f"file://{folder}/report.html", "data:,"] or len(page.requests) == 1
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") != dark
        # No bare block: the figures fill their row, whatever the width.
        ends = page.evaluate("""(() => {
          const box = document.querySelector(".figures").getBoundingClientRect();
          const rows = new Map();
          for (const cell of document.querySelectorAll(".figures div")) {
            const at = cell.getBoundingClientRect();
            rows.set(Math.round(at.top), Math.max(rows.get(Math.round(at.top)) ?? 0, at.right));
          }
          return [...rows.values()].map(right => Math.abs(right - box.right));
        })()""")
        assert max(ends) < 2

    def test_every_chart_is_there_with_one_axis_of_steps(self, browser, folder):
        page = browser.open(f"file://{folder}/report.html")
        ids = page.evaluate("""[...document.querySelectorAll("figure.chart")].map(figure => figure.id)""")
        assert ids == [
            "loss",
            "auc",
            "normalized_entropy",
            "calibration",
            "reliability",
            "speed",
            "time",
            "rate",
        ]
        axes = page.evaluate("""Object.fromEntries([...document.querySelectorAll("figure.chart")].map(
            figure => [figure.id, [...figure.querySelectorAll(".x-name, .xs span")].map(
            one => one.textContent)]))""")
        assert axes.pop("reliability")[-1] == "predicted chance of a click"
        assert set(map(tuple, axes.values())) == {("0", "100", "200", "300", "step")}

    def test_evaluation_is_never_cut_off(self, browser, tmp_path):
        lines = sample_run.write(tmp_path)
        for line in lines:
            if line["kind"] == "eval":
                line["log_loss"] = 9.0 if line["step"] == 100 else 0.01
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html")
        path = page.evaluate("""document.querySelector("#loss .curve.c-eval").getAttribute("d")""")
        heights = [float(y) for _, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)]
        assert len(heights) == 6 and all(0 <= y <= 1000 for y in heights)

    def test_the_numbers_are_tables_too(self, browser, folder):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        page = browser.open(f"file://{folder}/report.html")
        steps = of_kind(lines, "step")
        rows = cells(page, "steps")
        assert [int(row[0]) for row in rows] == [step["step"] for step in steps]
        assert [float(row[1]) for row in rows] == pytest.approx([step["loss"] for step in steps], rel=1e-5)
        assert [float(row[4]) for row in rows] == pytest.approx(
            [1e3 * step["seconds"] for step in steps], rel=1e-5
        )
        keys = ["step", "log_loss", "auc", "normalized_entropy", "calibration", "samples"]
        for row, line in zip(cells(page, "evals"), of_kind(lines, "eval"), strict=True):
            assert [float(cell) for cell in row] == pytest.approx([line[key] for key in keys], rel=1e-5)
        titles = page.evaluate(
            """[...document.querySelectorAll("#breakdown thead th")].map(cell => cell.textContent)"""
        )
        for row, line in zip(cells(page, "breakdown"), of_kind(lines, "breakdown"), strict=True):
            for title, cell in zip(titles[1:-2], row[1:-2], strict=True):
                phase = title.replace("-", "_").replace(" ", "_")
                assert float(cell) == pytest.approx(
                    line["phases"][phase]["seconds"] / line["steps"] * 1e3, abs=5.1e-4
                )
        shards = [(t["name"], s["rank"], s["bytes"]) for t in of_kind(lines, "table") for s in t["shards"]]
        assert [(row[0], int(row[2]), int(row[5])) for row in cells(page, "placement")] == shards

    def test_says_how_it_ended_and_what_it_was(self, browser, folder):
        page = browser.open(f"file://{folder}/report.html")
        status = page.evaluate("""document.getElementById("status").innerText""")
        assert status.startswith("Finished at step 300")
        assert "Resumed at step 150" in status and f"tessera train dlrm --resume {folder}" in status
        text = page.text()
        for words in [
            "tessera train dlrm --ranks 2 --data '<clicks>.bin'",
            "/data/<clicks>.bin, 123 MB",
            "A CPU of some kind",
            'alert("no")',
            "last and best, step 300",
            "best possible 0.8113",
        ]:
            assert words in text, words
        assert page.evaluate("""document.querySelector("#timeline a").getAttribute("href")""") == "trace.json"
        assert cells(page, "facts")[0][0] == "command"
        memory = page.evaluate("""[...document.querySelectorAll("#memory em")].map(one => one.textContent)""")
        assert memory == ["812 MB", "822 MB", "832 MB"]

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            ("stopped", "Stopped at step 20 of 90"),
            ("stopped early", "Stopped early: no evaluation was better for a while, at step 20 of 90"),
            ("diverged", "Diverged"),
            (None, "Not finished"),
        ],
    )
    def test_other_ends_are_told(self, browser, tmp_path, status, words):
        lines = sample_run.write(tmp_path, num_steps=20)
        lines[0]["planned_steps"] = 90
        if status is None:
            lines.pop()
        else:
            lines[-1]["status"] = status
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html")
        assert page.complaints == []
        assert page.evaluate("""document.getElementById("status").innerText""").startswith(words)

    def test_the_best_is_named_beside_the_last(self, browser, tmp_path):
        lines = sample_run.write(tmp_path)
        lines[-1]["best_step"] = 100
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html")
        shown = page.evaluate("""[...document.querySelectorAll(".figures div")].map(one => [
            one.querySelector("dt"), one.querySelector("dd").firstChild, ...one.querySelectorAll("small")
            ].map(part => part.textContent))""")
        judged = {line["step"]: line for line in of_kind(lines, "eval")}
        assert shown[0] == [
            "Log loss",
            f"{judged[300]['log_loss']:.4f}",
            "last, step 300",
            f"best model {judged[100]['log_loss']:.6g}, step 100",
        ]

    def test_growing_tables_are_drawn_on_the_same_axis(self, browser, tmp_path):
        lines = sample_run.write(tmp_path)
        facts = {"admitted": 5, "refused": 1, "evicted": 0, "hit_rate": 0.5, "bytes": 4096}
        grown = [
            {
                "kind": "growth",
                "step": step,
                "ids": 10 * step,
                "tables": [{"name": "<b>", "ids": step, **facts}],
            }
            for step in (100, 200)
        ]
        # Killed after its last evaluation, so that no line says how many steps there were.
        text = "".join(json.dumps(line) + "\n" for line in [*lines[:-1], *grown])
        (tmp_path / "metrics.jsonl").write_text(text)
        subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html", 390)
        assert page.complaints == [] and page.overflow() == []
        axes = page.evaluate("""["loss", "ids"].map(id => [...document.getElementById(id).querySelectorAll(
            ".x-name, .xs span")].map(one => one.textContent))""")
        assert axes[0] == axes[1] and axes[0][-1] == "step"
        assert cells(page, "growth") == [["<b>", "200", "5", "1", "0", "50.0 %", "4.10 kB"]]

    @pytest.mark.parametrize(
        ("workload", "flags", "charts"),
        [
            ("dlrm", DLRM, {"auc", "normalized_entropy", "calibration", "reliability"}),
            ("lm", ["--batch", "4", "--length", "16", "--layers", "1", "--width", "16"], {"perplexity"}),
            ("gnn", ["--atoms", "27", "--structures", "4", "--features", "8", "--cutoff", "1.7"],
             {"energy_error", "force_error"}),
        ],
    )  # fmt: skip
    def test_every_workload_has_its_report(self, browser, tmp_path, workload, flags, charts):
        words = [TESSERA, "train", workload, "--ranks", "2", "--steps", "6", "--eval-every", "3", *flags]
        subprocess.run([*words, "--save", tmp_path], check=True, timeout=100, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html", 768)
        assert page.complaints == [] and page.overflow() == []
        ids = page.evaluate("""[...document.querySelectorAll("figure.chart")].map(figure => figure.id)""")
        assert set(ids) == {"loss", "speed", "time", "rate"} | charts
        assert page.evaluate("""document.getElementById("status").innerText""").startswith(
            "Finished at step 6"
        )
        facts = dict(row[:2] for row in cells(page, "facts"))
        assert facts["command"].startswith(f"tessera train {workload} --ranks 2") and facts["cpu"]
        memory = page.evaluate("""[...document.querySelectorAll("#memory em")].map(one => one.textContent)""")
        assert len(memory) == 2 and all(float(text.split()[0]) > 0 for text in memory)
        assert "ranks=2\n" in page.evaluate("""document.querySelector("#config pre").textContent""")
        figures = page.evaluate(
            """[...document.querySelectorAll(".figures small")].map(one => one.textContent)"""
        )
        assert any(text.startswith("last") and "step 6" in text for text in figures)

    def test_tables_fill_the_width_and_have_the_colour_of_their_traffic(self, browser, folder):
        page = browser.open(f"file://{folder}/report.html", 768)
        rooms = page.evaluate("""[...document.querySelectorAll(".room")].map(room => [
            room.offsetWidth, room.closest("main").clientWidth - 48, [...room.children].map(tile =>
            [tile.offsetWidth * tile.offsetHeight, tile.style.getPropertyValue("--heat"), tile.title])])""")
        assert len(rooms) == 3
        sizes = {}
        for width, whole, tiles in rooms:
            assert width == whole
            for area, heat, title in tiles:
                name = title.split(":")[0]
                sizes.setdefault(name, []).append(area)
                assert heat.endswith("%") and "read in a step" in title
        # Areas are bytes, on one scale: two tables of one kind are as their rows are.
        assert sizes["cat_1"][0] / sizes["cat_2"][0] == pytest.approx(
            (100_000 / 2**1.4 + 50) / (100_000 / 3**1.4 + 50), rel=0.05
        )

    def test_the_pointer_shows_numbers(self, browser, folder):
        page = browser.open(f"file://{folder}/report.html")
        box = page.evaluate(
            """(({left, top, width, height}) => [left, top, width, height])(
            document.querySelector("#loss .area").getBoundingClientRect())"""
        )
        assert page.evaluate("""document.querySelector("#loss .tip").hidden""")
        page.move(box[0] + box[2] / 2, box[1] + box[3] / 2)
        tip = page.evaluate("""document.querySelector("#loss .tip").innerText""")
        assert tip.startswith("step 150") and "evaluation " in tip and "training, smooth" in tip

    def test_written_text_is_shown_and_stays_text(self, browser, tmp_path):
        lines = sample_run.write(tmp_path)
        said = [{"kind": "text", "step": step, "text": f"a <b>{step}</b>\nline"} for step in range(1, 31)]
        text = "".join(json.dumps(line) + "\n" for line in [*lines[:-1], *said, lines[-1]])
        (tmp_path / "metrics.jsonl").write_text(text)
        subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html", 390)
        assert page.complaints == [] and page.overflow() == []
        rows = page.evaluate("""[...document.querySelectorAll("#texts tr")].map(
            row => [...row.children].map(cell => cell.textContent))""")
        assert rows == [[f"step {step}", f"a <b>{step}</b>\nline"] for step in range(11, 31)]

    @pytest.mark.parametrize(("width", "dark"), LOOKS)
    def test_two_runs_on_one_page(self, browser, tmp_path, width, dark):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            sample_run.write(tmp_path / name)
        command = [TESSERA, "runs", "diff", tmp_path / "one", tmp_path / "two"]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/two/compare.html", width, dark)
        assert page.complaints == [] and page.overflow() == []
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") != dark
        curves = page.evaluate("""[...document.querySelectorAll("figure.chart")].map(
            figure => figure.querySelectorAll("path.curve").length)""")
        assert len(curves) == 6 and set(curves) == {2}

    def test_an_empty_run_is_a_page(self, browser, tmp_path):
        (tmp_path / "metrics.jsonl").write_text('{"kind":"run","workload":"lm","ranks":1}\n')
        subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60, capture_output=True)
        page = browser.open(f"file://{tmp_path}/report.html")
        assert page.complaints == [] and "No step was logged." in page.text()
