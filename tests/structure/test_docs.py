"""What the pages point at is there: links, headings, files, targets of make."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")],
    key=lambda page: page.as_posix(),
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Words in code that begin like a path of this repository. A star stands for anything.
PATH = re.compile(
    r"`((?:bench|cli|cmake|docs|examples|include|python|src|tests|workloads)/[\w./*{},-]+|tessera/[\w/]+\.h)`"
)


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them in links."""
    names = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        names.add(plain.strip().replace(" ", "-"))
    return names


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue  # the web is not ours
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        has_anchor = not (anchor and target.exists()) or target.suffix != ".md" or anchor in anchors(target)
        if not target.exists() or not has_anchor:
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name):
    wrong = []
    for word in PATH.findall(prose(ROOT / name)):
        top = ROOT / "include" if word.startswith("tessera/") else ROOT
        braces = re.search(r"\{([^}]*)\}", word)
        choices = braces.group(1).split(",") if braces else [""]
        spelled = [word.replace(braces.group(0), choice) if braces else word for choice in choices]
        wrong += [one for one in spelled if not any(top.glob(one.rstrip("/")))]
    assert wrong == []


def test_tests_that_hold_what_is_promised_exist():
    """docs/reliability.md names those of every fault that was ever found."""
    sources = [file.read_text() for file in (ROOT / "tests").rglob("*") if file.suffix in (".py", ".cpp")]
    defined = set()
    for source in sources:
        defined.update(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))
        cases = re.findall(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", source, re.MULTILINE)
        defined.update(f"{suite}.{case}" for suite, case in cases)
    named = set(re.findall(r"`(test_\w+|[A-Z]\w+\.[A-Z]\w+)`", prose(ROOT / "docs/reliability.md")))
    assert len(named) > 50
    assert named - defined == set()


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in LINK.findall(prose(page)):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists():
                waiting.append(target)
            if target.is_dir():
                waiting += target.glob("*.md")
    assert [page.relative_to(ROOT).as_posix() for page in PAGES if page not in seen] == []


def test_targets_of_make_are_the_makefiles():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(name, word) for name in NAMES for word in re.findall(r"`make ([a-z-]+)`", prose(ROOT / name))}
    assert {(name, word) for name, word in named if word not in targets} == set()


def test_every_public_module_is_on_the_page_of_python():
    """Its tables name modules, or the package they are in; `.name` stands beside the name before it."""
    named = set()
    for cell in re.findall(r"^\| (`tessera\.[^|]+) \|", prose(ROOT / "docs/python.md"), re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", cell)
        named |= {first, *(word if word[0] != "." else first.rpartition(".")[0] + word for word in others)}
    missing = []
    for file in sorted((ROOT / "python/tessera").rglob("*.py")):
        parts = file.relative_to(ROOT / "python").with_suffix("").parts
        if any(part.startswith("_") for part in parts):
            continue
        if not any(".".join(parts[:end]) in named for end in range(2, len(parts) + 1)):
            missing.append(".".join(parts))
    assert missing == []


def test_tables_of_figures_come_from_the_results(monkeypatch):
    """Writing the tables of docs/performance.md again from bench/results changes nothing."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    run = importlib.import_module("run")
    assert run.document_section(run.kept()) in run.DOCUMENT.read_text()
