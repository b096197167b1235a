"""Ranks: their environment, their exit codes, their restarts."""

import os
import re
import resource
import signal

import pytest
from jobs import Job, python, run

PRINT_ENVIRONMENT = """
import os
print(' '.join(f'{k}={v}' for k, v in sorted(os.environ.items())))
"""


def environments(result):
    found = {}
    for line in result.lines:
        words = dict(w.split("=", 1) for w in line.split("] ", 1)[1].split() if "=" in w)
        found[int(words["RANK"])] = words
    return found


def test_environment_is_torchruns():
    result = run("run", "-n", 3, "--max-restarts", 2, "--", *python(PRINT_ENVIRONMENT))
    assert result.code == 0, result.err
    ranks = environments(result)
    assert sorted(ranks) == [0, 1, 2]
    for rank, env in ranks.items():
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": "1",
        }
        assert {key: env.get(key) for key in expected} == expected
        assert 1024 <= int(env["MASTER_PORT"]) <= 65535
        assert re.fullmatch(r"[0-9a-f]{32}", env["TESSERA_RUN_ID"])
        assert env["TORCHELASTIC_RUN_ID"]
        assert env["TORCHELASTIC_ERROR_FILE"].endswith(f"/{rank}/error.json")
    assert len({env["TESSERA_RUN_ID"] for env in ranks.values()}) == 1
    assert len({env["TORCHELASTIC_ERROR_FILE"] for env in ranks.values()}) == 3


def test_one_rank_keeps_its_threads_and_own_settings_win():
    result = run("run", "--", "sh", "-c", "echo ${OMP_NUM_THREADS-unset}")
    assert result.out == "unset\n"
    result = run("run", "-n", 2, "--", "sh", "-c", "echo $OMP_NUM_THREADS", env={"OMP_NUM_THREADS": "7"})
    assert sorted(result.lines) == ["[rank 0] 7", "[rank 1] 7"]


def test_run_id_is_new_every_time():
    words = ("run", "--", "sh", "-c", "echo $TESSERA_RUN_ID")
    assert run(*words).out != run(*words).out


@pytest.mark.parametrize("code", [1, 3, 63, 64, 125])
def test_exit_code_of_a_rank_is_kept(code):
    result = run("run", "-n", 2, "--", "sh", "-c", f"[ $RANK = 1 ] && exit {code}; sleep 60")
    assert result.code == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_death_by_signal_is_128_plus_n(number):
    result = run(
        "run", "-n", 2, "--", "sh", "-c", f"ulimit -c 0; [ $RANK = 0 ] && kill -{int(number)} $$; sleep 60"
    )
    assert result.code == 128 + number
    assert f"rank 0 failed first: {number.name}" in result.err


def test_all_good_is_0_and_says_nothing():
    result = run("run", "-n", 4, "--", "true")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_restart_begins_again_with_a_new_store():
    script = (
        "echo attempt $TORCHELASTIC_RESTART_COUNT port $MASTER_PORT; "
        "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; "
        "[ $RANK = 0 ] && exec sleep 60; exit 5"
    )
    result = run("run", "-n", 2, "--max-restarts", 2, "--", "sh", "-c", script)
    assert result.code == 0, result.err
    assert result.err.count("restart 1 of 2") == 1
    assert result.err.count("restart 2 of 2") == 1
    ports = dict(re.findall(r"\[rank 1\] attempt (\d) port (\d+)", result.out))
    assert sorted(ports) == ["0", "1", "2"]
    assert len(set(ports.values())) == 3


def test_restarts_run_out_with_the_ranks_code():
    result = run(
        "run",
        "-n",
        2,
        "--max-restarts",
        1,
        "--",
        "sh",
        "-c",
        "echo $TORCHELASTIC_RESTART_COUNT; [ $RANK = 1 ] && exit 9; exec sleep 60",
    )
    assert result.code == 9
    assert sorted(result.lines) == ["[rank 0] 0", "[rank 0] 1", "[rank 1] 0", "[rank 1] 1"]
    assert "error: rank 1 failed first" in result.err
    assert "restart 1 of 1" in result.err


def test_rank_that_exits_well_after_restart_makes_the_job_good():
    result = run("run", "-n", 2, "--max-restarts", 1, "--", "sh", "-c", "[ $TORCHELASTIC_RESTART_COUNT = 1 ]")
    assert result.code == 0


def test_what_a_rank_leaves_behind_is_ended():
    # In the rank's group, and in a session of its own.
    result = run("run", "-n", 2, "--", "sh", "-c", "sleep 300 & setsid sleep 300 & exit 0")
    assert result.code == 0  # run() itself checks that nothing is left


def test_no_scratch_folder_is_left(tmp_path):
    for script in ("exit 0", "exit 3"):
        run("run", "-n", 2, "--", "sh", "-c", script, env={"TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_module_and_python_script(tmp_path):
    (tmp_path / "hello.py").write_text("import os, sys\nprint(os.environ['RANK'], sys.argv[1:])\n")
    expected = ["[rank 0] 0 ['-n', '5']", "[rank 1] 1 ['-n', '5']"]
    for words in (["hello.py"], ["-m", "hello"], ["--module", "hello"]):
        result = run("run", "-n", 2, *words, "-n", "5", cwd=tmp_path)
        assert sorted(result.lines) == expected, result.err


def test_python_of_path_runs_scripts(tmp_path):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "python3").write_text('#!/bin/sh\necho fake "$@"\n')
    (fake / "python3").chmod(0o755)
    (tmp_path / "a.py").write_text("")
    result = run(
        "run", "a.py", "x", cwd=tmp_path, env={"PATH": f"{fake}:{os.environ['PATH']}", "PYTHON_EXEC": ""}
    )
    assert result.out == "fake -u a.py x\n"


def test_single_rank_has_the_callers_stdin(tmp_path):
    (tmp_path / "in").write_text("from stdin\n")
    with open(tmp_path / "in", "rb") as stdin:
        assert run("run", "--", "cat", stdin=stdin).out == "from stdin\n"


def test_workers_signals_are_as_the_caller_had_them():
    # Blocked or ignored signals of the launcher must not leak into the ranks.
    result = run(
        "run", "-n", 2, "--", "sh", "-c", "grep -E 'SigBlk|SigIgn' /proc/self/status | tr -d '\\n\\t'; echo"
    )
    for line in result.lines:
        blocked, ignored = re.search(r"SigBlk:(\w+)SigIgn:(\w+)", line).groups()
        assert int(blocked, 16) == 0
        assert int(ignored, 16) & (1 << (signal.SIGCHLD - 1)) == 0


def test_sigchld_ignored_by_the_caller_does_not_lose_exit_codes():
    job = Job(
        "run",
        "-n",
        2,
        "--",
        "sh",
        "-c",
        "exit 6",
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert job.wait().code == 6


def test_many_ranks():
    result = run("run", "-n", 24, "--", "sh", "-c", "echo $RANK")
    assert result.code == 0
    assert sorted(int(line.split()[-1]) for line in result.lines) == list(range(24))


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(limits[1], 5000)
    result = run(
        *("run", "-n", 2, "--", "sh", "-c", "ulimit -n"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard)),
    )
    assert result.code == 0, result.err
    assert sorted(result.lines) == [f"[rank 0] {hard}", f"[rank 1] {hard}"]


def test_more_ranks_than_the_soft_limit_of_open_files_allows():
    result = run(
        *("run", "-n", 60, "--", "true"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 4000)),
    )
    assert result.code == 0, result.err
