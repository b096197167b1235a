"""Builds the documentation site: `make docs`.

The pages are those of docs/, the README's neighbours (changes, contributing) and the references, which are
written out of headers and docstrings. mkdocs.yml says how they are grouped; a page it does not name is put
under "More". Nothing is fetched: the site can be read from the disk. Browsers allow its search only where a
server sends it, such as `python -m http.server -d build/site`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import cpp_reference
import python_reference
import yaml

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")
# Pages that lie outside of docs/.
OTHERS = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "measuring.md",
    "README.md": "index.md",
}


def site_link(source: pathlib.Path, link: str, pages: pathlib.Path, at: pathlib.Path) -> str | None:
    """The link as the site wants it; None for one that has no place there."""
    if re.match(r"[a-z]+:|#", link):
        return link
    file, mark, anchor = link.partition("#")
    target = (source.parent / file).resolve()
    up = "../" * (len(at.relative_to(pages).parts) - 1)
    if target.is_relative_to(ROOT / "docs"):
        inner = target.relative_to(ROOT / "docs")
        return None if target.is_dir() else f"{up}{inner.as_posix()}{mark}{anchor}"
    name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
    if name in OTHERS:
        return f"{up}{OTHERS[name]}{mark}{anchor}"
    if name.startswith("include/tessera/"):
        return f"{up}api/cpp/{pathlib.Path(name).parts[2]}.md"
    if name and target.is_file():  # a source: a copy of it
        copy = pages / "files" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copy)
        return f"{up}files/{name}"
    return None


def copy_page(source: pathlib.Path, at: pathlib.Path, pages: pathlib.Path):
    def moved(found: re.Match) -> str:
        link = site_link(source, found[2], pages, at)
        return found[1][1:-1] if link is None else f"{found[1]}({link})"

    # Code is left alone.
    parts = re.split(r"(^```.*?^```$)", source.read_text(), flags=re.MULTILINE | re.DOTALL)
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_text("".join(part if part.startswith("```") else LINK.sub(moved, part) for part in parts))


def named(nav) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    return set().union(set(), *(named(one) for one in (nav.values() if isinstance(nav, dict) else nav)))


def prepare(work: pathlib.Path, site: pathlib.Path) -> pathlib.Path:
    """Lays out sources and configuration in `work`; returns the configuration."""
    shutil.rmtree(work, ignore_errors=True)
    pages = work / "pages"
    for page in sorted((ROOT / "docs").rglob("*.md")):
        copy_page(page, pages / page.relative_to(ROOT / "docs"), pages)
    for name, at in OTHERS.items():
        if name != "README.md":  # docs/index.md stands for it
            copy_page(ROOT / name, pages / at, pages)
    for picture in (ROOT / "docs/pictures").glob("*"):
        (pages / "pictures").mkdir(exist_ok=True)
        shutil.copyfile(picture, pages / "pictures" / picture.name)
    shutil.copyfile(HERE / "extra.css", pages / "extra.css")
    modules = cpp_reference.write(ROOT / "include", pages / "api/cpp")
    packages = python_reference.write(ROOT / "python/tessera", pages / "api/python")
    config = yaml.safe_load((HERE / "mkdocs.yml").read_text())
    lists = {
        "cpp": ["api/cpp/index.md", *({name: f"api/cpp/{name}.md"} for name in modules)],
        "python": ["api/python/index.md", *({name: f"api/python/{name}.md"} for name in packages)],
        "decisions": [
            {"Decisions": [f"decisions/{p.name}" for p in sorted((ROOT / "docs/decisions").glob("*.md"))]}
        ],
    }
    for group in config["nav"]:
        for title, content in group.items():
            if isinstance(content, list):
                group[title] = [
                    lists[one.strip("{}")] if isinstance(one, str) and one.startswith("{") else [one]
                    for one in content
                ]
                group[title] = [one for part in group[title] for one in part]
    present = {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")}
    rest = sorted(present - named(config["nav"]))
    if rest:
        config["nav"].append({"More": rest})
    config |= {"docs_dir": str(pages), "site_dir": str(site)}
    path = work / "mkdocs.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=pathlib.Path, help="where the site goes")
    parser.add_argument(
        "--work", type=pathlib.Path, help="where its sources are laid out (default: SITE-pages)"
    )
    given = parser.parse_args()
    site = given.site.resolve()
    config = prepare((given.work or site.with_name(site.name + "-pages")).resolve(), site)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", str(config)]
    # Of its successor, which is not ready.
    result = subprocess.run(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if result.returncode != 0:
        sys.exit(result.returncode)
    print(f"site     {site}/index.html")


if __name__ == "__main__":
    main()
