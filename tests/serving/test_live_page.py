"""The page of a server in a real browser: figures arrive, move, and come from nowhere else."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest
from browser import needs_browser
from conftest import NUM_TABLES, request_of, some_samples
from publications import export, link, steps_in, wait_for
from test_updates import published  # noqa: F401  a fixture

LOOKS = [(width, dark) for width in (390, 1280) for dark in (False, True)]


def shown(page, name: str) -> str:
    return page.evaluate(f"document.getElementById('{name}').textContent")


def wait_until(page, script: str):
    deadline = time.monotonic() + 60
    while not page.evaluate(script):
        assert time.monotonic() < deadline, (script, page.text())
        time.sleep(0.05)


def number(page, name: str) -> int:
    return int(shown(page, name).replace(",", ""))


@needs_browser
class TestInChromium:
    @pytest.mark.parametrize(("width", "dark"), LOOKS)
    def test_the_page_shows_what_the_server_does(self, browser, package, serve, width, dark):
        server = serve(package)
        event = threading.Event()
        body = json.dumps(request_of(some_samples(2)))

        def ask():
            while not event.is_set():
                server.ask("/v2/models/dlrm/infer", body)
                server.ask("/nothing/here")

        asker = threading.Thread(target=ask)
        asker.start()
        address = f"http://127.0.0.1:{server.admin_port}/"
        try:
            page = browser.open(address, width, dark)
            wait_until(page, "document.getElementById('rate').textContent !== '0'")
            wait_until(page, "document.querySelector('#rates path').getAttribute('d').includes('L')")
        finally:
            event.set()
            asker.join()
        assert "ready" in shown(page, "state")
        assert shown(page, "error") == ""
        assert number(page, "answered") > 0
        assert number(page, "failed") > 0
        assert re.fullmatch(r"[\d.]+ (µs|ms|s)", shown(page, "p99"))
        assert shown(page, "version") == "40"
        codes = page.evaluate(
            "[...document.querySelectorAll('#codes tbody tr')].map(r => r.cells[0].textContent)"
        )
        assert {"200", "404"} <= set(codes)
        versions = page.evaluate("document.querySelector('#versions tbody').textContent")
        assert "answers" in versions
        # Nothing against it, nothing stands out, nothing from elsewhere.
        assert page.complaints == []
        assert page.overflow() == []
        assert all(request.startswith(address) for request in page.requests), page.requests

    def test_an_update_is_seen_on_the_page(self, browser, published, serve, tmp_path):  # noqa: F811
        """A page that is open when a delta comes shows its rows, and how soon they were served."""
        first, second = steps_in(published)[:2]
        watched = tmp_path / "watched"
        link(published, first, watched)
        server = serve(export(published, first, tmp_path / "pkg"), "--watch", watched)
        page = browser.open(f"http://127.0.0.1:{server.admin_port}/")
        wait_until(page, "document.getElementById('updates-top').textContent === 'highest 1'")
        assert (shown(page, "rows"), shown(page, "lag")) == ("0", "-")
        assert "0 updates taken, 0 refused" in shown(page, "state")
        link(published, second, watched)
        lag = wait_for(server, second)["updates"]["lag_seconds"]
        wait_until(page, "document.getElementById('rows').textContent !== '0'")
        assert number(page, "rows") == 20 * NUM_TABLES
        text, unit = shown(page, "lag").split()
        assert float(text) * {"µs": 1e-6, "ms": 1e-3, "s": 1}[unit] == pytest.approx(lag, rel=0.02)
        assert "1 updates taken, 0 refused" in shown(page, "state")
        assert shown(page, "version") == str(second)
        assert int(re.sub(r"\D", "", shown(page, "updates-top"))) > 1  # the curve has risen
        rows = page.evaluate(
            "[...document.querySelectorAll('#versions tbody tr')]"
            ".map(r => [...r.cells].map(c => c.textContent))"
        )
        told = {row[0]: (row[1], row[3]) for row in rows}
        assert told == {str(first): ("0", "kept"), str(second): (str(20 * NUM_TABLES), "answers")}
        assert page.complaints == []

    def test_with_a_token_the_page_asks_for_it(self, browser, package, serve, tmp_path):
        token = tmp_path / "token"
        token.write_text("correct-horse-battery\n")
        token.chmod(0o600)
        server = serve(package, "--token-file", token)
        page = browser.open(f"http://127.0.0.1:{server.admin_port}/")
        wait_until(page, "document.getElementById('state').textContent === 'no figures'")
        assert "token" in shown(page, "error")
        assert page.evaluate("!document.getElementById('door').hidden")
        page.evaluate("document.getElementById('token').value = 'correct-horse-battery'")
        page.evaluate("document.getElementById('door').requestSubmit()")
        wait_until(page, "document.getElementById('state').textContent.startsWith('ready')")
        assert page.evaluate("document.getElementById('door').hidden")


def test_the_page_needs_nothing_from_the_network(package, serve):
    server = serve(package)
    code, headers, body = server.ask("/", port=server.admin_port)
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    text = body.decode()
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert server.ask("/")[0] == 404  # not on the data port
    figures = json.loads(server.ask("/admin/figures", port=server.admin_port)[2])
    assert len(figures["latency"]) == len(figures["bounds"]) + 1
    assert server.ask("/admin/figures")[0] == 404
