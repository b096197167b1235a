"""The Python that pages show runs, on two ranks; see page_snippets.py. Commands name what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from page_snippets import ROOT, pages, pieces

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def test_every_piece_of_python_runs():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    program = [sys.executable, ROOT / "tests/examples/page_snippets.py"]
    result = subprocess.run(
        [TESSERA, "run", "-n", "2", "--no-prefix", "--local-ranks-filter", "0", "--", *program],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    played = re.findall(r"^\('([\w/.]+)', (\d+)\)$", result.stdout, re.MULTILINE)
    wanted = [(page, str(number)) for page in pages() for number in range(len(pieces(page)))]
    assert sorted(played) == sorted(wanted)


def commands() -> list[tuple[str, str]]:
    """Every `tessera` command in a block of a page, with its continued lines, or within its text."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(BLOCK, "", page.read_text())
        found += [(page.name, words) for words in re.findall(r"`(tessera [a-z]+ [^`]+)`", text)]
        for language, block in BLOCK.findall(page.read_text()):
            if language not in ("", "sh", "text"):
                continue
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"^(\$ |.*?\| )?(\.venv/bin/)?(?=tessera )", "", line)
                if re.match(r"tessera [a-z]+( |$)", line):
                    found.append((page.name, re.split(r"   +|  #| #", line)[0]))
    return found


def known_flags() -> dict[str, set[str]]:
    text = subprocess.run([TESSERA, "completion", "fish"], capture_output=True, text=True, check=True).stdout
    known: dict[str, set[str]] = {}
    for verb, flag in re.findall(r"seen_subcommand_from (\w+)' -l ([\w-]+)", text):
        known.setdefault(verb, set()).add(f"--{flag}")
    for words in (["bench", "serve"], ["data", "stats"]):  # these have flags of their own
        told = subprocess.run([TESSERA, *words, "--help"], capture_output=True, text=True, check=True)
        known[words[0]] |= set(re.findall(r"--[a-z][a-z-]*[a-z]", told.stdout))
    return known


def test_commands_name_verbs_and_flags_that_exist():
    """Also those that need several hosts, a GPU or hours, which nothing here could run."""
    known, all_commands = known_flags(), commands()
    assert len(all_commands) > 40
    wrong = []
    for page, command in all_commands:
        try:
            words = shlex.split(command)
        except ValueError:
            continue  # output that looks like a command
        verb = words[1]
        if verb not in known:
            wrong.append((page, command))
            continue
        mine = words[: words.index("--")] if "--" in words else words
        for word in mine[2:]:
            if verb == "run" and not word.startswith("-") and word.endswith(".py"):
                break  # what follows is the program's
            flag = word.split("=")[0].replace("_", "-")
            if flag.startswith("--") and flag not in known[verb]:
                wrong.append((page, command, word))
    assert wrong == []


def test_python_is_marked_as_such():
    """A program that is not marked would not be run."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for language, block in BLOCK.findall(page.read_text()):
            is_python = re.search(r"^(import|from) \w+", block, re.MULTILINE)
            assert language or not is_python, (page.name, block)
