"""Every verb explains itself: on one screen, an example first, all of its flags, and where to read more."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def tessera(*words):
    return subprocess.run([TESSERA, *words], capture_output=True, text=True, timeout=30)


def verbs():
    """The verbs of `tessera --help`, which must be there for the tests to be collected."""
    if not pathlib.Path(TESSERA).exists():
        return []
    text = tessera("--help").stdout
    part = text[text.index("verbs\n") : text.index("flags\n")]
    lines = re.findall(r"^  (\w+(?:, \w+)?)  ", part, re.MULTILINE)
    return [name for line in lines for name in line.split(", ") if name != "help"]


VERBS = verbs()


def test_the_program_names_its_verbs():
    assert {
        "run",
        "ps",
        "inspect",
        "train",
        "eval",
        "predict",
        "export",
        "serve",
        "plan",
        "report",
        "trace",
        "data",
        "ckpt",
        "bench",
        "doctor",
        "completion",
    } <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of(verb):
    result = tessera(verb, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert tessera("help", verb).stdout == tessera(verb, "-h").stdout == result.stdout
    lines = result.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"tessera {verb}")
    assert not lines[1]
    assert re.match(rf"  (source <\()?tessera {verb} ", lines[2]), "an example comes first"


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "completion"])
def test_help_says_where_to_read_more(verb):
    (page,) = re.findall(r"More: (docs/\w+\.md)", tessera(verb, "--help").stdout)
    assert (ROOT / page).exists()


PARTS = [("train", "dlrm"), ("train", "lm"), ("train", "gnn"), ("plan", "tables"), ("plan", "graph")]


@pytest.mark.parametrize(("verb", "part"), PARTS)
def test_help_of_a_part(verb, part):
    result = tessera(verb, part, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 60
    assert lines[0].startswith(f"tessera {verb} {part}")
    assert max(map(len, lines)) <= 80


def test_help_names_every_flag():
    completion = tessera("completion", "fish").stdout
    texts = {verb: tessera(verb, "--help").stdout for verb in VERBS}
    for verb, part in PARTS:
        texts[verb] += tessera(verb, part, "--help").stdout
    for verb, flag in re.findall(r"seen_subcommand_from (\w+)' -l ([\w-]+)", completion):
        assert flag == "help" or f"--{flag}" in texts[verb], (verb, flag)
