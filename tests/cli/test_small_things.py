"""What a new user meets first: mistyped files, narrow terminals, folders that hold nothing."""

from __future__ import annotations

import fcntl
import os
import pathlib
import pty
import re
import struct
import subprocess
import termios

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
    # Twelve tables: the ten largest, and how many there are beside them.
    assert "  and 2 tables that are not larger" in text


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


def test_completion_knows_workloads_and_what_verbs_do():
    script = tessera("completion", "bash").stdout
    tries = {"train ''": "dlrm lm gnn", "data c": "convert check", "plan ''": "tables graph"}
    for words, wanted in tries.items():
        command = f"{script}\nCOMP_WORDS=(tessera {words}) COMP_CWORD=2; _tessera; echo ${{COMPREPLY[@]}}"
        found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert set(wanted.split()) <= set(found.split()), words
