"""Output of the ranks: whole lines, nothing lost, nothing stuck."""

import os
import pathlib
import re
import subprocess
import time

import pytest
from jobs import TESSERA, Job, python, run
from sanitizers import not_sanitized
from waiting import wait_until


def test_lines_carry_their_rank():
    result = run("run", "-n", 2, "--", "sh", "-c", "echo out $RANK; echo err $RANK >&2")
    assert sorted(result.lines) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(result.err.splitlines()) == ["[rank 0] err 0", "[rank 1] err 1"]


def test_one_rank_and_no_prefix_are_plain():
    assert run("run", "--", "echo", "plain").out == "plain\n"
    result = run("run", "-n", 2, "--no-prefix", "--", "echo", "plain")
    assert result.out == "plain\nplain\n"


def test_lines_of_many_ranks_never_mix():
    code = """
import os
rank = os.environ['RANK']
for i in range(3000):
    os.write(1, (f'{rank} {i} ' + rank * (i % 200)).encode())
    os.write(1, b'\\n')
"""
    result = run("run", "-n", 4, "--", *python(code))
    assert result.code == 0
    seen = {str(r): 0 for r in range(4)}
    for line in result.lines:
        rank, text = re.fullmatch(r"\[rank (\d)\] (.*)", line).groups()
        i = seen[rank]
        assert text == f"{rank} {i} " + rank * (i % 200)
        seen[rank] += 1
    assert set(seen.values()) == {3000}


def test_megabytes_from_every_rank_arrive():
    line = "x" * 99 + "\n"
    code = f"import sys\nfor _ in range(200): sys.stdout.write({line!r} * 400)"
    result = run("run", "-n", 3, "--", *python(code))
    assert result.code == 0
    assert len(result.out) == 3 * 200 * 400 * (len(line) + len("[rank 0] "))


def test_lines_stay_whole_when_the_reader_is_slow():
    code = "import sys\nfor _ in range(300): sys.stdout.write('0123456789abcdef\\n' * 4096)"
    job = Job("run", "-n", 2, "--", *python(code))
    try:
        pieces = []
        while piece := os.read(job.process.stdout.fileno(), 1 << 20):
            pieces.append(piece)
            if len(pieces) % 50 == 1 and len(pieces) < 300:
                time.sleep(0.15)  # longer than a line without end is held back
        lines = b"".join(pieces).splitlines()
        assert job.process.wait(timeout=30) == 0
    finally:
        job.end()
    assert len(lines) == 2 * 300 * 4096
    assert set(lines) == {b"[rank 0] 0123456789abcdef", b"[rank 1] 0123456789abcdef"}


def test_bytes_pass_unchanged():
    code = "import os\nos.write(1, bytes(range(256)) * 64 + b'\\n')"
    job = Job("run", "-n", 2, "--no-prefix", "--", *python(code))
    out, _ = job.process.communicate(timeout=30)
    assert out == (bytes(range(256)) * 64 + b"\n") * 2


def test_last_line_without_end_is_shown_and_ended():
    result = run("run", "-n", 2, "--", "printf", "no end")
    assert sorted(result.lines) == ["[rank 0] no end", "[rank 1] no end"]


def test_prompt_without_end_is_shown_while_the_rank_waits():
    job = Job("run", "-n", 2, "--", "sh", "-c", "[ $RANK = 0 ] && printf 'progress 10%%'; exec sleep 60")
    try:
        os.set_blocking(job.process.stdout.fileno(), False)
        seen = b""

        def has_prompt():
            nonlocal seen
            seen += job.process.stdout.read() or b""
            return seen == b"[rank 0] progress 10%"

        wait_until(has_prompt, what="the prompt")
    finally:
        job.send(15)
        job.wait()
        job.end()


def test_line_begun_by_one_rank_is_not_continued_by_another():
    code = """
import os, time
if os.environ['RANK'] == '0':
    os.write(1, b'begun '); time.sleep(1.0); os.write(1, b'ended\\n')
else:
    time.sleep(0.5); os.write(1, b'whole\\n')
"""
    result = run("run", "-n", 2, "--", *python(code))
    assert result.lines == ["[rank 0] begun ", "[rank 1] whole", "[rank 0] ended"]


@not_sanitized
def test_slow_reader_holds_the_ranks_back_and_signals_still_work():
    job = Job("run", "-n", 2, "--", "sh", "-c", "yes $RANK")
    try:
        time.sleep(0.5)  # nobody reads; the ranks fill all buffers
        status = pathlib.Path(f"/proc/{job.process.pid}/status").read_text()
        memory = int(re.search(r"VmRSS:\s+(\d+)", status)[1])
        assert memory < 64 << 10, "the launcher must not collect what nobody reads"
        job.send(15)
        result = job.wait()
        assert result.code == 143
    finally:
        job.end()


def test_closed_reader_reaches_the_ranks():
    job = Job("run", "-n", 2, "--", "sh", "-c", "yes $RANK")
    try:
        job.process.stdout.read(10)
        job.process.stdout.close()
        assert job.process.wait(timeout=30) == 128 + 13
    finally:
        job.end()


def attempt_folder(log_dir, number=0):
    runs = list(log_dir.iterdir())
    assert len(runs) == 1
    return runs[0] / f"attempt_{number}"


def test_log_dir_keeps_both_streams_of_every_rank(tmp_path):
    result = run(
        "run", "-n", 2, "--log-dir", tmp_path, "--", "sh", "-c", "echo out $RANK; echo err $RANK >&2"
    )
    assert sorted(result.lines) == ["[rank 0] out 0", "[rank 1] out 1"]
    for rank in (0, 1):
        folder = attempt_folder(tmp_path) / str(rank)
        assert (folder / "stdout.log").read_text() == f"out {rank}\n"
        assert (folder / "stderr.log").read_text() == f"err {rank}\n"
        assert folder.stat().st_mode & 0o077 == 0


def test_log_dir_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("run", "-n", 2, "--log-dir", tmp_path / "file/logs", "--", "true")
    assert result.code == 78
    assert re.match(
        r"error: run: cannot write to \S+/file/logs/\S+\n  why: Not a directory\n  try: ", result.err
    )


def test_every_attempt_has_its_own_files(tmp_path):
    run(
        "run",
        "-n",
        2,
        "--max-restarts",
        1,
        "--log-dir",
        tmp_path,
        "--rdzv-id",
        "name",
        "--",
        "sh",
        "-c",
        "[ $RANK = 0 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 60; "
        "echo $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ]",
    )
    for number in (0, 1):
        text = (attempt_folder(tmp_path, number) / "1/stdout.log").read_text()
        assert text == f"{number}\n"
    assert next(tmp_path.iterdir()).name.startswith("name-")


@pytest.mark.parametrize(
    "flags, shown, logged",
    [
        (["--redirects", "3"], {"": ""}, {"0": "out,err", "1": "out,err"}),
        (["--redirects", "1"], {"err": "01"}, {"0": "out", "1": "out"}),
        (["--tee", "2"], {"out": "01", "err": "01"}, {"0": "err", "1": "err"}),
        (["--redirects", "0:3"], {"out": "1", "err": "1"}, {"0": "out,err", "1": ""}),
        (["--tee", "1:3", "--local-ranks-filter", "1"], {"out": "1", "err": "1"}, {"0": "", "1": "out,err"}),
    ],
)
def test_tee_and_redirects_mean_what_torchrun_means(tmp_path, flags, shown, logged):
    result = run("run", "-n", 2, "--log-dir", tmp_path, *flags, "--", "sh", "-c", "echo out; echo err >&2")
    for stream, text in (("out", result.out), ("err", result.err)):
        ranks = "".join(sorted(re.findall(rf"\[rank (\d)\] {stream}", text)))
        assert ranks == shown.get(stream, "")
    for rank, streams in logged.items():
        for stream in ("out", "err"):
            path = attempt_folder(tmp_path) / rank / f"std{stream}.log"
            assert path.exists() == (stream in streams.split(","))


def test_filter_hides_the_other_ranks_and_the_report_shows_the_failed_ones_end():
    result = run(
        "run",
        "-n",
        2,
        "--local-ranks-filter",
        "0",
        "--",
        "sh",
        "-c",
        "echo $RANK; [ $RANK = 0 ] && exit 0; echo hidden cause >&2; exit 4",
    )
    assert result.code == 4
    assert set(result.lines) <= {"[rank 0] 0"}
    assert "    | hidden cause" in result.err


def test_terminal_gets_colour_unless_told_not_to():
    for env, has_colour in (({}, True), ({"NO_COLOR": "1"}, False)):
        primary, secondary = os.openpty()
        job = Job("run", "-n", 2, "--", "echo", "x", env=env, stdout=secondary, stderr=secondary)
        os.close(secondary)
        assert job.process.wait(timeout=30) == 0
        text = os.read(primary, 65536)
        os.close(primary)
        assert (b"\x1b[" in text) == has_colour
        assert b"[rank 0]" in text
    assert "\x1b" not in run("run", "-n", 2, "--", "sh", "-c", "exit 3").err


def test_closed_standard_files_do_no_harm():
    shell = 'exec "$0" run -n 2 -- sh -c "echo x; exit 3" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, TESSERA], timeout=30).returncode == 3
