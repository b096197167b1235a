"""The long counts: what is run in which order, what is told of it, and what is left of one cut short."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from waiting import wait_until

COUNTS = pathlib.Path(__file__).with_name("counts.py")

# As many kills as it is told; the one after STOPS_AFTER takes for ever.
WORKER = """#!/bin/sh
for word; do case $word in count=*) count=${word#count=};; esac; done
i=0
while [ $i -lt $count ]; do
  [ $i = "$STOPS_AFTER" ] && sleep 60
  echo '{"engine": "'$TESSERA_ENGINE'", "ms": 20.0, "named": '${NAMED:-true}', "texts": ["a", "a"]}'
  i=$((i + 1))
done
"""
SIMULATOR = """#!/bin/sh
echo "$2: $6 seeds from $4, 0 failed, 0.1 s"
"""


@pytest.fixture
def begin(tmp_path):
    for name, text in (("fault_worker", WORKER), ("simulator", SIMULATOR)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def begin(*words, **env):
        return subprocess.Popen(
            [sys.executable, COUNTS, *words, "--to", tmp_path / "told"],
            env={**os.environ, "TESSERA_BIN": str(tmp_path / "tessera"), **env},
            stdout=subprocess.PIPE,
            text=True,
        )

    return begin


def end(counts):
    out = counts.communicate(timeout=60)[0]
    return counts.returncode, [re.sub(" +", " ", line) for line in out.splitlines()]


def test_counts_run_in_the_order_that_is_asked_and_are_added_to_a_file(begin, tmp_path):
    code, lines = end(begin("seeds channels=1200", "kills collective, shm=3", "seeds channels"))
    assert code == 0
    assert lines[0].startswith("seeds: channels 1,200 failed 0 from 1, ")
    assert lines[1:] == ["kills: collective, shm 3 failed 0 p50 20.0 ms p99 20.0 ms max 20.0 ms 1 texts"]
    assert end(begin("kills meeting", "--count", "2"))[0] == 0
    told = (tmp_path / "told").read_text().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\dZ \S.* \d+ s load \d+\.\d to \d+\.\d  "
    names = [re.match(stamp + r"(\w+: [a-z, ]*[a-z])  ", line)[1] for line in told]
    assert names == [
        "seeds: channels",
        "kills: collective, shm",
        "kills: meeting, shm",
        "kills: meeting, gloo",
    ]


def test_a_death_that_is_not_named_fails(begin, tmp_path):
    code, lines = end(begin("kills creation, gloo=2", NAMED="false"))
    assert code == 1
    assert lines[0].startswith("kills: creation, gloo 2 failed 2 ")
    assert lines[1:] == [" 2 x the dead is not named: a"]
    assert (tmp_path / "told").read_text().endswith("\n    2 x the dead is not named: a\n")


def test_a_count_by_a_test_has_not_its_limit(begin, tmp_path):
    # A stand-in for pytest: its words.
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" > ' + str(tmp_path / "words"))
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "checkpoint_format_test").symlink_to("/bin/true")
    code, lines = end(begin("races=1000", TESSERA_TEST_PYTHON=str(tmp_path / "python")))
    assert code == 0 and [line.split(" failed")[0] for line in lines] == [
        "loads beside saves 2,000",
        "loads beside saves, Python 1,000",
    ]
    assert "-o timeout=0 " in (tmp_path / "words").read_text()


def test_a_count_cut_short_by_its_limit_says_how_far_it_came(begin):
    words = ("kills collective, shm=5", "seeds agreement=10", "--limit", "2")
    code, lines = end(begin(*words, STOPS_AFTER="0"))
    assert code == 1
    assert lines[0] == "kills: collective, shm 0 failed 0 0 texts, cut short: 5 not run"
    assert lines[1].startswith("seeds: agreement 10 failed 0 ")


def test_who_is_told_to_end_tells_what_was_counted(begin, tmp_path):
    counts = begin("kills large process, gloo=1000", "seeds agreement=10", STOPS_AFTER="1")
    wait_until(lambda: b"fault_worker" in children_of(counts.pid), what="the worker")
    counts.send_signal(signal.SIGTERM)
    code, lines = end(counts)
    assert code == 1 and len(lines) == 1
    assert re.match(r"kills: large process, gloo \d+ failed 0 .*cut short: \d+ not run", lines[0])
    assert len((tmp_path / "told").read_text().splitlines()) == 1


def children_of(pid):
    found = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    numbers = " ".join(file.read_text() for file in found).split()
    return b"".join(pathlib.Path(f"/proc/{number}/cmdline").read_bytes() for number in numbers)


@pytest.mark.parametrize("word", ["kisses", "seeds nowhere", "forks=many", "forks="])
def test_a_count_that_there_is_not_is_named(tmp_path, word):
    told = subprocess.run([sys.executable, COUNTS, word], capture_output=True, text=True, timeout=60)
    assert told.returncode == 2 and f"no count {word}" in told.stderr
