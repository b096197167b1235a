"""Doors of a server: TLS, client certificates, Unix sockets, and what is refused."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import stat
import subprocess

import pytest
from conftest import request_of, some_samples, tessera

INFER = "/v2/models/dlrm/infer"

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl program")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, a server and a client that it has signed, and a stranger."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=folder)

    for name in ("authority", "strange"):
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key",
                "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "authority.pem", "-CAkey", "authority.key",
                "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
    return folder


def https(server, context) -> tuple[int, dict]:
    with contextlib.closing(
        http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=20)
    ) as connection:
        answers = []
        for _ in range(3):  # one connection, several requests
            connection.request("POST", INFER, json.dumps(request_of(some_samples(2))))
            answer = connection.getresponse()
            answers.append((answer.status, json.loads(answer.read())))
        assert answers[0] == answers[1] == answers[2]
        return answers[0]


@needs_openssl
def test_answers_travel_by_tls(package, serve, certificates):
    plain = serve(package)
    server = serve(
        package, "--tls-cert", certificates / "server.pem", "--tls-key", certificates / "server.key"
    )
    context = ssl.create_default_context(cafile=certificates / "authority.pem")
    assert https(server, context) == plain.infer(request_of(some_samples(2)))
    # Whom nobody has signed is not believed, an old version is not spoken, and no TLS is no answer.
    with pytest.raises(ssl.SSLError):
        https(server, ssl.create_default_context(cafile=certificates / "strange.pem"))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, OSError)):
        https(server, old)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"200" not in raw.recv(1000)
    assert https(server, context)[0] == 200
    assert server.ask("/admin/versions", port=server.admin_port)[0] == 200  # this machine's own port
    assert server.stop() == 0


@needs_openssl
def test_only_clients_with_a_certificate_are_let_in(package, serve, certificates):
    server = serve(
        package, "--tls-cert", certificates / "server.pem", "--tls-key", certificates / "server.key",
        "--tls-client-ca", certificates / "authority.pem",
    )  # fmt: skip

    def context(name=None):
        made = ssl.create_default_context(cafile=certificates / "authority.pem")
        if name:
            made.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
        return made

    assert https(server, context("client"))[0] == 200
    for name in (None, "strange"):
        with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
            https(server, context(name))
    assert https(server, context("client"))[0] == 200


@needs_openssl
def test_a_slow_handshake_is_sent_away_and_harms_nobody(package, serve, certificates):
    server = serve(
        package, "--tls-cert", certificates / "server.pem", "--tls-key", certificates / "server.key",
        "--header-timeout", "300",
    )  # fmt: skip
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(20)]
    for raw in slow:
        raw.sendall(b"\x16\x03\x01")
    assert https(server, ssl.create_default_context(cafile=certificates / "authority.pem"))[0] == 200
    for raw in slow:
        with contextlib.suppress(ConnectionError):
            while raw.recv(1000):
                pass
        raw.close()
    assert server.stop() == 0


@needs_openssl
def test_keys_that_cannot_be_used_are_named(package, certificates, tmp_path):
    for flags, code, text in [
        (["--tls-cert", certificates / "server.pem"], 2, "go together"),
        (["--tls-client-ca", certificates / "authority.pem"], 2, "needs --tls-cert"),
        (["--tls-cert", tmp_path / "none.pem", "--tls-key", certificates / "server.key"], 78, "none.pem"),
        (
            ["--tls-cert", certificates / "server.pem", "--tls-key", certificates / "client.key"],
            78,
            "client.key",
        ),
    ]:
        result = tessera("serve", package, "--port", 0, "--admin-port", 0, *flags, check=False)
        assert (result.returncode, text in result.stderr) == (code, True), result.stderr


@needs_openssl
def test_other_machines_need_a_token_and_tls_or_the_word(package, serve, certificates, tmp_path):
    token = tmp_path / "token"
    token.write_text("correct-horse-battery\n")
    token.chmod(0o600)
    tls = ["--tls-cert", certificates / "server.pem", "--tls-key", certificates / "server.key"]
    for flags, missing in [
        ([], "no --token-file, and no --tls-cert"),
        (["--token-file", token], "no --tls-cert"),
        (tls, "no --token-file"),
    ]:
        result = tessera("serve", package, "--listen", "0.0.0.0", "--port", 0, *flags, check=False)
        assert (result.returncode, missing in result.stderr) == (78, True), result.stderr
    server = serve(package, "--listen", "0.0.0.0", "--token-file", token, *tls)
    with pytest.raises(AssertionError):  # 401 is no JSON of outputs three times alike with 200
        assert https(server, ssl.create_default_context(cafile=certificates / "authority.pem"))[0] == 200
    assert serve(package, "--listen", "0.0.0.0", "--insecure").infer(request_of(some_samples(1)))[0] == 200


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(self.path))


def test_a_unix_socket_is_for_its_user_alone(package, serve, tmp_path):
    path = tmp_path / "socket"
    plain = serve(package)
    server = serve(package, "--listen", f"unix:{path}")
    assert server.port == 0
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with contextlib.closing(UnixConnection(path)) as connection:
        connection.request("POST", INFER, json.dumps(request_of(some_samples(2))))
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())) == plain.infer(request_of(some_samples(2)))
    # In use: refused. Left over: replaced. Gone after a stop.
    result = tessera("serve", package, "--listen", f"unix:{path}", "--admin-port", 0, check=False)
    assert (result.returncode, str(path) in result.stderr) == (69, True)
    server.kill()
    assert path.exists()
    again = serve(package, "--listen", f"unix:{path}")
    assert again.stop() == 0
    assert not path.exists()


def test_an_address_that_is_no_address_is_named(package):
    result = tessera("serve", package, "--listen", "127.0.0.x", "--admin-port", 0, check=False)
    assert (result.returncode, "127.0.0.x" in result.stderr) == (69, True)
