"""What the tutorials show is what happens: their Python is a program, their commands are run in order."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
TRAINERS = ROOT / ".venv-trainers/bin/python"
LIMIT = 180.0  # seconds; for a loaded machine, not a figure


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def play(command: str, folder: pathlib.Path, python=sys.executable) -> str:
    """Runs a command of a page; `tessera` and `python` are those of this tree."""
    words = shlex.split(command)
    programs = {"tessera": TESSERA, "python": str(python)}
    words = [programs.get(word, word) for word in words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert result.returncode == 0, command + "\n" + result.stdout + result.stderr
    return result.stdout


def play_page(name: str, folder: pathlib.Path) -> str:
    """The page's Python, joined, is the program that its commands name."""
    text = (ROOT / f"docs/{name}.md").read_text()
    commands = [line for block in blocks(text, "sh") for line in block.splitlines()]
    (program,) = {word for command in commands for word in command.split() if word.endswith(".py")}
    assert f"`{program}`" in text
    (folder / program).write_text("\n".join(blocks(text, "python")))
    return "".join(play(command, folder) for command in commands)


def test_ddp_is_replaced(tmp_path):
    assert "2 ranks, loss 0." in play_page("tutorial_ddp", tmp_path)


def test_torchrec_is_replaced(tmp_path):
    said = play_page("tutorial_torchrec", tmp_path)
    assert float(re.search(r"2 ranks, loss ([\d.]+)", said)[1]) < 0.1  # 0.69 at first
    assert "users" in said and "items" in said  # the plan


def test_the_policy_learns(tmp_path):
    said = play_page("tutorial_rl", tmp_path)
    first, last = map(float, re.search(r"reward ([\d.]+) at first, ([\d.]+) at the end", said).groups())
    assert first < 0.3 and last > 0.9


def test_the_potential_is_the_same_on_any_number_of_ranks(tmp_path):
    said = play_page("tutorial_potential", tmp_path)
    losses = {ranks: re.findall(rf"{ranks} ranks, step \d+, loss ([\d.]+)", said) for ranks in (1, 3)}
    assert len(losses[1]) == 2 and losses[1] == losses[3]
    assert float(losses[1][1]) < 0.1 * float(losses[1][0])


def test_own_columns_become_a_served_model(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said, servers, infers = {}, [], []
    text = (ROOT / "docs/tutorial_served_model.md").read_text()
    for port in ("8080", "8081"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            text = text.replace(port, str(free.getsockname()[1]))
    try:
        for command in (line for block in blocks(text, "sh") for line in block.splitlines()):
            if command.endswith(" &"):
                words = [TESSERA, *shlex.split(command.removesuffix(" &"))[1:]]
                servers.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL))
            elif command in ("kill %1", "kill %2"):
                server = servers[int(command[-1]) - 1]
                server.terminate()
                assert server.wait(30) == 0
            elif "/infer" in command:
                infers.append(json.loads(play(command, tmp_path)))
                # The last versions are taken over when the training has ended already.
                deadline = time.monotonic() + LIMIT
                while len(infers) == 2 and infers[1]["model_version"] != "200":
                    assert time.monotonic() < deadline, infers
                    infers[1] = json.loads(play(command, tmp_path))
            else:
                said[command] = play(command, tmp_path)
    finally:
        for server in servers:
            server.kill()
    (judged,) = [text for command, text in said.items() if command.startswith("tessera eval")]
    assert float(re.search(r"auc ([\d.]+)", judged)[1]) > 0.7
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1001
    for answer in infers:
        (probability,) = answer["outputs"][0]["data"]
        assert 0 < probability < 1
    assert infers[0]["outputs"] != infers[1]["outputs"]
    (versions,) = [text for command, text in said.items() if "/admin/versions" in command]
    assert {"version": 200, "current": True}.items() <= json.loads(versions)["versions"][-1].items()


def test_the_first_run_runs(tmp_path):
    text = (ROOT / "docs/first_run.md").read_text()
    commands = [line for block in blocks(text, "sh")[1:] for line in block.splitlines()]
    # Small tables, for time; everything else as it stands there.
    small = " --tables 4 --rows 500 --dim 8 --bottom 16,8 --batch 64 --eval-samples 500"
    said = [play(line + (small if "--save" in line else ""), tmp_path) for line in commands]
    assert "judged   step 20:" in said[0] and "report   first/report.html" in said[1]
    assert "has done its 40 steps already" in said[2] and "resumed  at step 40" in said[3]


def recipes() -> dict[str, str]:
    text = (ROOT / "docs/recipes.md").read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return {title: blocks(part, "python")[0] for title, part in zip(parts[::2], parts[1::2], strict=True)}


@pytest.mark.skipif(not TRAINERS.exists(), reason="no .venv-trainers: `make trainers` installs them")
@pytest.mark.parametrize("title", recipes())
def test_recipes_run(title, tmp_path):
    (tmp_path / "recipe.py").write_text(recipes()[title])
    said = play("tessera run -n 2 -- python recipe.py", tmp_path, TRAINERS)
    assert float(re.search(r"2 ranks over shm, loss ([\d.]+)", said)[1]) < 0.5  # 8 at first
