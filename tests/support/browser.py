"""A real browser for tests of pages: headless Chromium, spoken to over its DevTools protocol.

One browser serves all pages of a test module. Pages are opened at a width and in light or dark; what
the browser says against a page (exceptions, console errors, refused or failed requests) is kept.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import tempfile
import time

import pytest

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
needs_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here: pages are judged by their text alone"
)


class Socket:
    """A WebSocket to a browser on this machine: text frames only."""

    def __init__(self, url: str):
        host, path = url.removeprefix("ws://").split("/", 1)
        name, port = host.split(":")
        self.stream = socket.create_connection((name, int(port)), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self.stream.sendall(
            f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self.stream.recv(1)
        assert b" 101 " in answer, answer

    def send(self, text: str):
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        head = bytes([0x81]) + (
            bytes([0x80 | size]) if size < 126
            else bytes([0x80 | 126]) + struct.pack(">H", size) if size < 1 << 16
            else bytes([0x80 | 127]) + struct.pack(">Q", size)
        )  # fmt: skip
        self.stream.sendall(head + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.stream.recv(size - len(data))
            assert piece, "the browser has gone"
            data += piece
        return bytes(data)

    def receive(self) -> str:
        text = b""
        while True:
            first, second = self._read(2)
            size = second & 0x7F
            if size == 126:
                size = struct.unpack(">H", self._read(2))[0]
            elif size == 127:
                size = struct.unpack(">Q", self._read(8))[0]
            text += self._read(size)
            if first & 0x80:
                return text.decode()


class Browser:
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="tessera_browser_", ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--remote-debugging-port=0", f"--user-data-dir={self.folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port_file = pathlib.Path(self.folder.name, "DevToolsActivePort")
        deadline = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self.process.poll() is None, f"{PROGRAM} ended with {self.process.returncode}"
            assert time.monotonic() < deadline, f"{PROGRAM} did not start"
            time.sleep(0.05)
        self.port, path = port_file.read_text().split()
        self.stream = Socket(f"ws://127.0.0.1:{self.port}{path}")
        self.count = 0

    def close(self):
        self.process.terminate()
        self.process.wait(30)
        self.folder.cleanup()

    def _call(self, method: str, **values) -> dict:
        self.count += 1
        self.stream.send(json.dumps({"id": self.count, "method": method, "params": values}))
        while (message := json.loads(self.stream.receive())).get("id") != self.count:
            pass
        assert "error" not in message, message
        return message["result"]

    def open(self, url: str, width: int = 1280, dark: bool = False, height: int = 900) -> Page:
        """A page in a profile of its own: whoever opens it comes for the first time, and no other page,
        which may still be open, tells it what was chosen there."""
        profile = self._call("Target.createBrowserContext")["browserContextId"]
        target = self._call("Target.createTarget", url="about:blank", browserContextId=profile)["targetId"]
        stream = Socket(f"ws://127.0.0.1:{self.port}/devtools/page/{target}")
        return Page(stream, url, width, dark, height)


class Page:
    def __init__(self, stream: Socket, url: str, width: int, dark: bool, height: int):
        self.stream, self.count, self.events = stream, 0, []
        self.complaints: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.go(url)

    def go(self, url: str):
        """To another page, with what was fetched for the one before."""
        self.events.clear()
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._take(json.loads(self.stream.receive()))

    def _take(self, message: dict):
        method, values = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(values["exceptionDetails"].get("exception", values)))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.complaints.append(values["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(values["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        if method:
            self.events.append(message)

    def call(self, method: str, **values) -> dict:
        self.count += 1
        self.stream.send(json.dumps({"id": self.count, "method": method, "params": values}))
        while True:
            message = json.loads(self.stream.receive())
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self._take(message)

    def evaluate(self, script: str):
        """The value of a JavaScript expression; promises are waited for."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self) -> str:
        return self.evaluate("document.body.innerText")

    def overflow(self) -> list[str]:
        """Elements that stand out at the right, unless something around them scrolls or cuts."""
        return self.evaluate("""[...document.querySelectorAll("body *")].filter(element => {
          if (element.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
          for (let at = element; at && at !== document.body; at = at.parentElement) {
            if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(at).overflowX)) return false;
            if (getComputedStyle(at).position === "fixed" || at.hidden) return false;
          }
          return true;
        }).map(element => element.tagName + "." + element.className)""")

    def move(self, x: float, y: float):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: pathlib.Path, part: str = "html", height: int | None = None):
        """A picture of an element, or of its first `height` pixels."""
        box = self.evaluate(f"""(({{x, y, width, height}}) => ({{x, y, width, height}}))(
            document.querySelector({json.dumps(part)}).getBoundingClientRect())""")
        clip = {**box, "scale": 1, "height": min(box["height"], height or box["height"])}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="module")
def browser():
    one = Browser()
    yield one
    one.close()
