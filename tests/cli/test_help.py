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


def parts() -> list[tuple[str, str]]:
    """What may stand behind a verb, as completion knows it."""
    if not VERBS:
        return []
    script = tessera("completion", "fish").stdout
    found = re.findall(r"seen_subcommand_from (\w+)' -a '([^']+)'", script)
    return [(verb, part) for verb, names in found if verb != "completion" for part in names.split()]


PARTS = parts()
# Those that have a help of their own; the others have that of their verb.
OWN_HELP = {("train", "dlrm"), ("train", "lm"), ("train", "gnn"), ("plan", "tables"), ("plan", "graph")}
OWN_HELP |= {("bench", "serve"), ("data", "stats")}


def test_the_verbs_have_their_parts():
    assert set(PARTS) >= OWN_HELP | {("runs", "diff"), ("trace", "merge"), ("ckpt", "ls"), ("data", "show")}


@pytest.mark.parametrize(("verb", "part"), PARTS)
def test_help_of_a_part(verb, part):
    result = tessera(verb, part, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    if (verb, part) in OWN_HELP:
        assert lines[0].startswith(f"tessera {verb} {part}")
    else:
        assert result.stdout == tessera(verb, "--help").stdout and part in lines[0] + lines[2] + lines[3]


def test_help_names_every_flag():
    completion = tessera("completion", "fish").stdout
    texts = {verb: tessera(verb, "--help").stdout for verb in VERBS}
    for verb, part in OWN_HELP:
        texts[verb] += tessera(verb, part, "--help").stdout
    for verb, flag in re.findall(r"seen_subcommand_from (\w+)' -l ([\w-]+)", completion):
        assert flag == "help" or f"--{flag}" in texts[verb], (verb, flag)


def flags_of() -> dict[str, set[str]]:
    """The long flags that completion knows, by verb."""
    found: dict[str, set[str]] = {}
    for verb, flag in re.findall(
        r"seen_subcommand_from (\w+)' -l ([\w-]+)", tessera("completion", "fish").stdout
    ):
        found.setdefault(verb, set()).add(f"--{flag}")
    return found


def with_ends_exchanged(word: str) -> str:
    return word[:-2] + word[-1] + word[-2]


@pytest.mark.parametrize(
    "words", [[verb] for verb in VERBS if verb != "completion"] + [list(part) for part in PARTS], ids=" ".join
)
def test_a_mistyped_flag_has_a_suggestion(words):
    """Every long flag of every verb and of what may stand behind it, its last two letters exchanged."""
    known = flags_of()[words[0]]
    flags = {"--help"} | ({"--json"} & known)
    if len(words) == 2 or all(verb != words[0] for verb, _ in PARTS):  # or the parts have the others
        lines = tessera(*words, "--help").stdout.splitlines()
        text = "\n".join(line for line in lines if "tessera " not in line)  # examples may be of other parts
        named = set(re.findall(r"--[a-z][a-z-]*[a-z]", text))
        flags |= {flag for flag in known & named if len(flag) > 6}
    for flag in sorted(flags):
        mistyped = with_ends_exchanged(flag)
        if mistyped == flag or mistyped in known:
            continue
        result = tessera(*words, mistyped, "x")
        assert result.returncode == 2, (mistyped, result.stderr)
        assert re.search(rf"unknown flag {mistyped}: did you mean {flag}\?", result.stderr), result.stderr


@pytest.mark.parametrize(("verb", "part"), [one for one in PARTS if len(one[1]) > 3])
def test_a_mistyped_part_has_a_suggestion(verb, part):
    mistyped = with_ends_exchanged(part)
    if mistyped == part:
        mistyped = part[:-1]
    result = tessera(verb, mistyped, "x")
    assert result.returncode == 2, result.stderr
    assert f"'{mistyped}': did you mean {part}?" in result.stderr


# Words of other programs, of those that only ours start, and of torchrun's that are refused by name.
OTHERS = {
    "cli/worker/store.cpp": {"--fd", "--host"},
    "src/launch/store_host.cpp": {"--fd", "--host"},
    "src/launch/report.cpp": {"--args"},
    "src/comm/shm/segment.cpp": {"--shm-size"},
    "cli/bench.cpp": {"--list", "--print-only"},
    "workloads/settings/help_text.cpp": {"--flag"},
    "workloads/settings/flags.cpp": {
        "--flag", "--duplicate-stderr-filters", "--duplicate-stdout-filters", "--event-log-handler",
        "--local-addr", "--logs-specs", "--numa-binding", "--run-path", "--signals-to-handle",
        "--virtual-local-rank",
    },
}  # fmt: skip


def test_texts_name_flags_that_exist():
    """Tips, errors and examples: every flag in a text of the sources is one of some verb."""
    known = set().union(*flags_of().values()) | {"--help", "--version"}
    unknown = []
    for folder in ("cli", "src", "workloads"):
        for path in (ROOT / folder).rglob("*.cpp"):
            name = str(path.relative_to(ROOT))
            for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', path.read_text()):
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text):
                    if flag not in known | OTHERS.get(name, set()):
                        unknown.append((name, flag))
    assert unknown == []
