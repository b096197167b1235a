"""The site is built without a warning, holds the references, and reads well at every width."""

from __future__ import annotations

import functools
import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from browser import needs_browser

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = pathlib.Path(os.environ.get("TESSERA_DOCS_PYTHON", ROOT / ".venv-docs/bin/python"))
LOOKS = [(width, dark) for width in (390, 768, 1280) for dark in (False, True)]
PAGES = ["index", "tutorial_ddp", "report", "api/cpp/comm", "api/python/tessera.comm", "performance"]

sys.path.insert(0, str(ROOT / "docs/site"))
import cpp_reference  # noqa: E402
import python_reference  # noqa: E402

# Types into the box of the search until it answers.
SEARCH = """(async () => {
  const box = document.querySelector("[data-md-component=search-query]");
  document.querySelector("[data-md-toggle=search]").checked = true;
  box.focus();
  box.value = "calibration";
  for (let i = 0; i < 100; ++i) {
    box.dispatchEvent(new Event("keyup", {bubbles: true}));
    box.dispatchEvent(new Event("input", {bubbles: true}));
    await new Promise(done => setTimeout(done, 100));
    const links = [...document.querySelectorAll(".md-search-result__link")].map(one => one.href);
    if (links.length) return links;
  }
  return [];
})()"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


needs_mkdocs = pytest.mark.skipif(not DOCS.exists(), reason="no .venv-docs: `make docs` makes it")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [DOCS, ROOT / "docs/site/build.py", folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == f"site     {folder}/index.html\n" and result.stderr == ""
    return folder


@pytest.fixture(scope="module")
def address(site) -> str:
    """The site as a server sends it: browsers allow search only there."""
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_headers_are_read_as_they_are_meant():
    source = """// tessera/x/y.h — what it is.
//
// And more.

namespace tessera::x {

class Later;

/// Two words.
enum class Word { kOne, kTwo };

/// Says `it`.
/// Collective.
TESSERA_API int say(const std::string& it,
                    int often = 1);
inline int twice(int n) { return 2 * n; }

/// Holds it.
class TESSERA_API Holder {
 public:
  explicit Holder(int n) : n_(n) {}
  /// How many.
  int n() const {
    return n_;
  }

 private:
  int n_ = 0;
};

namespace detail {
int hidden();
}  // namespace detail

}  // namespace tessera::x
"""
    assert cpp_reference.introduction(source) == ("What it is.", "And more.")
    found = {item.name: item for item in cpp_reference.items(source)}
    assert list(found) == ["Word", "say", "twice", "Holder"]
    assert found["say"].text == "Says `it`.\nCollective."
    assert found["say"].code.startswith("int say(const std::string& it,")
    assert found["twice"].code == "inline int twice(int n);"
    holder = found["Holder"].code
    assert "explicit Holder(int n);" in holder and "int n() const;" in holder and "/// How many." in holder
    assert "n_" not in holder and "private" not in holder


def test_docstrings_become_pages():
    source = '''"""What m is."""
__all__ = ["f", "C"]
def f(a: int, *, b=2) -> str:
    """Do it.

    >>> f(1)
    """
def g(): pass
class C:
    """Hold."""
    def __init__(self, n): pass
    def go(self) -> int:
        """Go."""
'''
    text = python_reference.module_text("m", source)
    assert "f(a: int, *, b=2) -> str" in text and "```pycon\n>>> f(1)" in text and "What m is." in text
    assert "C(n)" in text and "go() -> int" in text and "Go." in text and "### g" not in text


@needs_mkdocs
def test_every_header_and_module_has_its_place(site):
    for header in (ROOT / "include/tessera").rglob("*.h"):
        page = site / "api/cpp" / f"{header.relative_to(ROOT / 'include/tessera').parts[0]}.html"
        assert str(header.relative_to(ROOT / "include")) in page.read_text(), header
    group = (site / "api/cpp/comm.html").read_text()
    assert 'id="group"' in group and "Some ranks and the engine between them" in group
    assert "DistributedDataParallel" in (site / "api/python/tessera.nn.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page


@needs_mkdocs
def test_nothing_is_fetched_and_links_stay_inside(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for address in re.findall(r'(?:src|href)="([^"#]+)', text):
            if re.match(r"(https?:)?//", address):
                assert not re.search(rf'(?:src|rel="stylesheet" href)="{re.escape(address)}', text), (
                    page,
                    address,
                )


@needs_mkdocs
@needs_browser
class TestInChromium:
    @pytest.mark.parametrize(("width", "dark"), LOOKS)
    def test_pages_fit(self, browser, address, width, dark):
        for name in PAGES:
            page = browser.open(f"{address}/{name}.html", width, dark)
            assert page.overflow() == [], name
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), name
            assert page.complaints == [], name
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (paper == "rgb(255, 255, 255)") != dark, name
            assert all(url.startswith((address, "data:", "blob:")) for url in page.requests), name

    @pytest.mark.parametrize("part", range(4))
    def test_every_page_fits_a_telephone(self, site, browser, address, part):
        """Those of docs/ and the references; PAGES are opened at all widths and in the dark as well."""
        names = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
        assert len(names) > 60
        page = browser.open(f"{address}/index.html", 390, False)
        for name in names[part::4]:
            page.go(f"{address}/{name}")
            assert page.overflow() == [], name
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1"), name
            assert page.complaints == [], name

    def test_pictures_are_there(self, browser, address):
        page = browser.open(f"{address}/first_run.html")
        sizes = page.evaluate("[...document.querySelectorAll('article img')].map(one => one.naturalWidth)")
        assert len(sizes) == 3 and min(sizes) > 300

    def test_search_finds(self, browser, address):
        found = browser.open(f"{address}/index.html").evaluate(SEARCH)
        assert any("report.html" in link for link in found)
