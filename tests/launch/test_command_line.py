"""The words of the command line: help, typos, wrong values, configuration."""

import os
import socket
import subprocess

import pytest
from jobs import TESSERA, run
from waiting import free_port


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_fits_a_screen_with_examples_first(words):
    result = run(*words)
    assert result.code == 0
    lines = result.lines
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert lines[2].strip().startswith("tessera run")
    assert lines[-1].endswith("More: docs/launch.md")


@pytest.mark.parametrize(
    "words", [["run", "--help"], ["run", "-h"], ["help", "run"], ["run", "-n", "2", "--help"]]
)
def test_help_of_run_fits_forty_lines(words):
    result = run(*words)
    assert result.code == 0
    assert len(result.lines) <= 40 and max(map(len, result.lines)) <= 100
    assert result.lines[2].strip().startswith("tessera run")


def test_help_of_run_names_every_flag():
    flags = run("completion", "fish").out
    text = run("run", "--help").out
    for line in flags.splitlines():
        if "seen_subcommand_from run'" in line:
            flag = "--" + line.split(" -l ")[1].split()[0]
            assert flag in text or flag == "--help"


def test_no_words_is_wrong_usage_but_helps():
    result = run()
    assert result.code == 2 and "verbs" in result.out


def test_version():
    result = run("--version")
    assert result.code == 0 and result.out.startswith("tessera ")


def test_program_needs_no_libtorch():
    libraries = subprocess.run(["ldd", TESSERA], capture_output=True, text=True, timeout=30).stdout
    assert "libc.so" in libraries and "torch" not in libraries and "c10" not in libraries


@pytest.mark.parametrize(
    "words, text",
    [
        (["rnu"], "error: unknown verb 'rnu': did you mean run?\n"),
        (["zzzzzzzz"], "error: unknown verb 'zzzzzzzz'\n"),
        (["help", "rum"], "error: unknown verb 'rum': did you mean run?\n"),
        (["--versoin"], "error: unknown flag --versoin: did you mean --version?\n"),
        (
            ["run", "--nproc-per-nod", "2", "x"],
            "error: run: unknown flag --nproc-per-nod: did you mean --nproc-per-node?\n",
        ),
        (
            ["run", "--nproc_per_nodes=2", "x"],
            "error: run: unknown flag --nproc-per-nodes: did you mean --nproc-per-node?\n",
        ),
        (
            ["run", "--max-restart", "2", "x"],
            "error: run: unknown flag --max-restart: did you mean --max-restarts?\n",
        ),
        (["run", "-x", "x"], "error: run: unknown flag -x\n"),
        (
            ["run", "--numa_binding", "node", "x"],
            "error: run: --numa-binding is a flag of torchrun that is not offered here\n",
        ),
        (["run", "-n", "0", "x"], "error: run: --nproc-per-node: a job needs at least 1 rank, not 0\n"),
        (["run", "-n", "-3", "x"], "error: run: --nproc-per-node: a job needs at least 1 rank, not -3\n"),
        (
            ["run", "-n", "two", "x"],
            "error: run: --nproc-per-node: 'two' is not a number, auto, cpu or gpu\n",
        ),
        (
            ["run", "-n", "2.5", "x"],
            "error: run: --nproc-per-node: '2.5' is not a number, auto, cpu or gpu\n",
        ),
        (
            ["run", "-n", "100000", "x"],
            "error: run: --nproc-per-node: at most 4096 ranks per host, not 100000\n",
        ),
        (["run", "-n"], "error: run: -n needs a value\n"),
        (["run"], "error: run: no program given; write it last, as in tessera run -n 2 -- ./train\n"),
        (
            ["run", "-n", "2", "--"],
            "error: run: no program given; write it last, as in tessera run -n 2 -- ./train\n",
        ),
        (["run", "--max-restarts", "-1", "x"], "error: run: --max-restarts: -1 is not in [0, 1048576]\n"),
        (
            ["run", "--shutdown-timeout", "soon", "x"],
            "error: run: --shutdown-timeout: 'soon' is not a number of seconds\n",
        ),
        (
            ["run", "--tee", "4", "x"],
            "error: run: --tee: '4' is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)\n",
        ),
        (["run", "--redirects", "3", "x"], "error: run: --redirects needs --log-dir DIR to write to\n"),
        (
            ["run", "--nnodes", "2", "x"],
            "error: run: --nnodes 2 needs --rdzv-endpoint HOST:PORT, the same on every host\n",
        ),
        (
            ["run", "--nnodes", "1:4", "x"],
            "error: run: --nnodes: the number of hosts is fixed; write one number, not 1:4\n",
        ),
        (
            ["run", "--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1", "x"],
            "error: run: --node-rank: 2 is not one of the 2 hosts; they are counted from 0 to 1\n",
        ),
        (
            ["run", "--nnodes", "2", "--standalone", "x"],
            "error: run: --standalone means one host, not --nnodes 2\n",
        ),
        (
            ["run", "--rdzv-endpoint", "host", "x"],
            "error: run: --rdzv-endpoint: a port is missing, as in host:29500\n",
        ),
        (
            ["run", "--rdzv-endpoint", "host:99999", "x"],
            "error: run: --rdzv-endpoint: 99999 is not in [0, 65535]\n",
        ),
        (
            ["run", "--rdzv-endpoint", "::1:2", "x"],
            "error: run: --rdzv-endpoint: an IPv6 address needs brackets, as in [::1]:29500\n",
        ),
        (
            ["run", "--rdzv-backend", "etcd", "x"],
            "error: run: --rdzv-backend: 'etcd' is not offered; leave the flag out\n",
        ),
        (
            ["run", "--rdzv-id", "../x", "x"],
            "error: run: --rdzv-id: '../x' may hold letters, digits, '.', '_' and '-' only\n",
        ),
        (["completion", "tcsh"], "error: completion: unknown shell 'tcsh'\n"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(words, text):
    result = run(*words)
    assert (result.code, result.out, result.err) == (2, "", text)


def test_words_after_the_program_belong_to_it():
    for words in (["echo", "-n", "5", "--help"], ["--", "echo", "-n", "5", "--help"]):
        assert run("run", *words).out == "5 --help"


def test_both_spellings_and_equals_signs():
    for flag in ("--nproc-per-node=2", "--nproc_per_node=2"):
        assert len(run("run", flag, "--max_restarts=0", "echo", "x").lines) == 2
    assert len(run("run", "-n2", "echo", "x").lines) == 2
    flags = [
        "--standalone",
        "--monitor-interval",
        "1",
        "--start_method",
        "spawn",
        "--rdzv-backend",
        "c10d",
        "--rdzv-conf",
        "timeout=5",
        "--role",
        "trainer",
    ]
    assert run("run", *flags, "sh", "-c", "echo $ROLE_NAME").out == "trainer\n"


def test_counts_by_name():
    cpus = len(os.sched_getaffinity(0))
    env = {"CUDA_VISIBLE_DEVICES": ""}
    for word in ("cpu", "auto"):
        # Fewer if a control group says so.
        assert 1 <= len(run("run", "-n", word, "--no-prefix", "echo", "x", env=env).lines) <= cpus
    three = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    assert len(run("run", "-n", "gpu", "echo", "x", env=three).lines) == 3
    assert run("run", "-n", "gpu", "echo", "x", env=env).code == 2


@pytest.mark.parametrize(
    "name, code, text",
    [
        ("no-such-program-here", 127, "no folder of PATH has it"),
        ("./no/such/program", 127, "there is no such file"),
        ("missing.py", 127, "no folder of PATH has it"),
        ("/etc/passwd", 126, "the file has no execute permission"),
        ("/tmp", 126, "it is a folder"),
    ],
)
def test_program_that_cannot_run_is_named_before_any_rank_starts(name, code, text):
    result = run("run", "-n", 2, "--", name)
    assert result.code == code
    lines = result.err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("error: run: ") and name in lines[0]
    assert lines[1].startswith("  why: " + text) and lines[2].startswith("  try: ")


def test_program_in_this_folder_but_not_in_path(tmp_path):
    (tmp_path / "train").write_text("#!/bin/sh\n")
    (tmp_path / "train").chmod(0o755)
    result = run("run", "train", cwd=tmp_path)
    assert result.code == 127 and "  try: write ./train" in result.err


@pytest.mark.parametrize("content, code", [("no shebang\n", 126), ("#!/no/such/program\n", 127)])
def test_script_that_cannot_start(tmp_path, content, code):
    (tmp_path / "x").write_text(content)
    (tmp_path / "x").chmod(0o755)
    result = run("run", "-n", 2, "--", str(tmp_path / "x"))
    assert result.code == code
    assert len(result.err.splitlines()) == 3


def test_port_in_use_is_69():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = run("run", "-n", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--", "true")
    assert result.code == 69
    assert result.err.splitlines()[0] == f"error: rendezvous: cannot listen on 127.0.0.1:{port}"
    assert "Address already in use" in result.err


def test_endpoint_of_one_host_is_the_stores():
    port = free_port()
    result = run(
        "run",
        "-n",
        1,
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--",
        "sh",
        "-c",
        "echo $MASTER_ADDR:$MASTER_PORT",
    )
    assert result.out == f"127.0.0.1:{port}\n"
    result = run(
        "run",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "sh",
        "-c",
        "echo $MASTER_ADDR:$MASTER_PORT",
    )
    assert result.out == f"127.0.0.1:{port}\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_wildcard_is_refused(host):
    result = run("run", "--rdzv-endpoint", f"{host}:{free_port()}", "--", "true")
    assert result.code == 69 and "would listen on every interface" in result.err


def test_unknown_host_is_69():
    result = run("run", "--rdzv-endpoint", "no-such-host.invalid:1234", "--", "true")
    assert result.code == 69 and "'no-such-host.invalid' is not known" in result.err


def test_configuration_file(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('# ranks\nnproc-per-node = 3\nrole = "trainer"\nno-prefix = true\n')
    words = ["sh", "-c", "echo $RANK $WORLD_SIZE $ROLE_NAME"]
    result = run("run", "--config", config, "--", *words)
    assert sorted(result.lines) == ["0 3 trainer", "1 3 trainer", "2 3 trainer"]
    result = run("run", "--config", config, "-n", 1, "--", *words)
    assert result.out == "0 1 trainer\n"


def test_printed_configuration_can_be_read_again(tmp_path):
    config = tmp_path / "run.toml"
    printed = run("run", "-n", 2, "--max-restarts", 4, "--no-prefix", "--print-config")
    assert printed.code == 0
    config.write_text(printed.out)
    again = run("run", "--config", config, "--print-config")
    assert again.out == printed.out and "max-restarts=4" in again.out


def test_unknown_key_is_78(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text("nproc-per-nodes = 3\n")
    result = run("run", "--config", config, "--", "true")
    assert result.code == 78
    assert f"{config}, line 1: there is no key 'nproc-per-nodes'" in result.err
    assert "the closest is nproc-per-node" in result.err
    result = run("run", "--config", tmp_path / "absent.toml", "--", "true")
    assert result.code == 78 and "absent.toml" in result.err


def test_completion_scripts_are_valid():
    for shell in ("bash", "zsh", "fish"):
        result = run("completion", shell)
        assert result.code == 0 and "nproc-per-node" in result.out
    script = run("completion", "bash").out + (
        "\nCOMP_WORDS=(tessera run --nproc-p); COMP_CWORD=2; _tessera; echo ${COMPREPLY[@]}"
    )
    out = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30).stdout
    assert out == "--nproc-per-node\n"
