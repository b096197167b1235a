"""Every example runs and says what its first lines promise."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESSERA = Path(os.environ["TESSERA_BIN"])


def run(*program, ranks=2):
    result = subprocess.run(
        [TESSERA, "run", "-n", str(ranks), "--", *map(str, program)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_average_gradients_finds_the_line(ranks):
    out = run(TESSERA.parent / "average_gradients", ranks=ranks)
    slope, offset = map(float, re.search(r"y = ([\d.]+) x \+ ([\d.]+)", out).groups())
    assert abs(slope - 2) < 1e-2 and abs(offset - 1) < 1e-2
    assert f"{ranks} ranks over shm" in out


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_program_of_the_readme_runs(ranks):
    """The main of page_samples.cpp; test_pages.py compares it with README.md."""
    assert run(TESSERA.parent / "page_samples", ranks=ranks) == ""


def test_torch_ddp_learns_over_shared_memory():
    out = run(sys.executable, "examples/torch_ddp.py")
    assert "2 ranks over shm" in out
    assert float(re.search(r"loss ([\d.e+-]+)", out).group(1)) < 1e-2


def test_growing_tables_are_the_same_on_any_number_of_ranks():
    answers = set()
    for ranks in (1, 2, 3):
        out = run(TESSERA.parent / "growing_tables", ranks=ranks)
        assert f"{ranks} ranks" in out
        answers.add(re.search(r"\d+ ids, \d+ of 9600 sightings had a row, loss [\d.]+", out).group(0))
    assert len(answers) == 1, answers


def test_growing_tables_of_python_learn():
    out = run(sys.executable, "examples/growing_tables.py")
    found = re.search(r"2 ranks: (\d+) ids, loss ([\d.]+)", out)
    assert found and int(found.group(1)) > 490 and float(found.group(2)) < 0.1, out


def test_split_graph_has_the_same_forces_on_any_number_of_ranks():
    answers = set()
    for ranks in (1, 2, 3):
        out = run(TESSERA.parent / "split_graph", ranks=ranks)
        assert f"{ranks} ranks" in out
        answers.add(re.search(r"energy [\d.]+, largest force [\d.]+", out).group(0))
    assert len(answers) == 1, answers


def test_ddp_train_loses_nothing_when_told_to_stop(tmp_path):
    program = TESSERA.parent / "ddp_train"
    whole = run(program, tmp_path / "whole.pt", 600)
    last = re.search(r"finished at step 600, loss ([\d.]+), 2 ranks over shm", whole)
    assert last and float(last.group(1)) < 0.02, whole

    # Told to stop in the middle, started again: the same loss to the last digit.
    command = [TESSERA, "run", "-n", "2", "--", program, tmp_path / "cut.pt", "600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    for line in process.stdout:
        if "step 100 of" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    process.wait(60)
    step = int(re.search(r"stopped at step (\d+)", rest).group(1))
    assert 100 <= step < 600
    again = run(program, tmp_path / "cut.pt", 600)
    assert f"resumed at step {step}" in again
    assert re.search(r"finished at step 600, loss ([\d.]+)", again).group(1) == last.group(1)


def test_every_example_is_tested():
    names = {p.stem for p in (ROOT / "examples").iterdir() if p.suffix in {".cpp", ".py"}}
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert all(name in tests for name in names), names


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dlrm_learns_who_likes_what(ranks):
    out = run(TESSERA.parent / "dlrm", 400, ranks=ranks)
    losses = [float(loss) for loss in re.findall(r"step \d+ of 400, loss ([\d.]+)", out)]
    assert len(losses) == 8
    assert losses[0] > 0.58  # `dense` alone gives 0.64
    assert losses[-1] < 0.47


def blocks_of(page, language):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_program_of_train_your_own_learns_and_goes_on(tmp_path):
    (program,) = blocks_of("train_your_own.md", "python")
    (tmp_path / "mine.py").write_text(program)

    def losses(folder, steps):
        out = run(sys.executable, tmp_path / "mine.py", tmp_path / folder, steps)
        return dict(re.findall(rf"step (\d+) of {steps}, loss ([\d.]+)", out))

    whole = losses("whole", 300)
    assert list(whole) == ["50", "100", "150", "200", "250", "300"]
    assert float(whole["50"]) > 0.55
    assert float(whole["300"]) < 0.52
    # Interrupted by a checkpoint: the same to the last digit.
    assert losses("cut", 150) == {step: whole[step] for step in ("50", "100", "150")}
    assert losses("cut", 300) == {step: whole[step] for step in ("200", "250", "300")}


def test_the_lines_of_train_your_own_are_in_the_examples():
    blocks = blocks_of("train_your_own.md", "cpp")
    files = ("dlrm.cpp", "own_workload/line.h", "own_workload/line.cpp")
    for file, lines in zip(files, blocks, strict=True):
        example = (ROOT / "examples" / file).read_text().splitlines()
        assert all(line in example for line in lines.splitlines()), file
