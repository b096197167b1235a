"""Pages of the Python interface, out of the sources: names, signatures, docstrings. Imports nothing."""

from __future__ import annotations

import ast
import pathlib
import re


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _exported(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            try:
                return set(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str = "") -> str:
    text = ast.unparse(node.args)
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name or node.name}({text}){result}"
    if len(line) <= 96:
        return line
    # One argument per line; commas inside brackets are not between arguments.
    parts, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    inner = ",\n".join("    " + part for part in [*parts, current.strip()] if part)
    return f"{name or node.name}(\n{inner},\n){result}"


def _prose(text: str | None) -> str:
    """A docstring as Markdown. Examples of a console become code."""
    if not text:
        return ""
    lines, result, in_code = text.splitlines(), [], False
    for line in lines:
        starts = line.lstrip().startswith(">>>")
        if starts and not in_code:
            result += ["", "```pycon"]
            in_code = True
        elif in_code and not line.strip():
            result += ["```", ""]
            in_code = False
        result.append(
            line.strip()
            if in_code
            else re.sub(r"<(?=\w)", "&lt;", line.strip() if line.startswith("    ") else line)
        )
    if in_code:
        result.append("```")
    return "\n".join(result)


def _class(node: ast.ClassDef) -> list[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    functions = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
    made = next((one for one in functions if one.name == "__init__"), None)
    head = f"class {node.name}" + (f"({bases})" if bases else "")
    fields = [
        ast.unparse(one)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and _is_public(ast.unparse(one.target))
    ]
    code = [head]
    if made is not None:
        code.append(
            _signature(made, node.name)
            .replace("(self, ", "(")
            .replace("(self)", "()")
            .replace("    self,\n", "")
        )
    code += fields
    parts = [
        f"### {node.name}\n",
        "```python\n" + "\n".join(code) + "\n```\n",
        _prose(ast.get_docstring(node)) + "\n",
    ]
    for one in functions:
        if not _is_public(one.name):
            continue
        text = ast.get_docstring(one)
        is_property = any(ast.unparse(mark).endswith("property") for mark in one.decorator_list)
        words = (
            one.name
            if is_property
            else _signature(one).replace("(self, ", "(").replace("(self)", "()").replace("    self,\n", "")
        )
        parts.append(f"```python\n{words}\n```\n")
        if text:
            parts.append(_prose(text) + "\n")
    return parts


def module_text(name: str, source: str) -> str:
    tree = ast.parse(source)
    exported = _exported(tree)
    shown = lambda node: node.name in exported if exported is not None else _is_public(node.name)  # noqa: E731
    parts = [f"## {name}\n", _prose(ast.get_docstring(tree)) + "\n"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and shown(node):
            parts += _class(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and shown(node):
            parts += [
                f"### {node.name}\n",
                f"```python\n{_signature(node)}\n```\n",
                _prose(ast.get_docstring(node)) + "\n",
            ]
    if exported is not None:
        here = {
            node.name
            for node in tree.body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        }
        others = sorted(exported - here)
        if others:
            parts.append("Also here: " + ", ".join(f"`{one}`" for one in others) + ".\n")
    return "\n".join(parts)


def write(package: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Writes a page for each module or subpackage right under the root, and returns their names."""
    pages: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if any(part.startswith("_") for part in parts):
            continue
        top = (
            ".".join(parts[:3]) if parts[1:2] == ("distributed",) and len(parts) > 2 else ".".join(parts[:2])
        )
        pages.setdefault(top, []).append((".".join(parts), file.read_text()))
    # What a package hides in modules of its own is shown where it is exported.
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        "# Python API\n",
        "Names, signatures and docstrings. [Python](../../python.md) tells how they fit together.\n",
        "| module | what |",
        "|---|---|",
    ]
    for top, modules in sorted(pages.items()):
        text = "\n".join(module_text(name, source) for name, source in modules)
        (folder / f"{top}.md").write_text(f"# {top}\n\n{text}")
        first = (ast.get_docstring(ast.parse(modules[0][1])) or "").split("\n\n")[0]
        rows.append(f"| [{top}]({top}.md) | {' '.join(first.split()).replace('|', '/')} |")
    (folder / "index.md").write_text("\n".join(rows) + "\n")
    return sorted(pages)
