"""Takes the pictures of docs/pictures: a report and a terminal, of a real training, by a real browser.

python docs/site/pictures.py FOLDER     with Chromium and a built `tessera`; FOLDER keeps the run
"""

from __future__ import annotations

import fcntl
import html
import os
import pathlib
import pty
import struct
import subprocess
import sys
import termios

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/support"))
import browser  # noqa: E402

TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
PICTURES = ROOT / "docs/pictures"
TRAIN = ["train", "dlrm", "--config", str(ROOT / "examples/demo.toml"), "--save", "first"]
FRAME = """<body style="margin:0"><pre style="margin:0;padding:18px 20px;background:#14171a;color:#d7dce0;
font:14px/1.45 ui-monospace,'DejaVu Sans Mono',monospace;width:max-content">{}</pre></body>"""


def on_terminal(words: list[str], folder: pathlib.Path, columns: int = 80) -> str:
    """What stands on a terminal of so many columns when the program has ended."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen([TESSERA, *words], stdout=other, stderr=other, cwd=folder)
    os.close(other)
    got = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:
            break
        if not part:
            break
        got += part
    assert process.wait() == 0, got.decode()
    lines = got.decode().replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1].replace("\x1b[K", "") for line in lines)


def main():
    folder = pathlib.Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    text = on_terminal(TRAIN, folder)
    shown = text.strip().splitlines()
    # The list of tables is long; its beginning and its end are enough.
    first = next(i for i, line in enumerate(shown) if line.startswith("  cat_2") or i > 8)
    last = next((i for i, line in enumerate(shown) if line.startswith("  and ")), first)
    shown[first:last] = ["  …"]
    words = "$ tessera train dlrm --config examples/demo.toml --save first"
    page = folder / "terminal.html"
    page.write_text(FRAME.format(html.escape("\n".join([words, *shown]))))
    one = browser.Browser()
    one.open(f"file://{page}", 760, height=100).screenshot(PICTURES / "terminal.png", "body > pre")
    for dark in (False, True):
        report = one.open(f"file://{folder}/first/report.html", 1160, dark)
        report.screenshot(PICTURES / f"report_{'dark' if dark else 'light'}.png", height=1180)
    one.close()


if __name__ == "__main__":
    main()
