"""A folder into which a training publishes, and servers that follow it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import struct
import threading
import time

from conftest import tessera

INFER = "/v2/models/dlrm/infer"


def steps_in(root: pathlib.Path) -> list[int]:
    """Steps that are there, whole."""
    names = os.listdir(root) if root.exists() else []
    return sorted(int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdigit())


def folder_of(step: int) -> str:
    return f"step-{step:012d}"


def link(root: pathlib.Path, step: int, to: pathlib.Path) -> None:
    """Gives a checkpoint a second place, where it appears whole."""
    to.mkdir(exist_ok=True)
    draft = to / f".{folder_of(step)}"
    shutil.copytree(root / folder_of(step), draft, copy_function=os.link)
    os.rename(draft, to / folder_of(step))


def copy(root: pathlib.Path, step: int, to: pathlib.Path, damage: bool = False) -> None:
    """The same with bytes of its own, one of which may be wrong."""
    to.mkdir(exist_ok=True)
    draft = to / f".{folder_of(step)}"
    shutil.copytree(root / folder_of(step), draft)
    if damage:
        for file in draft.glob("*.safetensors"):
            data = bytearray(file.read_bytes())
            length = struct.unpack_from("<Q", data)[0]
            header = json.loads(data[8 : 8 + length])
            for name, tensor in header.items():
                if "@values" in name:  # rows that were changed
                    data[8 + length + tensor["data_offsets"][1] - 1] ^= 1
            file.write_bytes(data)
    os.rename(draft, to / folder_of(step))


class Keeper(threading.Thread):
    """Keeps all that appears in a folder, also what the training removes later."""

    def __init__(self, root: pathlib.Path, kept: pathlib.Path):
        super().__init__(daemon=True)
        self.root, self.kept, self.is_over = root, kept, threading.Event()

    def look(self):
        for step in set(steps_in(self.root)) - set(steps_in(self.kept)):
            with contextlib.suppress(OSError, shutil.Error):  # removed meanwhile
                link(self.root, step, self.kept)

    def run(self):
        while not self.is_over.wait(0.02):
            self.look()
        self.look()


def export(root, step, out, *flags) -> pathlib.Path:
    tessera("export", root, "--step", step, "--out", out, *flags)
    return out


def answer_of(server, request, path=INFER):
    code, headers, body = server.ask(path, json.dumps(request))
    assert code == 200, body
    return int(headers["Tessera-Version"]), json.loads(body)["outputs"][0]["data"]


def wait_for(server, step, seconds=30):
    deadline = time.monotonic() + seconds
    while True:
        figures = json.loads(server.ask("/admin/figures", port=server.admin_port)[2])
        if figures["version"] == step:
            return figures
        assert time.monotonic() < deadline, figures
        time.sleep(0.01)


def ask_until(event, server, request, answers, failures):
    """Asks on one connection; what it cannot ask is counted, and a new connection is made."""
    body = json.dumps(request)
    while not event.is_set():
        with contextlib.closing(server.connect(timeout=10)) as connection:
            try:
                while not event.is_set():
                    connection.request("POST", INFER, body)
                    answer = connection.getresponse()
                    data = answer.read()
                    assert answer.status == 200, data
                    answers.append(
                        (int(answer.headers["Tessera-Version"]), json.loads(data)["outputs"][0]["data"])
                    )
            except (OSError, http.client.HTTPException):
                failures.append(time.monotonic())


def processes_of(server) -> list[int]:
    children = pathlib.Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(process) for process in children.split()]
