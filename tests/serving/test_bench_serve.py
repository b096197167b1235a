"""tessera bench serve: everything that is due is counted, also what a server does not answer."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from conftest import tessera


def bench(*words, check=True):
    result = tessera("bench", "serve", *words, "--json", check=check)
    return result.returncode, json.loads(result.stdout)


@pytest.mark.parametrize("form", ["binary", "json"])
def test_requests_are_answered_and_counted(package, serve, form):
    server = serve(package)
    code, report = bench(
        package, "--port", server.port, "--rate", 300, "--seconds", 1, "--samples", 3, "--ids", 2,
        "--format", form,
    )  # fmt: skip
    assert code == 0
    assert report["codes"] == {"200": report["due"]}
    assert report["unanswered"] == 0
    assert 200 < report["due"] < 400  # Poisson, 300 asked for
    assert 0 < report["milliseconds"]["p50"] <= report["milliseconds"]["p99"] <= report["milliseconds"]["max"]


def test_peak_and_overload(package, serve):
    """Twice what the server can: it refuses what it cannot do, and answers everything."""
    server = serve(package, "--latency-budget", "50", "--queue", "64")
    code, report = bench(
        package, "--port", server.port, "--times-peak", 2, "--seconds", 2, "--samples", 64, "--ids", 20,
        "--connections", 200,
    )  # fmt: skip
    assert code == 0
    assert report["unanswered"] == 0
    assert set(report["codes"]) <= {"200", "429", "504"}
    assert report["codes"]["200"] > 0
    assert sum(report["codes"].values()) == report["due"]
    code, report = bench("--floor", "--port", server.port, "--seconds", 0.5)
    assert (code, set(report["codes"])) == (0, {"200"})


def test_a_server_that_does_not_answer_is_charged_for_it(package):
    """A listener that closes every connection: all that is due is unanswered, and the exit code says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)

        threading.Thread(target=close_all, daemon=True).start()
        result = tessera(
            "bench", "serve", package, "--port", listener.getsockname()[1], "--rate", 50, "--seconds", 0.5,
            "--connections", 2, "--json", check=False,
        )  # fmt: skip
    assert result.returncode in (69, 75), result.stderr
    if result.returncode == 75:
        report = json.loads(result.stdout)
        assert report["unanswered"] == report["due"]


def test_wrong_words(package):
    for words, code, text in [
        ([], 2, "name the package"),
        ([package, "--rate", 5, "--times-peak", 2], 2, "both say"),
        ([package, "--port", 1], 69, "nobody answers"),
        (["nowhere"], 65, "nowhere"),
    ]:
        result = tessera("bench", "serve", *words, check=False)
        assert (result.returncode, text in result.stderr) == (code, True), result.stderr
