"""`tessera doctor`: what it says, what it checks, and what it answers when something is wrong."""

from __future__ import annotations

import ipaddress
import json
import os
import pathlib
import re
import subprocess
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 60.0  # seconds; for a loaded machine, not a figure
OPERATORS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"}


def doctor(*flags, env=None):
    names = ("TESSERA_ISA", "TESSERA_SHM_DIR", "TESSERA_WORKER", "TESSERA_ENGINE")
    full = {name: value for name, value in os.environ.items() if name not in names}
    full.update(env or {})
    return subprocess.run(
        [TESSERA, "doctor", *flags], capture_output=True, text=True, timeout=LIMIT, env=full
    )


@pytest.fixture(scope="module")
def report():
    result = doctor("--quick", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)


def test_json_has_the_documented_keys(report):
    assert list(report) == [
        "ok",
        "versions",
        "machine",
        "isa",
        "engines",
        "self_test",
        "measured",
        "warnings",
    ]
    assert set(report["versions"]) == {"tessera", "libtorch", "compiler", "kernel"}
    assert set(report["engines"]) == {"shm", "gloo", "cuda", "nccl"}
    assert set(report["engines"]["cuda"]) == {"available", "devices", "build", "driver", "each"}
    assert set(report["machine"]) == {
        "processor",
        "cores",
        "memory",
        "huge_pages",
        "gpus",
        "limits",
        "network",
    }


def test_json_agrees_with_the_system(report):
    cores = report["machine"]["cores"]
    assert cores["usable"] == len(os.sched_getaffinity(0))
    assert cores["online"] == os.cpu_count()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert abs(report["machine"]["memory"]["total_bytes"] - total) < 0.01 * total
    assert report["versions"]["kernel"] == f"{os.uname().sysname} {os.uname().release}"
    shm = report["engines"]["shm"]
    assert shm["available"] and shm["directory"] is None
    assert 0 < shm["free_bytes"] <= shm["total_bytes"] <= report["machine"]["memory"]["total_bytes"]


def test_self_test_checks_every_operator_on_both_engines(report):
    checks = report["self_test"]["checks"]
    assert all(check["passed"] for check in checks)
    for engine in ("shm", "gloo"):
        assert {one["operator"] for one in checks if one["engine"] == engine} == OPERATORS


def test_every_gpu_computes(report):
    cuda = report["engines"]["cuda"]
    assert cuda["devices"] == len(cuda["each"])
    if not cuda["available"]:
        assert cuda["devices"] == 0 and cuda["build"] is None
    for device in cuda["each"]:
        assert device["error"] is None and device["name"]
        assert 0 <= device["free_bytes"] <= device["total_bytes"]


def test_figures_are_plausible(report):
    measured = report["measured"]
    for threads in ("one", "all"):
        assert 0.5 < measured["memory"][threads]["read_gbps"] < 5000
        assert 0.5 < measured["memory"][threads]["copy_gbps"] < 5000
    assert measured["state"] in ("near", "far", "unknown")
    for engine in ("shm", "gloo"):
        times = measured["all_reduce_us"][engine]
        assert 0 < times["4KB"] < 1e6
        assert 0 < times["25MB"] < 1e7


def test_text_fits_a_screen():
    result = doctor("--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert "\x1b" not in result.stdout
    marks = [line[2:6].strip() for line in lines if re.match(r"  (ok|warn|FAIL) ", line)]
    assert len(marks) >= 20
    assert "FAIL" not in marks
    assert lines[-1].startswith("All good")


def test_environment_is_not_shown():
    secret = "hunter2-do-not-show"
    for flags in (["--quick"], ["--quick", "--json"]):
        result = doctor(*flags, env={"AWS_SECRET_ACCESS_KEY": secret, "MY_TOKEN": secret})
        assert secret not in result.stdout + result.stderr


def test_missing_shared_memory_fails_with_what_to_try():
    result = doctor("--quick", env={"TESSERA_SHM_DIR": "/nonexistent"})
    assert result.returncode == 1
    assert "FAIL  shm values" in result.stdout
    assert "/nonexistent" in result.stdout
    assert "TESSERA_SHM_DIR" in result.stdout
    assert "ok    gloo values" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("The self-test failed")


def test_missing_worker_fails_with_what_to_try(tmp_path):
    result = doctor("--quick", "--json", env={"TESSERA_WORKER": str(tmp_path / "absent")})
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert report["self_test"]["error"] == "there is no tessera-worker program beside tessera"
    assert "TESSERA_WORKER" in report["self_test"]["try"]
    assert report["versions"]["libtorch"] is None


def test_silent_worker_fails():
    result = doctor("--quick", env={"TESSERA_WORKER": "/bin/false"})
    assert result.returncode == 1
    assert "FAIL  start" in result.stdout


def test_lower_instruction_set_is_a_warning():
    result = doctor("--quick", "--json", env={"TESSERA_ISA": "default"})
    report = json.loads(result.stdout)
    assert result.returncode == 0
    assert report["isa"]["active"] == "default"
    if len(report["isa"]["available"]) > 1:
        assert "instructions" in [one["about"] for one in report["warnings"]]


def test_wrong_words_are_refused():
    result = doctor("--jsn")
    assert result.returncode == 2
    assert result.stderr == "error: doctor: unknown flag --jsn: did you mean --json?\n"
    result = doctor("now")
    assert result.returncode == 2
    assert result.stderr == "error: doctor: takes flags only, not 'now'\n"


def test_help_ends_with_where_to_read_more():
    result = doctor("--help")
    assert result.returncode == 0
    assert result.stdout.startswith("tessera doctor")
    assert result.stdout.rstrip().endswith("docs/doctor.md")


@pytest.fixture
def short_folder():
    """The path of a Unix socket has 107 bytes at most, of which pytest's folders take many."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_security_shows_that_nothing_is_open_to_other_hosts(short_folder):
    result = doctor("--security", "--json", env={"TMPDIR": short_folder})
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] and found["job_ran"] and found["problems"] == []
    kinds = {(s["holder"], s["protocol"]): s for s in found["sockets"]}
    assert not any(s["other_hosts"] for s in found["sockets"])
    # The store other users cannot even see, the port for torch's own, and Gloo's in the ranks.
    assert kinds["store", "unix"]["other_users"] is False
    assert kinds["store", "unix"]["address"].startswith(short_folder)
    assert kinds["launcher", "tcp"]["address"] == "127.0.0.1"
    assert kinds["rank", "tcp"]["address"] == "127.0.0.1"
    assert found["folder"] == {"path": f"{short_folder}/tessera-{os.geteuid()}", "mode": "0700"}
    assert found["secret"] == {"from": "", "error": ""}


def test_security_tells_private_networks_from_public_ones(short_folder):
    result = doctor(
        "--security", "--json", env={"TMPDIR": short_folder, "TESSERA_INTERFACE": "no-such-interface"}
    )
    report = json.loads(result.stdout)
    assert any("'no-such-interface' that the environment names" in p for p in report["problems"])
    private = [
        ipaddress.ip_network(text)
        for text in (
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "169.254.0.0/16",
            "100.64.0.0/10",
            "fc00::/7",
        )
    ]
    for address in report["addresses"]:
        number = ipaddress.ip_address(address["address"])
        assert address["private"] == any(number in network for network in private), address
        assert not address["chosen"] and not number.is_loopback


def test_security_names_what_is_wrong(tmp_path):
    secret = tmp_path / "job.secret"
    secret.write_text("x" * 40)
    secret.chmod(0o644)
    folder = tmp_path / f"tessera-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    env = {"TMPDIR": str(tmp_path), "TESSERA_JOB_SECRET_FILE": str(secret)}
    result = doctor("--security", env=env)
    assert result.returncode == 1
    assert "can be read or written by other users" in result.stdout
    assert f"{folder} is not private to this user; jobs use {folder}.1. Remove it" in " ".join(
        result.stdout.split()
    )
    assert "x" * 40 not in result.stdout
