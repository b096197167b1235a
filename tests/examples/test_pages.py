"""The C++ that the pages show is what page_samples.cpp compiles."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILED = Path(__file__).with_name("page_samples.cpp")
# That page shows parts of examples/dlrm.cpp; see test_examples.py.
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
PAGES.remove("docs/train_your_own.md")


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
