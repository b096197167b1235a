"""Another user of the host looks for anything of a running job that can be opened."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading

import pytest
from fleet import Fleet

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

# Says what it could open, read or write. Nothing is trusted to be there: the processes end any time.
SEARCH = """
import json, os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
pids, folders, names, ports = json.loads(sys.argv[1])
found = []

def opens(path):
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try:
            os.close(os.open(path, flags | os.O_NONBLOCK))
            found.append(path)
        except OSError:
            pass

for pid in pids:
    for name in ("mem", "maps", "environ", "fd", "map_files", "auxv", "pagemap", "stack", "cwd/.", "root/."):
        opens(f"/proc/{pid}/{name}")
for top in folders:
    for folder, inner, files in os.walk(top):
        for name in inner + files:
            opens(os.path.join(folder, name))
for name in names:
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as end:
            end.settimeout(3)
            try:
                end.connect(name.replace("@", chr(0), 1) if name.startswith("@") else name)
                end.send(b"tessera")
                if end.recv(100):
                    found.append(name)
            except OSError:
                pass
for port in ports:
    try:
        with socket.socket() as end:
            end.settimeout(20)
            end.connect(("127.0.0.1", port))
            end.send(b"tessera" * 20)
            if end.recv(100):
                found.append(port)
    except OSError:
        pass
print(json.dumps(found))
"""


def sockets_of(pids):
    own = set()
    for pid in pids:
        for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                own.add(target[8:-1])
    return own


def unix_names(pids):
    """The names of the Unix sockets that these processes have open."""
    own = sockets_of(pids)
    rows = [row.split() for row in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({row[7] for row in rows if len(row) > 7 and row[6] in own})


def tcp_ports(pids):
    """The TCP ports at which these processes listen."""
    own = sockets_of(pids)
    rows = [row.split() for row in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in own})


def search(pids, folders, names, ports):
    words = json.dumps([pids, folders, names, ports])
    said = subprocess.run(
        [sys.executable, "-c", SEARCH, words], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(said.stdout)


def test_finds_nothing_of_a_running_job():
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o1777)  # as the system's own
    # That the search finds what is open to it.
    bait = pathlib.Path(folder, "bait")
    bait.write_text("read me")
    bait.chmod(0o644)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/line")
    os.chmod(f"{folder}/line", 0o666)
    listener.listen()
    try:
        with socket.create_server(("127.0.0.1", 0)) as open_to_all:
            port = open_to_all.getsockname()[1]
            serving = threading.Thread(target=lambda: open_to_all.accept()[0].sendall(b"welcome"))
            serving.start()
            assert search([], [folder], [f"{folder}/line"], [port]) == [str(bait), port]
            serving.join()
        listener.close()
        bait.unlink()
        os.unlink(f"{folder}/line")
        with Fleet("loop", "count=1000", env={"TESSERA_ENGINE": "shm", "TMPDIR": folder}).run(2) as fleet:
            fleet.warm(2)
            pids = fleet.members()
            assert len(pids) >= 3  # launcher and ranks
            assert os.listdir(folder) != []  # the launcher's own
            shared = [os.path.join("/dev/shm", name) for name in os.listdir("/dev/shm") if "tessera" in name]
            ports = tcp_ports(pids)
            assert len(ports) == 1  # that of torch's store, for whom the job's users ask
            assert search(pids, [folder, *shared], unix_names(pids), ports) == []
            assert set(fleet.members()) == set(pids)  # nothing was started for it
    finally:
        shutil.rmtree(folder)
