"""tessera serve as a process: right answers, and nothing but errors for the rest."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import random
import signal
import socket
import struct
import time

import pytest
from conftest import NUM_TABLES, request_of, some_samples, tessera

INFER = "/v2/models/dlrm/infer"


def probabilities(answer: dict) -> list[float]:
    return answer["outputs"][0]["data"]


@pytest.fixture(scope="module")
def torch_logits(run):
    """The model of the checkpoint, by torch's own operators."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {}
    for file in (run / "checkpoints" / "step-000000000040").glob("*.safetensors"):
        for name, tensor in safetensors.load_file(file).items():
            assert name not in tensors  # whole, or the test must join them
            tensors[name] = tensor

    def linear(x, layer):
        return torch.nn.functional.linear(x, tensors[f"model.{layer}.weight"], tensors[f"model.{layer}.bias"])

    def logits(samples):
        dense = torch.tensor([dense for dense, _ in samples])
        first = linear(dense, "bottom.layer_0").relu()
        first = linear(first, "bottom.layer_1").relu()
        vectors = [first]
        for f in range(NUM_TABLES):
            weight = tensors[f"tables.embedding_bags.cat_{f}.weight"]
            rows = [weight[torch.tensor(bags[f], dtype=torch.long)].sum(0) for _, bags in samples]
            vectors.append(torch.stack(rows))
        stacked = torch.stack(vectors, 1)
        products = stacked @ stacked.transpose(1, 2)
        i, j = torch.tril_indices(NUM_TABLES + 1, NUM_TABLES + 1, offset=-1)
        mixed = torch.cat([first, products[:, i, j]], 1)
        return linear(linear(mixed, "top.layer_0").relu(), "top.layer_1").squeeze(1)

    return logits


def test_answers_are_those_of_the_trained_model(run, serve, tmp_path, torch_logits):
    tessera("export", run, "--out", tmp_path / "pkg", "--dtype", "fp32")
    server = serve(tmp_path / "pkg")
    samples = some_samples(90)
    request = request_of(samples)
    request["outputs"] = [{"name": "logit"}, {"name": "probability"}]
    code, answer = server.infer(request)
    assert code == 200, answer
    wanted = torch_logits(samples)
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    assert outputs["logit"] == pytest.approx(wanted.tolist(), abs=2e-5)
    assert outputs["probability"] == pytest.approx(wanted.sigmoid().tolist(), abs=1e-5)
    assert answer["model_version"] == "40"


def test_the_protocol(package, serve):
    server = serve(package)
    assert server.ask("/v2/health/live")[0] == 200
    assert server.ask("/v2/health/ready")[0] == 200
    assert json.loads(server.ask("/v2")[2])["extensions"] == ["binary_tensor_data"]
    metadata = json.loads(server.ask("/v2/models/dlrm")[2])
    assert metadata["versions"] == ["40"]
    assert [i["name"] for i in metadata["inputs"]][:3] == ["dense", "cat_0.values", "cat_0.lengths"]
    assert json.loads(server.ask("/v2/models/dlrm/versions/40")[2]) == metadata
    assert server.ask("/v2/models/dlrm/ready")[0] == 200
    request = request_of(some_samples(1)) | {"id": "é1", "parameters": {"request_id": "r9"}}
    code, answer = server.infer(request)
    assert (code, answer["id"], answer["parameters"]["request_id"]) == (200, "é1", "r9")
    versioned = server.ask("/v2/models/dlrm/versions/40/infer", json.dumps(request))
    assert versioned[0] == 200
    assert versioned[1]["Tessera-Version"] == "40"
    head = server.ask("/v2/health/live", method="HEAD")
    assert (head[0], head[2]) == (200, b"")


def test_binary_tensors_give_the_bits_of_json(package, serve):
    server = serve(package)
    samples = some_samples(7)
    _, plain = server.infer(request_of(samples))
    request = request_of(samples)
    tail = b""
    for tensor in request["inputs"]:
        flat = tensor.pop("data")
        if tensor["name"] == "dense":
            flat = [x for row in flat for x in row]
        form = {"FP32": "f", "INT64": "q", "INT32": "i"}[tensor["datatype"]]
        bytes_ = struct.pack(f"<{len(flat)}{form}", *flat)
        tensor["parameters"] = {"binary_data_size": len(bytes_)}
        tail += bytes_
    request["parameters"] = {"binary_data_output": True}
    head = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    code, answered, body = server.ask(INFER, head + tail, headers)
    assert code == 200, body
    length = int(answered["Inference-Header-Content-Length"])
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 28}
    values = struct.unpack("<7f", body[length:])
    assert [struct.pack("<f", x) for x in probabilities(plain)] == [struct.pack("<f", x) for x in values]
    assert server.ask(INFER, head + tail[:-1], headers)[0] == 400
    assert server.ask(INFER, head, {"Inference-Header-Content-Length": "x"})[0] == 400


def test_outputs_are_halves_where_the_package_or_the_request_says_so(run, serve, tmp_path):
    tessera("export", run, tmp_path / "pkg", "--output-dtype", "fp16")
    server = serve(tmp_path / "pkg")
    metadata = json.loads(server.ask("/v2/models/dlrm")[2])
    assert {output["datatype"] for output in metadata["outputs"]} == {"FP16"}
    request = request_of(some_samples(5))
    request["outputs"] = [
        {"name": "probability"},
        {"name": "logit", "parameters": {"datatype": "FP32"}},
    ]
    code, answer = server.infer(request)
    assert code == 200, answer
    halves, singles = answer["outputs"]
    assert (halves["datatype"], singles["datatype"]) == ("FP16", "FP32")
    assert halves["data"] != singles["data"]
    for half in halves["data"]:  # each is a number that a half can hold
        assert struct.unpack("<e", struct.pack("<e", half))[0] == pytest.approx(half, rel=1e-7)
    request["parameters"] = {"binary_data_output": True}
    code, headers, body = server.ask(INFER, json.dumps(request).encode())
    assert code == 200, body
    tail = body[int(headers["Inference-Header-Content-Length"]) :]
    assert len(tail) == 5 * 2 + 5 * 4
    assert struct.unpack("<5e", tail[:10]) == pytest.approx(halves["data"], rel=1e-7)
    request["outputs"][0]["parameters"] = {"datatype": "INT8"}
    code, answer = server.infer(request)
    assert (code, answer["where"]) == (422, "outputs[0].parameters.datatype")


def test_requests_behind_each_other_are_answered_in_their_order(package, serve):
    """Thousands of requests in one piece: one answer each, and no stack that grows with them."""
    server = serve(package)
    count = 3000
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 30)) as raw:
        raw.sendall(b"GET /v2/health/live HTTP/1.1\r\n\r\n" * (count - 1))
        raw.sendall(b"GET /nowhere HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = b""
        while piece := raw.recv(1 << 16):
            answers += piece
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == count - 1
    assert answers.count(b'{"live":true}\n') == count - 1
    assert answers.index(b"HTTP/1.1 404 Not Found\r\n") > answers.rindex(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("piece", [1 << 30, 70_001, 4096, 1500])
def test_bodies_behind_each_other_are_read_to_their_last_byte(package, serve, piece):
    """Larger and smaller than what is read at a time, in pieces that end anywhere."""
    server = serve(package)
    bodies = [json.dumps(request_of(some_samples(count, count))).encode() for count in (1, 400, 2, 90, 1)]
    assert len(bodies[1]) > 2 * (64 << 10)
    wanted = [server.infer(body)[1]["outputs"] for body in bodies]
    stream = b"".join(
        b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(body), body)
        for body in bodies
    )
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 30)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(stream), piece):
            raw.sendall(stream[begin : begin + piece])
        raw.sendall(b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
        reader = raw.makefile("rb")
        for outputs in wanted:
            assert b" 200 " in reader.readline()
            headers = http.client.parse_headers(reader)
            assert json.loads(reader.read(int(headers["Content-Length"])))["outputs"] == outputs
        assert reader.read().endswith(b'{"live":true}\n')


def test_company_in_a_batch_changes_no_bit(package, serve):
    server = serve(package, "--batch-wait", "2000", "--threads", "2", "--workers", "2")
    samples = some_samples(60)
    alone = [server.infer(request_of([sample]))[1]["outputs"] for sample in samples]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for _ in range(3):
            together = list(pool.map(lambda sample: server.infer(request_of([sample])), samples))
            assert all(code == 200 for code, _ in together)
            assert [answer["outputs"] for _, answer in together] == alone
    text = server.ask("/metrics")[2].decode()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert int(figures["tessera_samples_total"]) == 240
    assert int(figures["tessera_batches_total"]) < 240
    assert int(figures['tessera_requests_total{code="200"}']) == 240
    assert int(figures['tessera_latency_seconds_count{stage="total"}']) == 240


def changed(what) -> dict:
    request = request_of(some_samples(3))
    what(request["inputs"])
    return request


@pytest.mark.parametrize(
    ("body", "code", "where"),
    [
        (b"{", 400, "byte 1"),
        (b"\xff\x00", 400, "byte 0"),
        (b"{}", 422, "inputs"),
        (changed(lambda i: i.pop(3)), 422, "inputs"),
        (changed(lambda i: i.append(i[1])), 422, "inputs[25].name"),
        (changed(lambda i: i[0].update(datatype="INT64")), 422, "inputs[0].datatype"),
        (changed(lambda i: i[0].update(shape=[3, 12])), 422, "inputs[0].shape"),
        (changed(lambda i: i[2].update(data=[1, 1, -1])), 400, "cat_0.lengths[2]"),
        (changed(lambda i: i[2].update(data=[99, 1, 1])), 400, "cat_0.lengths"),
        (changed(
            lambda i: (i[1].update(data=[200], shape=[1]), i[2].update(data=[1, 0, 0]))
        ), 422, "cat_0.values[0]"),
        (changed(lambda i: i[1].update(name="dog_0.values")), 422, "inputs[1].name"),
    ],
)  # fmt: skip
def test_wrong_requests_are_answered_with_the_place(package, serve, body, code, where):
    server = serve(package)
    found, answer = server.infer(body)
    assert (found, answer.get("where")) == (code, where), answer
    assert server.infer(request_of(some_samples(1)))[0] == 200
    assert server.stop() == 0


def test_wrong_addresses_and_methods(package, serve):
    server = serve(package)
    good = json.dumps(request_of(some_samples(1)))
    for path, body, headers, code in [
        ("/", None, {}, 404),
        ("/v2/models/other", None, {}, 404),
        ("/v2/models/other/infer", good, {}, 404),
        ("/v2/models/dlrm/versions/41", None, {}, 404),
        ("/v2/models/dlrm/versions/41/infer", good, {}, 404),
        (INFER, None, {}, 405),
        ("/v2/health/live", good, {}, 405),
        (INFER, good, {"Content-Encoding": "gzip"}, 415),
        (INFER, good, {"Request-Timeout-Ms": "soon"}, 400),
        ("/admin/drain", b"", {}, 404),
        ("/x" * 20000, None, {}, 431),
    ]:
        found, _, answer = server.ask(path, body, headers)
        assert found == code, (path[:40], answer)
        assert "error" in json.loads(answer)


def test_limits_hold_before_memory_is_spent(package, serve):
    server = serve(package, "--max-body", "4096", "--max-ids", "50")
    good = json.dumps(request_of(some_samples(1))).encode()
    assert server.ask(INFER, good)[0] == 200
    assert server.ask(INFER, b" " * 5000)[0] == 413
    request = changed(lambda i: i[1].update(data=[1] * 60, shape=[60]))
    code, _, answer = server.ask(INFER, json.dumps(request)[:4000].encode())
    assert code == 413, answer
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nContent-Length: 99999999999999\r\n\r\n")
        assert b" 413 " in raw.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\n\r\n")
        assert b" 411 " in raw.recv(4096)


def test_bytes_that_are_no_http_harm_nobody(package, serve):
    server = serve(package)
    draw = random.Random(3)
    good = json.dumps(request_of(some_samples(1))).encode()
    whole = b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (INFER.encode(), len(good), good)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(min(len(data), 120))
            data[place] = draw.randrange(256)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", server.port), timeout=5) as raw,
        ):
            raw.sendall(data[: draw.randrange(len(data))] if draw.random() < 0.5 else bytes(data))
            raw.shutdown(socket.SHUT_WR)
            raw.recv(1000)
    assert server.infer(request_of(some_samples(1)))[0] == 200
    assert server.stop() == 0


def test_slow_and_idle_clients_are_sent_away(package, serve):
    server = serve(package, "--header-timeout", "300", "--idle-timeout", "600", "--max-connections", "40")
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    for raw in slow:
        raw.sendall(b"POST /v2/models/dlrm/infer HTTP/1.1\r\nContent-Le")
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(10)]
    assert server.infer(request_of(some_samples(1)))[0] == 200  # others are served meanwhile
    for raw in slow:  # told why
        raw.settimeout(20)
        assert b" 408 " in raw.recv(1000)
        raw.close()
    for raw in idle:  # nothing was asked
        raw.settimeout(20)
        assert raw.recv(1000) == b""
        raw.close()


def test_a_body_that_does_not_come_is_answered_too(package, serve):
    server = serve(package, "--request-timeout", "300")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
        assert b" 408 " in raw.recv(1000)
    assert server.infer(request_of(some_samples(1)))[0] == 200
    assert 'tessera_requests_total{code="408"} 1\n' in server.ask("/metrics")[2].decode()


def test_a_body_in_pieces_has_the_same_limit(package, serve):
    server = serve(package, "--max-body", "4096")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(10):
                raw.sendall(piece)
        assert b" 413 " in raw.recv(4096)


def test_a_thousand_idle_connections_harm_nobody(package, serve):
    server = serve(package, "--max-connections", "1100")
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        for _ in range(20):
            assert server.infer(request_of(some_samples(1)))[0] == 200
    assert server.stop() == 0


def test_more_connections_than_allowed_are_refused(package, serve):
    server = serve(package, "--max-connections", "5")
    held = [server.connect() for _ in range(5)]
    for connection in held:
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().read()
    code, headers, _ = server.ask("/v2/health/live")
    assert (code, headers["Retry-After"]) == (503, "1")
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 20
    while server.ask("/v2/health/live")[0] != 200:
        assert time.monotonic() < deadline


def test_what_cannot_be_in_time_is_refused(package, serve):
    server = serve(package, "--queue", "2")
    code, answer = server.infer(request_of(some_samples(3)))
    assert code == 429, answer
    code, answer = server.infer(request_of(some_samples(1)), {"Request-Timeout-Ms": "0"})
    assert code in (429, 504), answer
    assert server.infer(request_of(some_samples(2)))[0] == 200


def test_a_body_that_is_refused_is_not_read_and_the_connection_goes_on(package, serve):
    """Behind one that holds the queue, others are told at once; their bodies pass, in pieces too."""
    server = serve(package, "--queue", "4", "--batch-wait", "1000000", "--max-batch", "100")
    body = json.dumps(request_of(some_samples(3))).encode()
    assert server.infer(body)[0] == 200  # so that it knows how many bytes a sample has
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(server.infer, body)
        deadline = time.monotonic() + 20
        while b"\ntessera_queued_samples 3\n" not in server.ask("/metrics")[2]:
            assert time.monotonic() < deadline
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 20)) as raw:
            head = f"POST {INFER} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            raw.sendall(head + body[:100])
            time.sleep(0.05)
            raw.sendall(body[100:] + b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
            answers = b""
            while piece := raw.recv(1 << 16):
                answers += piece
        assert answers.startswith(b"HTTP/1.1 429 Too Many Requests\r\n"), answers
        assert b"Retry-After: 1\r\n" in answers
        assert answers.endswith(b'{"live":true}\n')
        assert first.result()[0] == 200
    assert server.stop() == 0


def test_bodies_that_are_being_read_keep_their_room(package, serve):
    """Who comes while others send is told at once that there is no room, not when all have been read."""
    server = serve(package, "--queue", "4")
    body = json.dumps(request_of(some_samples(3))).encode()
    assert server.infer(body)[0] == 200  # so that it knows how many bytes a sample has
    head = f"POST {INFER} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def until_refused() -> bytes:
        """Asks for leave to send, until nobody else is let in."""
        deadline = time.monotonic() + 20
        while True:
            with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 20)) as raw:
                raw.sendall(head[:-2] + b"Expect: 100-continue\r\n\r\n")
                if b" 100 " not in (answer := raw.recv(1 << 16)):
                    return answer
            assert time.monotonic() < deadline

    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 20)) as raw:
        raw.sendall(head + body[:100])  # its headers may come after the first question
        assert until_refused().startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        raw.sendall(body[100:])
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
    assert server.infer(body)[0] == 200  # all room has been given back
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 20)) as raw:
        raw.sendall(head + body[:100])
        until_refused()
    deadline = time.monotonic() + 20
    while server.infer(body)[0] != 200:  # its client is gone
        assert time.monotonic() < deadline
    assert server.stop() == 0


def test_the_token_is_asked_for(package, serve, tmp_path):
    file = tmp_path / "token"
    file.write_text("correct-horse-battery\n")
    file.chmod(0o644)
    result = tessera("serve", package, "--token-file", file, check=False)
    assert (result.returncode, "others may read" in result.stderr) == (78, True)
    file.chmod(0o600)
    server = serve(package, "--token-file", str(file))
    request = request_of(some_samples(1))
    assert server.ask("/v2/health/live")[0] == 200
    assert server.infer(request)[0] == 401
    assert server.infer(request, {"Authorization": "Bearer correct-horse-batterz"})[0] == 403
    assert server.infer(request, {"Authorization": "Bearer correct-horse-battery"})[0] == 200
    assert server.ask("/metrics")[0] == 401


def test_with_a_token_a_body_that_is_refused_is_not_read_either(package, serve, tmp_path):
    """Who shows none is told that first, who shows the right one whether there is room."""
    file = tmp_path / "token"
    file.write_text("correct-horse-battery\n")
    file.chmod(0o600)
    server = serve(package, "--token-file", file, "--queue", "4")
    body = json.dumps(request_of(some_samples(3))).encode()
    right, wrong = ({"Authorization": f"Bearer correct-horse-batter{end}"} for end in "yz")
    assert server.infer(body, right)[0] == 200  # so that it knows how many bytes a sample has

    def head(headers, *more) -> bytes:
        lines = [f"POST {INFER} HTTP/1.1", f"Content-Length: {len(body)}", *more]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "\r\n"]).encode()

    def connect():
        return contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 20))

    def told(headers) -> bytes:
        """What is said before the body is sent."""
        with connect() as raw:
            raw.sendall(head(headers, "Expect: 100-continue"))
            return raw.recv(1 << 16)

    with connect() as raw:
        raw.sendall(head(right, "Expect: 100-continue"))
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 100 ")  # its room is kept now
        assert told(right).startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert told({}).startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        assert told(wrong).startswith(b"HTTP/1.1 403 Forbidden\r\n")
        raw.sendall(body)
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
    with connect() as raw:  # its body passes, and what follows is answered
        raw.sendall(head({}) + body[:100])
        raw.sendall(body[100:] + b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
        answers = b""
        while piece := raw.recv(1 << 16):
            answers += piece
    assert answers.startswith(b"HTTP/1.1 401 Unauthorized\r\n"), answers
    assert answers.endswith(b'{"live":true}\n')
    assert server.stop() == 0


def test_it_listens_to_this_machine_unless_told(package):
    result = tessera("serve", package, "--listen", "0.0.0.0", check=False)
    assert result.returncode == 78
    assert "lets other machines in" in result.stderr


def test_a_port_that_is_taken_is_named(package, serve):
    server = serve(package)
    result = tessera("serve", package, "--port", server.port, check=False)
    assert result.returncode == 69
    assert str(server.port) in result.stderr


@pytest.mark.parametrize("file", ["MANIFEST.json", "model.json", "dense.safetensors", "tables-3.safetensors"])
def test_a_damaged_package_is_refused(run, tmp_path, file):
    tessera("export", run, "--out", tmp_path / "pkg")
    data = bytearray((tmp_path / "pkg" / file).read_bytes())
    data[-3] ^= 1
    (tmp_path / "pkg" / file).write_bytes(data)
    result = tessera("serve", tmp_path / "pkg", "--verify", "--port", 0, check=False)
    assert result.returncode == 65
    # Data is named by its tensor, the rest by its file.
    assert file in result.stderr or "tables.cat_3.weight" in result.stderr or "safetensors" in result.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_damage_that_is_found_while_serving_ends_the_answers(run, serve, tmp_path, processes):
    """Tables are mapped, not read; their sums are compared beside the first requests."""
    package = tmp_path / "pkg"
    tessera("export", run, package)
    table = package / "tables-2.safetensors"
    data = bytearray(table.read_bytes())
    data[-3] ^= 1
    table.write_bytes(data)
    server = serve(package, "--processes", processes)
    request = request_of(some_samples(1))

    def until(code, path="/v2/health/ready"):
        deadline = time.monotonic() + 30
        while server.ask(path)[0] != code:
            assert time.monotonic() < deadline, server.errors.read_text()
            time.sleep(0.02)

    until(503)
    code, answer = server.infer(request)
    assert (code, "damaged" in answer["error"]) == (503, True)
    assert server.ask("/v2/health/live")[0] == 200
    assert b"\ntessera_package_damaged 1\n" in server.ask("/metrics")[2]
    assert "tables.cat_2.weight" in server.errors.read_text()
    tessera("export", run, package)
    assert server.ask("/admin/reload", b"", port=server.admin_port)[0] in (200, 202)
    until(200)
    deadline = time.monotonic() + 30
    while b"\ntessera_package_verified 1\n" not in server.ask("/metrics")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert server.infer(request)[0] == 200
    assert server.stop() == 0


def figures_of(server) -> dict[str, str]:
    text = server.ask("/metrics")[2].decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("by_signal", [False, True])
def test_a_package_that_is_opened_again_is_compared_first(run, serve, tmp_path, processes, by_signal):
    """--verify is for every package that is opened: a damaged one is never answered with."""
    package = tmp_path / "pkg"
    tessera("export", run, package, "--dtype", "int8")
    server = serve(package, "--verify", "--processes", processes)
    request = request_of(some_samples(5))
    assert figures_of(server)["tessera_package_verified"] == "1"
    before = probabilities(server.infer(request)[1])

    def reload(counter: str, count: int):
        if by_signal:
            server.process.send_signal(signal.SIGHUP)
        else:
            server.ask("/admin/reload", b"", port=server.admin_port)
        deadline = time.monotonic() + 30
        while int(figures_of(server)[counter]) < count:
            assert time.monotonic() < deadline, server.errors.read_text()
            time.sleep(0.02)

    tessera("export", run, package, "--dtype", "int2")  # another folder: the one that is served stays
    table = package / "tables-2.safetensors"
    data = bytearray(table.read_bytes())
    data[-3] ^= 1
    table.write_bytes(data)
    reload("tessera_reloads_refused_total", 1)
    assert "tables.cat_2.weight" in server.errors.read_text()
    assert probabilities(server.infer(request)[1]) == before
    figures = figures_of(server)
    assert (figures["tessera_reloads_total"], figures["tessera_package_verified"]) == ("0", "1")
    tessera("export", run, package, "--dtype", "int2")
    reload("tessera_reloads_total", 1)
    deadline = time.monotonic() + 30
    while probabilities(server.infer(request)[1]) == before:  # by processes that end now
        assert time.monotonic() < deadline
    assert figures_of(server)["tessera_package_verified"] == "1"
    assert server.stop() == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_received_is_answered_or_its_client_was_gone(package, serve, processes):
    """Counted over good, wrong and refused requests, and those whose client does not wait."""
    server = serve(package, "--processes", processes, "--batch-wait", "100000", "--max-body", "100000")
    good = json.dumps(request_of(some_samples(2))).encode()
    late = {"Request-Timeout-Ms": "0"}
    asked = [(INFER, good, {}, 200), (INFER, b"{", {}, 400), ("/nowhere", None, {}, 404),
             (INFER, b" " * 200_000, {}, 413), (INFER, good, {"Request-Timeout-Ms": "x"}, 400)]  # fmt: skip
    count = 0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for path, body, headers, code in asked * 4:
            assert server.ask(path, body, headers)[0] == code
            count += 1
        for code, _, _ in pool.map(lambda _: server.ask(INFER, good, late), range(8)):
            assert code in (200, 429, 504)
            count += 1
    gone = 5
    head = f"POST {INFER} HTTP/1.1\r\nContent-Length: {len(good)}\r\n\r\n".encode()
    for _ in range(gone):
        with socket.create_connection(("127.0.0.1", server.port), 20) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.sendall(head + good)
            deadline = time.monotonic() + 20
            while int(figures_of(server)["tessera_queued_samples"]) == 0:  # it has been accepted
                assert time.monotonic() < deadline
                count += 1
            count += 1  # the last look
    count += gone
    deadline = time.monotonic() + 20
    while int((figures := figures_of(server))["tessera_cancelled_total"]) < gone:
        assert time.monotonic() < deadline
        count += 1
    count += 1
    codes = sum(int(number) for name, number in figures.items() if name.startswith("tessera_requests_total"))
    # The one that asked was received, and is answered by what it was told.
    assert (int(figures["tessera_received_total"]), codes) == (count, count - 1)
    assert server.stop() == 0
    wanted = f"answered {count} of {count} requests, {gone} of them to clients that were gone"
    assert wanted in server.errors.read_text()


def test_a_stop_finishes_what_was_accepted(package, serve):
    """Requests in flight when SIGTERM comes are answered; the others see a refusal, never half an answer."""
    server = serve(package, "--batch-wait", "20000", "--threads", "2")
    request = json.dumps(request_of(some_samples(2))).encode()
    outcomes = []

    def ask_until_refused():
        with contextlib.closing(server.connect()) as connection:
            while True:
                try:
                    connection.request("POST", INFER, request)
                    answer = connection.getresponse()
                    body = answer.read()
                except (OSError, http.client.HTTPException) as error:
                    return error
                outcomes.append((answer.status, len(body)))
                if answer.status != 200:
                    return answer.status

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask_until_refused) for _ in range(8)]
        time.sleep(0.5)
        assert server.stop() == 0
        for future in futures:
            future.result(timeout=30)
    assert {code for code, _ in outcomes} <= {200, 503}
    assert len({length for code, length in outcomes if code == 200}) == 1
    log = server.errors.read_text()
    assert f"answered {len(outcomes)} of " in log or "clients that were gone" in log


def test_a_stop_that_takes_too_long_is_cut_off(package, serve):
    """A client that does not take its answers holds a stop up for --drain-timeout, and no longer."""
    server = serve(package, "--drain-timeout", "10000")
    with contextlib.closing(socket.socket()) as raw:
        raw.settimeout(20)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(b"GET /v2/models/dlrm HTTP/1.1\r\n\r\n" * 8000)  # 15 MB of answers
        deadline = time.monotonic() + 60
        now = looks = 0
        while looks < 3:  # until nobody but these looks is answered
            assert time.monotonic() < deadline
            before, now = now, int(figures_of(server)["tessera_received_total"])
            looks = looks + 1 if 100 < now <= before + 1 else 0
        server.process.send_signal(signal.SIGTERM)
        while (told := server.ask("/v2/health/ready", port=server.admin_port))[0] == 200:
            assert time.monotonic() < deadline
        assert (told[0], told[1]["Retry-After"]) == (503, "1")
        assert json.loads(told[2]) == {"error": "the server is draining"}
        assert server.ask("/v2/health/live", port=server.admin_port)[0] == 200
        assert server.process.wait(timeout=30) == 75


@pytest.mark.parametrize("processes", [1, 2])
def test_a_package_of_other_outputs_is_refused_and_the_old_one_goes_on(run, serve, tmp_path, processes):
    package = tmp_path / "pkg"
    tessera("export", run, package)
    server = serve(package, "--processes", processes)
    request = request_of(some_samples(5))
    before = probabilities(server.infer(request)[1])
    tessera("export", run, package, "--output-dtype", "fp16")
    code = server.ask("/admin/reload", b"", port=server.admin_port)[0]
    assert code == (500 if processes == 1 else 202)  # of several nobody waits
    deadline = time.monotonic() + 30
    while figures_of(server)["tessera_reloads_refused_total"] != "1":
        assert time.monotonic() < deadline, server.errors.read_text()
        time.sleep(0.02)
    wanted = f"{package}: its inputs and outputs are not those of the model that is served"
    assert wanted in server.errors.read_text()
    assert probabilities(server.infer(request)[1]) == before
    assert server.stop() == 0


def test_a_new_package_is_taken_over_without_a_stop(run, package, serve, tmp_path):
    pkg = tmp_path / "pkg"
    tessera("export", run, "--out", pkg, "--dtype", "int8")
    server = serve(pkg)
    request = request_of(some_samples(5))
    before = probabilities(server.infer(request)[1])
    tessera("export", run, "--out", pkg, "--dtype", "int2")
    assert probabilities(server.infer(request)[1]) == before  # not before it is told
    code, _, _ = server.ask("/admin/reload", b"", port=server.admin_port)
    assert code == 200
    after = probabilities(server.infer(request)[1])
    assert after != before
    # A damaged one is refused, and the old one goes on.
    (pkg / "model.json").write_text("{}")
    assert server.ask("/admin/reload", b"", port=server.admin_port)[0] == 500
    assert probabilities(server.infer(request)[1]) == after
    tessera("export", run, "--out", tmp_path / "again")
    (pkg / "model.json").unlink()
    server.process.send_signal(signal.SIGHUP)
    assert probabilities(server.infer(request)[1]) == after
    assert server.ask("/admin/drain", b"", port=server.admin_port)[0] == 200
    assert server.process.wait(timeout=30) == 0
