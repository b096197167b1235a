"""The report of a failed job: the root cause first, then one line per rank."""

import json
import pathlib
import re
import time

from jobs import python, run

# Writes torchrun's error file as our runtime and torch's own `record` do.
WRITE_ERROR = """
import json, os, sys, time
def write_error(message, seconds, ns=None, secondary=False):
    extra = {'py_callstack': 'frame 1', 'timestamp': str(int(seconds))}
    if ns is not None: extra['timestamp_ns'] = str(ns)
    if secondary: extra['secondary'] = 'true'
    with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
        json.dump({'message': {'message': message, 'extraInfo': extra}}, file)
rank = int(os.environ['RANK'])
"""


def rows(err):
    """(rank, how it ended, message) of every line of the table."""
    return re.findall(r"^ +(\d+) +\d+  (\S.*?)  +\d\d:\d\d:\d\d\.\d{3}  (.*)$", err, re.M)


def test_report_names_rank_code_and_last_words():
    result = run(
        "run",
        "-n",
        3,
        "--",
        "sh",
        "-c",
        "[ $RANK = 1 ] && { echo first line >&2; echo 'it broke: 7 != 8' >&2; exit 3; };exec sleep 60",
    )
    assert result.code == 3
    lines = [line for line in result.err.splitlines() if not line.startswith("[rank")]
    assert lines[0] == "error: rank 1 failed first: it broke: 7 != 8"
    assert re.match(r"  why: rank 1 \(pid \d+\) ended with exit code 3 at [\d:.]+$", lines[1])
    assert lines[2].startswith("  try: ")
    assert lines[3].split() == ["rank", "pid", "ended", "by", "time", "message"]
    table = rows(result.err)
    assert table[0] == ("1", "exit code 3", "it broke: 7 != 8")
    assert sorted(table[1:]) == [
        ("0", "SIGTERM", "stopped by the launcher"),
        ("2", "SIGTERM", "stopped by the launcher"),
    ]


def test_error_file_is_read():
    code = (
        WRITE_ERROR
        + """
if rank == 1:
    write_error('ValueError: bad batch\\nsecond line', time.time(), time.time_ns())
    sys.exit(1)
time.sleep(60)
"""
    )
    result = run("run", "-n", 2, "--", *python(code))
    assert result.code == 1
    assert "error: rank 1 failed first: ValueError: bad batch\n" in result.err
    assert "second line" not in result.err


def test_report_of_a_peer_is_never_the_root_cause():
    # Rank 1 dies of its own fault; rank 0 notices and ends before, with the code for lost peers.
    code = (
        WRITE_ERROR
        + """
now = time.time_ns()
if rank == 0:
    write_error('comm.reduce #4: rank 1 is gone', now / 1e9 - 5, now - 5_000_000_000, True)
    sys.exit(75)
write_error('RuntimeError: the cause', now / 1e9, now)
time.sleep(0.2)
sys.exit(21)
"""
    )
    result = run("run", "-n", 2, "--failure-grace", 20, "--", *python(code))
    assert result.code == 21
    assert "error: rank 1 failed first: RuntimeError: the cause" in result.err
    assert rows(result.err)[1] == ("0", "exit code 75", "comm.reduce #4: rank 1 is gone")


def test_exit_code_75_without_a_file_counts_as_report_of_a_peer():
    code = (
        WRITE_ERROR
        + """
if rank == 0: sys.exit(75)
time.sleep(0.2)
sys.exit(4)
"""
    )
    result = run("run", "-n", 2, "--failure-grace", 20, "--", *python(code))
    assert result.code == 4
    assert "rank 1 failed first" in result.err


def test_earlier_nanoseconds_win_within_one_second():
    code = (
        WRITE_ERROR
        + """
base = 1_700_000_000_000_000_000
write_error(f'error of {rank}', base / 1e9, base + (900 - 400 * rank) * 1_000_000)
time.sleep(0.1 * rank)
sys.exit(10 + rank)
"""
    )
    result = run("run", "-n", 3, "--failure-grace", 20, "--", *python(code))
    assert result.code == 12
    assert "error: rank 2 failed first: error of 2" in result.err


def test_whole_second_timestamps_do_not_beat_an_earlier_death():
    # Rank 1 is killed; rank 0 reports with a timestamp that is rounded down to before the death.
    code = (
        WRITE_ERROR
        + """
while time.time() % 1 > 0.3: time.sleep(0.01)
if rank == 1:
    time.sleep(0.1)
    os.kill(os.getpid(), 9)
time.sleep(0.3)
write_error('RuntimeError: connection closed by peer', time.time())
sys.exit(1)
"""
    )
    result = run("run", "-n", 2, "--failure-grace", 20, "--", *python(code))
    assert result.code == 137
    assert "error: rank 1 failed first: SIGKILL" in result.err


def test_error_of_a_rank_that_is_stopped_while_it_ends_counts():
    # Rank 0 has reported its error but is slow to end; rank 1 falls over the closed connection.
    code = (
        WRITE_ERROR
        + """
now = time.time_ns()
if rank == 0:
    write_error('KeyError: the cause', now / 1e9, now)
    time.sleep(60)
time.sleep(0.3)
write_error('RuntimeError: connection closed', time.time(), time.time_ns())
sys.exit(1)
"""
    )
    result = run("run", "-n", 2, "--", *python(code))
    assert result.code == 1
    assert "error: rank 0 failed first: KeyError: the cause" in result.err


def test_survivors_may_end_by_themselves_during_the_grace():
    code = (
        WRITE_ERROR
        + """
if rank == 1: sys.exit(3)
time.sleep(0.3)
write_error('comm.reduce #1: rank 1 is gone', time.time(), time.time_ns(), True)
sys.exit(75)
"""
    )
    result = run("run", "-n", 2, "--failure-grace", 20, "--", *python(code))
    assert result.code == 3
    assert rows(result.err)[1] == ("0", "exit code 75", "comm.reduce #1: rank 1 is gone")


def test_killed_rank_gets_a_word_about_memory():
    result = run("run", "-n", 2, "--", "sh", "-c", "[ $RANK = 0 ] && kill -9 $$; exec sleep 60")
    assert "out-of-memory killer" in result.err


def test_broken_error_files_are_ignored():
    code = (
        "import os, sys\nwith open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "    file.write(sys.argv[1])\nos._exit(8)"
    )
    for content in ("", "{", "[1]", '{"message": 3}', '{"message": {"message": ["x"]}}', "\1" * 99):
        result = run("run", "-n", 2, "--", *python(code), content)
        assert result.code == 8, result.err


def test_message_that_is_only_a_string_is_read():
    code = (
        "import json, os\njson.dump({'message': 'plain words'}, "
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\nos._exit(8)"
    )
    result = run("run", "--", *python(code))
    assert "error: rank 0 failed first: plain words" in result.err


def test_control_characters_do_not_reach_the_terminal():
    code = WRITE_ERROR + "write_error('bad \\x1b[31m \\r text', time.time()); sys.exit(1)"
    result = run("run", "-n", 2, "--", *python(code))
    assert "\x1b" not in result.err and "\r" not in result.err


def test_log_dir_keeps_the_error_file_and_names_it(tmp_path):
    code = WRITE_ERROR + "write_error('ValueError: x', time.time(), time.time_ns()); sys.exit(1)"
    result = run("run", "--log-dir", tmp_path, "--", *python(code))
    path = re.search(r"  try: read (\S+)", result.err)[1]
    assert json.loads(pathlib.Path(path).read_text())["message"]["message"] == "ValueError: x"


def test_table_of_many_ranks_is_short():
    result = run("run", "-n", 20, "--", "sh", "-c", "[ $RANK = 13 ] && exit 2; exec sleep 60")
    assert result.code == 2
    assert len(result.err.splitlines()) <= 22
    assert "  and 4 more" in result.err


def test_report_as_json():
    result = run("run", "-n", 2, "--json", "--", "sh", "-c", "[ $RANK = 0 ] && exec sleep 60; exit 11")
    report = json.loads(result.err)
    assert report["exit_code"] == result.code == 11
    assert report["root_cause"]["rank"] == 1
    assert [f["rank"] for f in report["failures"]] == [0, 1]


def test_death_ends_the_job_soon():
    result = run("run", "-n", 4, "--", "sh", "-c", "[ $RANK = 2 ] && exit 1; exec sleep 60")
    assert result.seconds < 5  # the figure itself is measured by the benchmark


def test_survivor_that_ignores_sigterm_is_killed_after_the_timeout():
    begin = time.monotonic()
    result = run(
        "run",
        "-n",
        2,
        "--shutdown-timeout",
        0.5,
        "--",
        "sh",
        "-c",
        "trap '' TERM; [ $RANK = 1 ] && { sleep 0.3; exit 3; };while :; do sleep 0.1; done",
    )
    assert result.code == 3
    assert 0.5 < time.monotonic() - begin < 10
