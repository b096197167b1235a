"""What a new user meets first: mistyped files, narrow terminals, folders that hold nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import pty
import re
import signal
import statistics
import struct
import subprocess
import sys
import termios
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 180.0  # seconds; for a loaded machine, not a figure
SMALL = ["--tables", "12", "--rows", "50", "--dim", "8", "--bottom", "16,8", "--top", "16,1", "--batch", "32"]
SMALL += ["--eval-samples", "100", "--keep-model", "last"]


def tessera(*words, code=0):
    result = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def on_terminal(columns, *words):
    """What a terminal of so many columns gets."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([TESSERA, *map(str, words)], stdout=other, stderr=subprocess.PIPE)
    os.close(other)
    got = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        got += part
    os.close(main)
    assert process.wait(timeout=LIMIT) == 0, process.stderr.read()
    return got.decode()


def test_progress_fits_a_terminal_of_80_columns(tmp_path):
    flags = ["--ranks", 2, "--steps", 8, "--eval-every", 4, "--runs", tmp_path, *SMALL]
    text = on_terminal(80, "train", "dlrm", *flags)
    shown = [part.split("\x1b[K")[0] for part in text.split("\r") if part.startswith("step ")]
    assert shown, text
    assert all(len(line) < 80 for line in shown)
    assert re.match(r"step 8/8 \| loss [\d.]+ \| train auc [\d.]+ \| \S+ samples/s", shown[-1])
    # What is said in between begins on a line of its own.
    assert re.search(r"\njudged   step 4: log loss [\d.]+ \| auc [\d.]+", text)
    for line in text.replace("\r", "\n").replace("\x1b[K", "").splitlines():
        assert len(line) <= 80 or line.startswith(("report", "model"))


@pytest.mark.parametrize("workload", ["lm", "gnn", "growing"])
def test_progress_of_every_workload_fits_a_terminal(tmp_path, workload):
    shapes = {
        "lm": ["--batch", 4, "--length", 16, "--layers", 1, "--width", 16, "--sample", 200],
        "gnn": ["--atoms", 27, "--structures", 4, "--features", 8, "--cutoff", "1.7"],
    }
    rows = "".join(f"{i % 3 // 2},{i % 97}.5,user-{i % 211}\n" for i in range(900))
    (tmp_path / "log.csv").write_text("clicked,price,user\n" + rows)
    growing = [*SMALL[4:], "--ids", "unlimited", "--data", tmp_path / "log.csv"]
    words = ["train", *(("dlrm", *growing) if workload == "growing" else (workload, *shapes[workload]))]
    text = on_terminal(80, *words, "--ranks", 2, "--steps", 8, "--eval-every", 4, "--save", tmp_path / "run")
    shown = [part.split("\x1b[K")[0] for part in text.split("\r") if part.startswith("step ")]
    assert re.match(r"step 8/8 \| loss ", shown[-1]) and all(len(line) < 80 for line in shown), shown
    # One line that is written again and again, but for what an evaluation says.
    lines = [line for line in text.split("\n") if re.search(r"step \d+/8 \| loss", line)]
    assert 1 <= len(lines) <= 2, text
    # What names a file, and text that was written, is as long as it is.
    for line in text.replace("\r", "\n").replace("\x1b[K", "").splitlines():
        assert len(line) <= 80 or line.startswith(("report", "model", "sample")) or "/" in line, line


def test_the_ten_largest_tables_are_listed_in_the_order_of_their_numbers(tmp_path):
    rows = "20,10," + ",".join("50" for _ in range(10))
    tessera("data", "synth", tmp_path / "a.click", "--samples", 500, "--features", 12, "--rows", rows)
    flags = [*SMALL[4:], "--data", tmp_path / "a.click", "--steps", 1, "--runs", tmp_path]
    lines = tessera("train", "dlrm", *flags).stdout.splitlines()
    listed = [line.split()[0] for line in lines if re.match("  cat_", line)]
    assert listed == [f"cat_{number}" for number in range(2, 12)], lines
    assert "  and 2 tables that are not larger; tessera plan tables shows all" in lines


def test_what_is_said_after_ctrl_c_is_not_glued_to_the_progress(tmp_path):
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    words = ["train", "dlrm", "--ranks", "2", "--steps", "1000000", *SMALL, "--save", str(tmp_path / "run")]
    process = subprocess.Popen([TESSERA, *words], stdout=other, stderr=other)
    os.close(other)
    got = b""
    is_told = False
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        got += part
        if not is_told and got.count(b"\rstep ") > 1:
            process.send_signal(signal.SIGINT)
            is_told = True
    os.close(main)
    assert process.wait(timeout=LIMIT) == 0, got.decode()
    lines = re.split(r"[\r\n]+", got.decode().replace("\x1b[K", ""))
    assert any("Ctrl-C again" in line for line in lines) and any(line.startswith("report ") for line in lines)
    for line in lines:
        if re.search(r"\d+/\d+ \| loss", line):
            assert re.fullmatch(r"step +\d+/\d+ \| .* eta [\ddhms ]+", line), line
        else:
            assert "Ctrl-C" not in line or line.startswith("tessera: SIGINT"), line


def test_a_folder_without_checkpoints_is_an_error_and_a_run_folder_is_not(tmp_path):
    failed = tessera("ckpt", "ls", tmp_path, code=65)
    assert f"{tmp_path}: there is no checkpoint." in failed.stderr
    tessera("ckpt", "ls", tmp_path / "none", code=65)
    tessera("train", "dlrm", "--steps", 2, *SMALL, "--save", tmp_path / "run")
    listed = tessera("ckpt", "ls", tmp_path / "run").stdout
    assert listed == tessera("ckpt", "ls", tmp_path / "run/checkpoints").stdout and "whole" in listed
    tessera("ckpt", "verify", tmp_path / "run")


def test_a_node_number_out_of_proportion_is_bad_data(tmp_path):
    (tmp_path / "edges.txt").write_text("1 2\n3 99999999999999\n")
    failed = tessera("plan", "graph", "--ranks", 2, tmp_path / "edges.txt", code=65)
    assert "2 edges name node 99999999999999" in failed.stderr and "frame #" not in failed.stderr


def test_a_text_that_is_not_there_is_bad_data(tmp_path):
    failed = tessera("train", "lm", "--file", tmp_path / "nope", "--steps", 1, code=65)
    assert f"there is no file {tmp_path}/nope" in failed.stderr


def test_keys_of_a_file_may_have_underscores(tmp_path):
    (tmp_path / "run.toml").write_text("nproc_per_node = 2\n")
    printed = tessera("run", "--config", tmp_path / "run.toml", "--print-config", "--", "true").stdout
    assert re.search(r'^nproc-per-node\s*=\s*"?2"?$', printed, re.MULTILINE)


def test_completion_knows_workloads_what_verbs_do_and_values():
    script = tessera("completion", "bash").stdout
    tries = {"train ''": "dlrm lm gnn", "data c": "convert check", "plan ''": "tables graph"}
    tries |= {"train dlrm --sharding ''": "auto row_wise", "train lm --decay c": "cosine"}
    tries |= {"export run --dtype i": "int8 int4 int2", "plan tables --effort ''": "low normal high"}
    tries |= {"bench ''": "collectives serve", "bench collectives --op all_r": "all_reduce"}
    tries |= {"trace summary --by ''": "phase name", "run --nproc-per-node ''": "auto cpu gpu"}
    tries |= {"ckpt reshard a --cut ''": "rows columns whole", "data s": "schema show stats synth"}
    # Of all workloads and sub-verbs.
    tries |= {"train dlrm --optimizer ''": "sgd adagrad adam", "train lm --precision ''": "bfloat16 float64"}
    tries |= {"data stats --w": "--write", "bench serve --t": "--times-peak --timeout --token-file"}
    for words, wanted in tries.items():
        last = len(words.split())
        command = (
            f"{script}\nCOMP_WORDS=(tessera {words}) COMP_CWORD={last}; _tessera; echo ${{COMPREPLY[@]}}"
        )
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert set(wanted.split()) <= set(found.split()), words


def test_mistyped_words_have_suggestions_everywhere():
    tries = {
        "train --hlep": "train: unknown flag --hlep: did you mean --help?",
        "plan --hlep": "plan: unknown flag --hlep: did you mean --help?",
        "data --hlep": "data: unknown flag --hlep: did you mean --help?",
        "ckpt --jsn": "ckpt: unknown flag --jsn: did you mean --json?",
        "completion bahs": "completion: unknown shell 'bahs': did you mean bash?",
        "bench collectivs": "bench: there is no 'collectivs': did you mean collectives?",
        "bench srve": "bench: there is no 'srve': did you mean serve?",
        "runs dif a b": "runs: there is no 'dif': did you mean diff?",
        "train dlrm --sharding row-wise": "data_parallel}: did you mean row_wise?",
        "train dlrm --optimizer adm": "adam}: did you mean adam?",
        "serve --prot 1": "serve: unknown flag --prot: did you mean --port?",
    }
    for words, wanted in tries.items():
        assert wanted in tessera(*words.split(), code=2).stderr, words


def test_the_text_of_a_rank_that_speaks_for_all_is_the_reason(tmp_path):
    (tmp_path / "bad.bin").write_bytes(bytes(range(256)) * 20)
    failed = tessera("train", "dlrm", "--ranks", 2, "--data", tmp_path / "bad.bin", code=65)
    assert re.search(r"error: rank \d failed first: .*bad\.bin: is a binary file", failed.stderr)
    # One rank writes to the terminal itself; the launcher is told all the same. Tips are for this verb.
    for words in (["train", "dlrm"], ["eval", tmp_path / "run"], ["predict", tmp_path / "run"]):
        if words[0] == "eval":
            tessera("train", "dlrm", "--steps", 2, *SMALL, "--save", tmp_path / "run")
        flags = ["--out", tmp_path / "scores.csv"] if words[0] == "predict" else []
        failed = tessera(*words, "--data", tmp_path / "bad.bin", *flags, code=65).stderr
        assert "bad.bin: is " in failed and "exit code 65\n" not in failed, failed
        assert "--log-dir" not in failed


def test_a_run_is_not_said_to_have_done_fewer_steps_than_it_has(tmp_path):
    tessera("train", "dlrm", "--steps", 2, *SMALL, "--save", tmp_path / "run")
    for steps in (0, 1):
        said = tessera("train", "dlrm", "--resume", tmp_path / "run", "--steps", steps).stdout
        assert f"run is at step 2 already, beyond the {steps} steps asked for; " in said
        assert "--steps N goes on up to step N" in said
    said = tessera("train", "dlrm", "--resume", tmp_path / "run", "--steps", 2).stdout
    assert "run has done its 2 steps already; " in said


def test_words_where_numbers_are_wanted():
    for words in ("train dlrm --ranks two", "train lm --ranks two", "run -n two -- true"):
        assert "'two' is not a number" in tessera(*words.split(), code=2).stderr, words
    assert "--ranks: Value 0 not in range 1 to 4096" in tessera("train", "dlrm", "--ranks", 0, code=2).stderr


def test_the_example_for_slurm_meets_on_both_hosts(tmp_path):
    """With stand-ins for Slurm's programs; each host's launcher gets its own number and one secret."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stands = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"; wait $!',
        "tessera": 'test -s "$TESSERA_JOB_SECRET_FILE" && echo "$@"',
    }
    for name, text in stands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    script = ROOT / "examples/slurm/train.sbatch"
    result = subprocess.run(
        ["bash", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = sorted(result.stdout.splitlines())
    assert len(lines) == 2 and not list(tmp_path.glob("secret-*"))
    for node, line in enumerate(lines):
        assert f"--nnodes 2 --node-rank {node} --rdzv-endpoint 127.0.0.1:29500 --rdzv-id 7" in line
        # The verb knows every flag that the example gives it.
        tessera("train", "dlrm", *line.split()[2:], "--print-config")


def test_a_rank_that_raised_is_not_said_to_have_ended_with_a_signal(tmp_path):
    (tmp_path / "raises.py").write_text(
        "import atexit, time\n"
        "atexit.register(time.sleep, 3)  # the launcher's signal meets it on its way out\n"
        "import tessera, torch.distributed as dist\n"
        "dist.init_process_group('shm')\n"
        "if dist.get_rank() == 1: raise ValueError('seven')\n"
        "dist.barrier()\n"
    )
    failed = tessera("run", "-n", 2, "--", sys.executable, tmp_path / "raises.py", code=1)
    assert "error: rank 1 failed first: ValueError: seven" in failed.stderr
    assert re.search(r"why: rank 1 \(pid \d+\) ended with exit code 1 at", failed.stderr)


def test_a_loss_that_is_not_a_number_is_a_failure(tmp_path):
    flags = ["--lr", "1e9", "--steps", 30, "--runs", tmp_path]
    failed = tessera("train", "lm", *flags, code=1)
    assert "the loss is not a number at step" in failed.stderr
    (run,) = tmp_path.iterdir()
    assert '"status":"diverged"' in (run / "metrics.jsonl").read_text()


def test_threads_are_what_the_user_says(tmp_path):
    def threads(name, *flags, before=(), **env):
        words = [
            *before,
            TESSERA,
            "train",
            "dlrm",
            "--steps",
            "1",
            *SMALL,
            "--save",
            str(tmp_path / name),
            *flags,
        ]
        full = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | env
        subprocess.run(words, env=full, check=True, capture_output=True, timeout=LIMIT)
        head = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        return head["machine"]["threads per rank"]

    assert threads("flag", "--threads", "3", OMP_NUM_THREADS="2") == 3
    assert threads("variable", OMP_NUM_THREADS="5") == 5
    cores = len(os.sched_getaffinity(0))
    assert threads("share", "--ranks", "2") <= max(1, cores // 2)
    assert threads("alone") <= cores
    first = str(min(os.sched_getaffinity(0)))
    assert threads("affinity", before=("taskset", "-c", first)) == 1


def test_eval_and_predict_share_the_cores(tmp_path):
    tessera("data", "synth", tmp_path / "a.click", "--samples", 300, "--features", 3, "--rows", 50)
    tessera(
        "train", "dlrm", "--steps", 1, *SMALL[4:], "--data", tmp_path / "a.click", "--save", tmp_path / "run"
    )
    real = os.environ.get("TESSERA_WORKER", str(pathlib.Path(TESSERA).with_name("tessera-worker")))
    worker = tmp_path / "worker"
    worker.write_text(f'#!/bin/sh\necho $OMP_NUM_THREADS >> {tmp_path}/threads\nexec {real} "$@"\n')
    worker.chmod(0o755)
    plain = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    first = str(min(os.sched_getaffinity(0)))
    cores = len(os.sched_getaffinity(0))

    def threads(*words, before=(), **env):
        (tmp_path / "threads").unlink(missing_ok=True)
        command = [*before, TESSERA, *map(str, words), "--data", str(tmp_path / "a.click")]
        env = {**plain, "TESSERA_WORKER": str(worker), **env}
        subprocess.run(command, env=env, check=True, capture_output=True, timeout=LIMIT)
        return [int(line) for line in (tmp_path / "threads").read_text().split()]

    run, out = tmp_path / "run", tmp_path / "scores.csv"
    assert threads("eval", run, "-n", 2, OMP_NUM_THREADS="3") == [3, 3]
    assert threads("eval", run, before=("taskset", "-c", first)) == [1]
    (share,) = threads("predict", run, "--out", out)
    assert 1 <= share <= cores  # fewer if a control group says so
    assert threads("eval", run, "-n", 2) == [max(1, share // 2)] * 2


def test_threads_are_those_that_the_control_group_gives(tmp_path):
    root = pathlib.Path("/sys/fs/cgroup")
    is_unified = (root / "cgroup.controllers").exists()
    group = root / ("" if is_unified else "cpu") / f"tessera-test-{os.getpid()}"
    try:
        group.mkdir()
        if is_unified:
            (group / "cpu.max").write_text("100000 100000")  # one core
        else:
            (group / "cpu.cfs_quota_us").write_text("100000")  # of 100000
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        words = ["train", "dlrm", "--steps", "1", *SMALL, "--save", str(tmp_path / "run")]
        enter = f'echo $$ > {group}/cgroup.procs && unset OMP_NUM_THREADS && exec "$@"'
        subprocess.run(
            ["sh", "-c", enter, "sh", TESSERA, *words], check=True, capture_output=True, timeout=LIMIT
        )
        head = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
        assert head["machine"]["threads per rank"] == 1
        words = ["run", "-n", "cpu", "--no-prefix", "echo", "here"]
        found = subprocess.run(
            ["sh", "-c", enter, "sh", TESSERA, *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert found.stdout == "here\n"
    finally:
        for _ in range(50):  # its last process may still be leaving
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def test_a_training_told_to_stop_while_it_starts_ends_soon(tmp_path):
    """Long before it would have started: the bound is a whole training of one step, timed beside it."""

    def start(name, steps):
        words = [
            TESSERA,
            "train",
            "dlrm",
            "--ranks",
            "2",
            "--steps",
            steps,
            *SMALL,
            "--save",
            tmp_path / name,
        ]
        return subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    ends, whole = [], []
    for delay in (0.05, 0.3, 0.7, 0.15, 0.5):
        begin = time.monotonic()
        process = start(f"whole-{delay}", 1)
        process.communicate(timeout=LIMIT)
        whole.append(time.monotonic() - begin)
        assert process.returncode == 0
        process = start(f"told-{delay}", 100000)
        time.sleep(delay)
        begin = time.monotonic()
        process.terminate()
        # The launcher would kill what is left after 30 s; nothing may need that.
        process.communicate(timeout=10)
        ends.append(time.monotonic() - begin)
        assert process.returncode in (0, 143), delay
    # How many seconds these are says bench/launch/stop_at_start.py on a quiet machine.
    assert statistics.median(ends) < statistics.median(whole), (ends, whole)
