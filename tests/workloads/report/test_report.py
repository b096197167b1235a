"""report.html holds the numbers of metrics.jsonl and opens without a complaint of the browser."""

from __future__ import annotations

import html.parser
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import sample_run

ROOT = pathlib.Path(__file__).resolve().parents[3]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
EMPTY = {"meta", "link", "br", "path", "rect", "input", "img", "hr"}  # elements without an end


class Page(html.parser.HTMLParser):
    """Tables by id, and whether every element that begins also ends."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] | None = None
        self.outside: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        for key in ("src", "href", "action"):
            if key in values and not values[key].startswith("data:"):
                self.outside.append(values[key])
        if tag not in EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.rows = self.tables.setdefault(values.get("id", ""), [])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def make_report(folder: pathlib.Path, **shape) -> tuple[list[dict], str]:
    lines = sample_run.write(folder, **shape)
    result = subprocess.run([TESSERA, "report", folder], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"report   {folder}/report.html\n"
    return lines, (folder / "report.html").read_text()


def of_kind(lines: list[dict], kind: str) -> list[dict]:
    return [line for line in lines if line["kind"] == kind]


def check_numbers(lines: list[dict], page: Page):
    steps = of_kind(lines, "step")
    for table, key, factor in [
        ("steps", "loss", 1),
        ("speeds", "samples_per_second", 1),
        ("seconds", "seconds", 1e3),
    ]:
        shown = {int(row[0]): float(row[1]) for row in page.tables[table][1:]}
        assert len(shown) == min(len(steps), 400)
        assert {steps[0]["step"], steps[-1]["step"]} <= set(shown)
        for step in steps:
            if step["step"] in shown:
                assert shown[step["step"]] == pytest.approx(step[key] * factor, rel=1e-5)
    evals = of_kind(lines, "eval")
    assert len(page.tables["evals"]) == len(evals) + 1
    for row, line in zip(page.tables["evals"][1:], evals, strict=True):
        keys = ["step", "log_loss", "auc", "normalized_entropy", "calibration", "samples"]
        assert [float(cell) for cell in row] == pytest.approx([line[key] for key in keys], rel=1e-5)
    head, *rows = page.tables["breakdown"]
    names = {"input dist": "input_dist", "output dist": "output_dist", "all-reduce": "all_reduce"}
    for row, line in zip(rows, of_kind(lines, "breakdown"), strict=True):
        for title, cell in zip(head[1:-2], row[1:-2], strict=True):
            expected = line["phases"][names.get(title, title)]["seconds"] / line["steps"] * 1e3
            assert float(cell) == pytest.approx(expected, abs=5.1e-4)
        waited = sum(time["waited"] for time in line["phases"].values()) / line["steps"] * 1e3
        assert float(row[-1]) == pytest.approx(waited, abs=5.1e-4)
    shards = [(t["name"], s["rank"], s["bytes"]) for t in of_kind(lines, "table") for s in t["shards"]]
    plain = [[cell.replace("\u202f", "") for cell in row] for row in page.tables["placement"][1:]]
    assert [(row[0], int(row[2]), int(row[5])) for row in plain] == shards


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(2, 300), (5, 3000), (1, 1)])
def test_the_page_shows_the_numbers(tmp_path, num_ranks, num_steps):
    lines, text = make_report(tmp_path, num_ranks=num_ranks, num_steps=num_steps)
    page = Page(text)
    check_numbers(lines, page) if num_steps > 1 else None
    assert page.outside == []  # nothing is fetched
    assert "http" not in re.sub(r"http-equiv", "", text)
    assert "<b>user" not in text and "alert(&quot;no&quot;)" in text


def test_a_killed_run_has_a_page(tmp_path):
    sample_run.write(tmp_path)
    whole = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(whole[: len(whole) // 2])
    (tmp_path / "trace.json").unlink()
    subprocess.run([TESSERA, "report", tmp_path], check=True, timeout=60)
    text = (tmp_path / "report.html").read_text()
    Page(text)
    assert "not finished" in text and "Timeline" not in text


def test_a_folder_without_a_run_is_refused(tmp_path):
    result = subprocess.run([TESSERA, "report", tmp_path], capture_output=True, text=True, timeout=60)
    assert result.returncode == 65
    assert f"report: cannot read {tmp_path}/metrics.jsonl: No such file or directory." in result.stderr
    result = subprocess.run([TESSERA, "report"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "error: report: name a run folder, as in runs/2026-11-15-1\n"


def browse(path: pathlib.Path, width: int, scheme: int) -> tuple[str, list[str]]:
    """The page after its scripts have run, and what the browser said about it."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    flags += [f"--window-size={width},900", f"--blink-settings=preferredColorScheme={scheme}"]
    flags += [f"--user-data-dir={path.parent / 'browser'}"]
    result = subprocess.run([BROWSER, *flags, f"file://{path}"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; the page is judged by its text alone")
class TestInChromium:
    def test_complaints_would_be_seen(self, tmp_path):
        (tmp_path / "broken.html").write_text("<script>throw new Error('seen')</script>")
        _, complaints = browse(tmp_path / "broken.html", 800, 1)
        assert any("seen" in line for line in complaints)

    @pytest.mark.parametrize(("width", "scheme"), [(1280, 1), (1280, 0), (500, 1), (500, 0)])
    def test_opens_without_complaints_and_fits(self, tmp_path, width, scheme):
        lines, text = make_report(tmp_path)
        dark = "matchMedia('(prefers-color-scheme: dark)').matches"
        seen = [
            "document.documentElement.scrollWidth",
            "innerWidth",
            dark,
            "document.querySelectorAll('.tip').length",
        ]
        probe = f"<script>document.title = [{', '.join(seen)}].join(' ')</script></body>"
        (tmp_path / "probed.html").write_text(text.replace("</body>", probe))
        shown, complaints = browse(tmp_path / "probed.html", width, scheme)
        assert complaints == []
        title = re.search(r"<title>(\d+) (\d+) (\w+) (\d+)</title>", shown)
        assert int(title[1]) <= int(title[2])  # nothing stands out at the side
        assert (title[3] == "true") == (scheme == 0)
        assert int(title[4]) == 4  # the script ran on every chart
        check_numbers(lines, Page(shown))
