"""Pages of the C++ interface, out of the public headers: what they say of themselves, and their declarations.

The headers are written to be read, so a class is shown as its public part stands in the header, without the
bodies of functions. Comments with three slashes before a name become its text.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

LABEL = re.compile(r"^\s*(public|private|protected)\s*:\s*$")
HIDDEN = {"detail", "internal"}  # namespaces that are nobody else's


@dataclasses.dataclass
class Item:
    name: str
    text: str  # its comment
    code: str


def introduction(source: str) -> tuple[str, str]:
    """What the first comment says: the words behind the dash, and the rest."""
    lines = []
    for line in source.splitlines():
        if not line.startswith("//"):
            break
        lines.append(line.removeprefix("//").removeprefix(" "))
    first, _, rest = "\n".join(lines).partition("\n\n")
    words = " ".join(first.split())
    summary = words.partition("— ")[2] or words
    return summary[:1].upper() + summary[1:], rest


def _depth(line: str) -> int:
    """How many braces more the line opens than it closes, outside of texts and comments."""
    plain = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//.*$', "", line)
    return plain.count("{") - plain.count("}")


def _without_bodies(code: str) -> str:
    """Function bodies become semicolons; braces of values (`int n = {}`), enums and classes stay."""
    result, lines, i = [], code.splitlines(), 0
    while i < len(lines):
        line = lines[i]
        is_head = re.search(r"\)[^;{]*\{", line) and not re.match(r"\s*(enum|struct|class|union)\b", line)
        if is_head:
            head = (
                line[: line.rindex("{", 0, line.rindex("{") + 1)]
                if line.count("{") == 1
                else line[: line.index("{")]
            )
            head = re.sub(r"\s*:\s*\w+\([^)]*\).*$", "", head) if re.search(r"\)\s*:\s*\w+\(", head) else head
            depth = _depth(line)
            while depth > 0 and i + 1 < len(lines):
                i += 1
                depth += _depth(lines[i])
            if head.lstrip().startswith(":") and result:  # what a constructor begins with
                result[-1] += ";"
            else:
                result.append(head.rstrip() + ";")
        else:
            result.append(line)
        i += 1
    return "\n".join(result)


def _public_part(code: str) -> str:
    """The class without what is private or protected."""
    if not re.match(r"\s*(template\b[^{]*?)?(class|struct)\b", code):
        return code
    kept, shown = [], True
    for line in code.splitlines():
        if label := LABEL.match(line):
            shown = label[1] == "public"
            if not shown:
                continue
        if shown or line.startswith("}"):
            kept.append(line)
    while len(kept) > 2 and not kept[-2].strip():
        del kept[-2]
    return "\n".join(kept)


def _name(code: str) -> str:
    plain = re.sub(r"\bTESSERA_\w+(\([^)]*\))?\s*|\[\[[^\]]*\]\]\s*", "", code)
    plain = re.sub(r"template\s*<[^{;]*?>\s*(?=class|struct|using|[\w:])", "", plain, count=1)
    if found := re.match(r"\s*(?:enum class|enum|class|struct|union|using|concept)\s+(\w+)", plain):
        return found[1]
    if found := re.search(r"(operator\S+?|~?\w+)\s*\(", plain):
        return found[1]
    found = re.search(r"(\w+)\s*(?:=|;|\{)", plain)
    return found[1] if found else "…"


def items(source: str) -> list[Item]:
    """Declarations in namespaces of the library, in their order."""
    found: list[Item] = []
    comment: list[str] = []
    code: list[str] = []
    depth, hidden = 0, 0
    for line in source.splitlines():
        if hidden:
            hidden += _depth(line)
            continue
        if not code:
            if found_space := re.match(r"\s*(?:inline )?namespace\s*([\w:]*)\s*\{", line):
                if set(found_space[1].split("::")) & HIDDEN or not found_space[1]:
                    hidden = _depth(line)
                continue
            if line.lstrip().startswith("///"):
                comment.append(line.strip().removeprefix("///").removeprefix(" "))
                continue
            if not line.strip() or line.startswith(("#", "//", "}")):
                comment = [] if not line.strip() else comment
                continue
        code.append(line)
        depth += _depth(line)
        plain = re.sub(r"//.*$", "", line).rstrip()
        if depth == 0 and plain.endswith((";", "}")):
            whole = "\n".join(code)
            if not re.match(r"\s*(class|struct|enum class) [\w:]+;", whole):  # named elsewhere
                shown = _public_part(_without_bodies(whole))
                shown = re.sub(r"\bTESSERA_API\s+", "", shown)
                found.append(Item(_name(whole), "\n".join(comment), shown))
            comment, code = [], []
    return found


def _prose(text: str) -> str:
    """A comment as Markdown: what looks like HTML is not."""
    return re.sub(r"<(?=\w)", "&lt;", text)


def page(module: str, headers: list[pathlib.Path], include: pathlib.Path) -> str:
    parts = [f"# {module}\n"]
    for header in headers:
        source = header.read_text()
        summary, rest = introduction(source)
        parts.append(f"## `{header.relative_to(include)}`\n\n{_prose(summary)}\n")
        if rest:
            parts.append(f"{_prose(rest)}\n")
        by_name: dict[str, list[Item]] = {}
        for item in items(source):
            by_name.setdefault(item.name, []).append(item)
        for name, same in by_name.items():
            parts.append(f"### {name}\n")
            for item in same:
                if item.text:
                    parts.append(_prose(item.text) + "\n")
                parts.append(f"```cpp\n{item.code.strip(chr(10))}\n```\n")
    return "\n".join(parts)


def write(include: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Writes a page for each module and returns their names."""
    modules: dict[str, list[pathlib.Path]] = {}
    for header in sorted(include.rglob("*.h")):
        modules.setdefault(header.relative_to(include).parts[1], []).append(header)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        "# C++ API\n",
        "The public headers, module by module: what `find_package(tessera)` gives.\n",
        "| module | headers |",
        "|---|---|",
    ]
    for module, headers in sorted(modules.items()):
        (folder / f"{module}.md").write_text(page(module, headers, include))
        names = " · ".join(f"`{header.name}`" for header in headers)
        rows.append(f"| [{module}]({module}.md) | {names} |")
    (folder / "index.md").write_text("\n".join(rows) + "\n")
    return sorted(modules)
