"""The C++ that the pages show is what page_samples.cpp compiles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILED = Path(__file__).with_name("page_samples.cpp")
# That page shows parts of examples/dlrm.cpp; see test_examples.py.
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
PAGES.remove("docs/train_your_own.md")


# What a header says first becomes a page of the site.
HEADERS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "include").rglob("*.h"))


def code_of(text):
    """Return the code without includes, comments, white space and what is left out (an ellipsis)."""
    text = re.sub(r"^#include.*$|//.*$|…", "", text, flags=re.MULTILINE)
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("page", PAGES)
def test_samples_are_compiled(page):
    compiled = code_of(COMPILED.read_text())
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```cpp\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [block for block in blocks if code_of(block) not in compiled] == []


def samples_of(header):
    """The C++ in the first comment of a header: what is indented and ends as a statement does."""
    first = re.match(r"(?://.*\n)*", (ROOT / header).read_text())[0]
    blocks = re.findall(r"(?:^//   .*\n(?:^//\n(?=//   ))*)+", first, re.MULTILINE)
    texts = [re.sub(r"^// ?", "", block, flags=re.MULTILINE) for block in blocks]
    return [text for text in texts if code_of(text).endswith((";", "}"))]


@pytest.mark.parametrize("header", HEADERS)
def test_samples_of_headers_are_compiled(header):
    compiled = code_of(COMPILED.read_text())
    assert [sample for sample in samples_of(header) if code_of(sample) not in compiled] == []


def test_samples_of_headers_are_found():
    assert len(samples_of("include/tessera/pipeline/train_pipeline.h")) == 2
    found = {header for header in HEADERS if samples_of(header)}
    modules = {header.removeprefix("include/tessera/") for header in found}
    assert modules >= {
        "data_parallel/join.h",
        "pipeline/read_ahead.h",
        "pipeline/train_pipeline.h",
        "serving/model.h",
    }
