"""Every example runs and says what its first lines promise."""

import os
import re
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


def test_torch_ddp_learns_over_shared_memory():
    out = run(sys.executable, "examples/torch_ddp.py")
    assert "2 ranks over shm" in out
    assert float(re.search(r"loss ([\d.e+-]+)", out).group(1)) < 1e-2


def test_every_example_is_tested():
    names = {p.stem for p in (ROOT / "examples").iterdir() if p.suffix in {".cpp", ".py"}}
    tests = Path(__file__).read_text()
    assert all(name in tests for name in names), names
