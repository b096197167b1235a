"""Versions that are published, taken over by servers while they answer."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import threading
import time

import pytest
from conftest import request_of, some_samples, tessera
from publications import (
    answer_of,
    ask_until,
    copy,
    export,
    folder_of,
    link,
    processes_of,
    steps_in,
    wait_for,
)


def tensors_of(folder: pathlib.Path) -> dict:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(safetensors.load_file(file))
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("model.", "tables."))}


@pytest.fixture(scope="session")
def published(run, tmp_path_factory) -> pathlib.Path:
    """A whole version, then deltas, as a program in Python publishes them."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("tessera.checkpoint")
    folder = tmp_path_factory.mktemp("published") / "kept"
    tensors = tensors_of(run / "checkpoints" / "step-000000000040")
    torch.manual_seed(1)
    base = None
    for step in (41, 45, 50, 60):
        state = dict(tensors)
        for name, tensor in tensors.items() if base else ():
            if name.startswith("model."):
                tensor += 0.01 * torch.randn_like(tensor)
                continue
            rows = torch.randperm(tensor.size(0))[:20].sort().values
            tensor[rows] += 0.1 * torch.randn(20, tensor.size(1))
            state[name] = checkpoint.Shard(tensor, tensor.shape, [0, 0], rows)
        checkpoint.save(folder, step, state, base=base)
        base = step
    return folder


def test_each_version_is_an_export_of_its_step_to_the_bit(published, serve, tmp_path):
    steps = steps_in(published)
    watched = tmp_path / "watched"
    link(published, steps[0], watched)
    server = serve(export(published, steps[0], tmp_path / "pkg"), "--watch", str(watched))
    request = request_of(some_samples(20))
    for step in steps[1:4]:
        link(published, step, watched)
        figures = wait_for(server, step)
        assert figures["updates"]["whole"] == 0
        own = serve(export(published, step, tmp_path / f"pkg-{step}"))
        assert answer_of(server, request) == answer_of(own, request)
        assert own.stop() == 0
    assert figures["updates"]["applied"] == 3
    assert figures["updates"]["rows"] > 0
    # Several versions by their addresses.
    for step in steps[1:4]:
        path = f"/v2/models/dlrm/versions/{step}/infer"
        assert answer_of(server, request, path)[0] == step
    assert server.ask(f"/v2/models/dlrm/versions/{steps[0]}/infer", json.dumps(request))[0] == 404
    metadata = json.loads(server.ask("/v2/models/dlrm")[2])
    assert metadata["versions"] == [str(step) for step in steps[1:4]]
    text = server.ask("/metrics")[2].decode()
    assert f"tessera_model_version {steps[3]}\n" in text
    assert "tessera_updates_total 3\n" in text


def test_going_back_by_name_holds_updates_until_told(published, serve, tmp_path):
    steps = steps_in(published)
    watched = tmp_path / "watched"
    link(published, steps[0], watched)
    server = serve(export(published, steps[0], tmp_path / "pkg"), "--watch", str(watched))
    request = request_of(some_samples(3))
    first = answer_of(server, request)
    link(published, steps[1], watched)
    wait_for(server, steps[1])

    def admin(path):
        code, _, body = server.ask(path, b"", port=server.admin_port)
        return code, json.loads(body)

    assert admin("/admin/rollback")[0] == 400
    assert admin("/admin/rollback?version=999")[0] == 404
    code, versions = admin(f"/admin/rollback?version={steps[0]}")
    assert (code, versions["held"]) == (200, True)
    assert [v["version"] for v in versions["versions"] if v["current"]] == [steps[0]]
    assert answer_of(server, request) == first
    link(published, steps[2], watched)
    time.sleep(0.6)  # longer than a look at the folder
    assert answer_of(server, request) == first
    assert admin("/admin/resume")[0] == 200
    wait_for(server, steps[2])
    own = serve(export(published, steps[2], tmp_path / "own"))
    assert answer_of(server, request) == answer_of(own, request)


def test_a_damaged_delta_is_said_and_the_old_version_goes_on(published, serve, tmp_path):
    steps = steps_in(published)
    watched = tmp_path / "watched"
    link(published, steps[0], watched)
    server = serve(export(published, steps[0], tmp_path / "pkg"), "--watch", str(watched))
    request = request_of(some_samples(3))
    before = answer_of(server, request)
    copy(published, steps[1], watched, damage=True)
    deadline = time.monotonic() + 30
    while "refused" not in server.errors.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert answer_of(server, request) == before
    figures = json.loads(server.ask("/admin/figures", port=server.admin_port)[2])
    assert (figures["updates"]["refused"], figures["version"]) == (1, steps[0])
    assert "goes on" in figures["updates"]["error"]
    assert "tessera_delta_refused_total 1\n" in server.ask("/metrics")[2].decode()
    # What stands on it cannot be used either; the next whole version can: all rows are read.
    link(published, steps[2], watched)
    deadline = time.monotonic() + 30
    while json.loads(server.ask("/admin/figures", port=server.admin_port)[2])["updates"]["refused"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert answer_of(server, request) == before
    whole = tmp_path / "whole"
    tensors = tensors_of(published / folder_of(steps[0]))
    pytest.importorskip("tessera.checkpoint").save(
        whole, steps[-1] + 1, {name: tensor + 0.01 for name, tensor in tensors.items()}
    )
    shutil.rmtree(watched)
    os.rename(whole, watched)
    figures = wait_for(server, steps_in(watched)[-1])
    assert figures["updates"]["whole"] == 1
    assert figures["updates"]["error"] == ""
    own = serve(export(watched, figures["version"], tmp_path / "own"))
    assert answer_of(server, request) == answer_of(own, request)


def test_a_canary_refuses_versions_that_move_too_far(published, serve, tmp_path):
    steps = steps_in(published)
    watched = tmp_path / "watched"
    link(published, steps[0], watched)
    package = export(published, steps[0], tmp_path / "pkg")
    canary = tmp_path / "canary.jsonl"
    canary.write_text("\n".join(json.dumps(request_of(some_samples(5, seed))) for seed in range(3)))
    server = serve(package, "--watch", str(watched), "--canary", str(canary), "--canary-bound", "0")
    link(published, steps[1], watched)
    deadline = time.monotonic() + 30
    while "of the canary" not in server.errors.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert wait_for(server, steps[0])["updates"]["refused"] == 1
    assert server.stop() == 0
    server = serve(package, "--watch", str(watched), "--canary", str(canary), "--canary-bound", "1")
    wait_for(server, steps[1])
    canary.write_text("{}")
    result = tessera("serve", package, "--watch", watched, "--canary", canary, "--port", 0, check=False)
    assert result.returncode == 78
    assert "request 0" in result.stderr


def test_processes_that_are_killed_are_started_again(published, serve, tmp_path):
    """kill -9 of any process: only what it had not answered fails, and no answer is wrong."""
    steps = steps_in(published)
    watched = tmp_path / "watched"
    link(published, steps[0], watched)
    package = export(published, steps[0], tmp_path / "pkg")
    server = serve(package, "--watch", str(watched), "--processes", "3")
    request = request_of(some_samples(4))
    wanted = {steps[0]: answer_of(server, request)[1]}
    assert len(processes_of(server)) == 4  # three that answer, one that writes
    event, answers, failures = threading.Event(), [], []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(ask_until, event, server, request, answers, failures) for _ in range(4)]
        for round_ in range(6):
            victims = processes_of(server)
            os.kill(victims[round_ % len(victims)], signal.SIGKILL)
            deadline = time.monotonic() + 20
            while len(set(processes_of(server)) - set(victims)) != 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if round_ in (1, 3):  # also the writer's successor goes on
                step = steps[1 + round_ // 2]
                link(published, step, watched)
                wait_for(server, step)
                own = serve(export(published, step, tmp_path / f"pkg-{step}"))
                wanted[step] = answer_of(own, request)[1]
                assert own.stop() == 0
        assert answer_of(server, request)[0] == steps[2]
        event.set()
        for asker in askers:
            asker.result(timeout=30)
    assert len(failures) <= 4 * 6  # no more than the connections of those that were killed
    assert answers
    for step, numbers in answers:
        assert wanted[step] == numbers
    text = server.ask("/metrics")[2].decode()
    assert "tessera_restarts_total 6\n" in text
    assert server.stop() == 0


def test_processes_take_over_a_new_package_and_leave_nobody_behind(run, serve, tmp_path):
    tessera("export", run, "--out", tmp_path / "pkg", "--dtype", "int8")
    server = serve(tmp_path / "pkg", "--processes", "2")
    request = request_of(some_samples(5))
    before, old = answer_of(server, request), set(processes_of(server))
    tessera("export", run, "--out", tmp_path / "pkg", "--dtype", "int2")
    assert server.ask("/admin/reload", b"", port=server.admin_port)[0] == 202
    deadline = time.monotonic() + 20
    while old & set(processes_of(server)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert answer_of(server, request) != before
    children = processes_of(server)
    assert len(children) == 2
    server.kill()  # not even time to tell them
    deadline = time.monotonic() + 20
    while any(pathlib.Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_memory_of_processes_is_that_of_one(published, serve, tmp_path):
    """Rows that were updated lie in memory once, whoever reads them."""
    steps = steps_in(published)
    watched = tmp_path / "watched"
    link(published, steps[0], watched)
    server = serve(export(published, steps[0], tmp_path / "pkg"), "--watch", str(watched), "--processes", "4")
    link(published, steps[1], watched)
    wait_for(server, steps[1])
    shared = {}
    for process in processes_of(server):
        maps = pathlib.Path(f"/proc/{process}/maps").read_text()
        for line in maps.splitlines():
            if "memfd:tessera-rows" in line:
                shared.setdefault(line.split()[4], set()).add(process)  # by inode
    assert len(shared) == 1
    assert all(len(processes) == 5 for processes in shared.values())
