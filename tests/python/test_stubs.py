"""The stubs of the extension say of every function what the extension says itself.

pybind11 writes names, types and defaults of all arguments into docstrings if it is asked to. Types that
Python has no name for, and those it knows too little about (any callable, any object), are not compared.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tessera

STUBS = Path(tessera.__file__).parent / "_C.pyi"

ASK = """
import json, re
import tessera._C as engine

found = {}
def look(owner, prefix):
    for name, value in vars(owner).items():
        if isinstance(value, type) or getattr(value, "__name__", "").startswith("tessera._C."):
            look(value, prefix + name + ".")
            continue
        value = value.fget if isinstance(value, property) else getattr(owner, name)
        lines = (getattr(value, "__doc__", None) or "").splitlines()
        found[prefix + name] = [
            re.sub(r"^[0-9]+[.] ", "", line) for line in lines
            if re.match(r"^(?:[0-9]+[.] )?\\w*\\(.*\\)(?: -> .*)?$", line) and "*args, **kwargs" not in line
        ]
look(engine, "")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def said():
    """Signatures by name, one for every overload."""
    words = [sys.executable, "-W", "ignore", "-c", ASK]
    environment = {**os.environ, "TESSERA_SIGNATURES": "1"}
    answer = subprocess.run(words, check=True, capture_output=True, text=True, timeout=100, env=environment)
    return {name: texts for name, texts in json.loads(answer.stdout).items() if texts}


def stub_functions(body=None, prefix=""):
    """Every function of the stubs as (name, node, decorators)."""
    for node in body or ast.parse(STUBS.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield from stub_functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node, {ast.unparse(d) for d in node.decorator_list}


def stub_fields(body=None, prefix=""):
    """Every attribute that the stubs give a class, and its type."""
    for node in body or ast.parse(STUBS.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield from stub_fields(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.AnnAssign) and prefix:
            yield prefix + node.target.id, ast.unparse(node.annotation)


# One spelling for types that both sides write in several ways.
SAME = [
    (r"\b(?:typing|collections\.abc|datetime|torch\.distributed\.distributed_c10d|torch\.futures)\.", ""),
    (r"\b(?:tessera\._C|ReduceOp)\.", ""),
    (
        r"\b(?:collision|comm_ops|dist_data|embedding|graph_parallel|jagged|pipeline|planner|regions|sharding)\.",
        "",
    ),
    (r"\btorch\.(Tensor|dtype|device)\b", r"\1"),
    (r"\bstr \| device\b", "device | str"),
    (r'\bAnnotated\[(.*?), "FixedSize\(\d+\)"\]', r"\1"),
    # What takes an int or a float takes what can be made one.
    (r"\bSupportsInt(?: \| SupportsIndex)?\b", "int"),
    (r"\bSupportsFloat(?: \| SupportsIndex)?\b", "float"),
    (r"\b(?:List|Sequence)\b", "list"),
    (r"\b(?:Dict|Mapping)\b", "dict"),
    (r"\bSet\b", "set"),
    (r"\b(torch\.)?Future(\[Tensor\])?", "Future"),
    (r"\s+", ""),
]
UNKNOWN = re.compile(r"::|object|Any|Callable|handle|Buffer|args|_distributed_c10d|os\.PathLike|Path")


def aliases():
    """Names that the stubs give to types."""
    return {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.walk(ast.parse(STUBS.read_text()))
        if isinstance(node, ast.Assign)
    }


ALIASES = aliases()


def plain(annotation):
    for name, meaning in reversed(ALIASES.items()):
        annotation = re.sub(rf"\b{name}\b", meaning, annotation)
    for pattern, replacement in SAME:
        annotation = re.sub(pattern, replacement, annotation)
    return annotation


def split_arguments(text):
    """The arguments of a signature; commas inside brackets, quotes and defaults separate nothing."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>":
            depth -= 1
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def parsed(signature):
    """(arguments, result) of a signature; an argument is (name, type, whether it has a default)."""
    head, _, result = signature.rpartition(") -> ")
    arguments = []
    for part in split_arguments(head[head.index("(") + 1 :]):
        if part in {"*", "/"}:
            continue
        name, _, rest = part.partition(":")
        kind, _, default = rest.partition(" = ")
        arguments.append((name.strip(), kind.strip(), bool(default)))
    return arguments, result.strip()


def is_same(ours, theirs):
    """Of a pointer the extension does not say that it may be null, nor what a dict, list or tuple holds."""
    ours, theirs = plain(ours), plain(theirs)
    if theirs in {"dict", "list", "tuple"}:
        return ours.startswith(theirs)
    return theirs in {ours, ours.replace("|None", "")}


def differences(name, node, signature):
    arguments, result = parsed(signature)
    ours = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    without = len(node.args.args) + len(node.args.posonlyargs) - len(node.args.defaults)
    defaults = [i >= without for i in range(len(node.args.posonlyargs) + len(node.args.args))]
    defaults += [default is not None for default in node.args.kw_defaults]
    if [*ours] and ours[0].arg in {"self", "cls"}:
        ours, defaults = ours[1:], defaults[1:]
    if arguments and arguments[0][0] in {"self", "arg0"} and "." in name and len(arguments) == len(ours) + 1:
        arguments = arguments[1:]
    if len(arguments) != len(ours):
        return [f"{name}: {len(ours)} arguments in the stub, {len(arguments)} in {signature}"]
    found = []
    for (their_name, kind, has_default), own, own_default in zip(arguments, ours, defaults, strict=True):
        place = f"{name}({own.arg})"
        if not re.fullmatch(r"arg\d+", their_name) and their_name != own.arg:
            found.append(f"{place}: it is called {their_name}")
        if has_default != own_default:
            found.append(f"{place}: {'has' if has_default else 'has no'} default")
        own_kind = ast.unparse(own.annotation) if own.annotation else "Any"
        if not UNKNOWN.search(kind + own_kind) and not is_same(own_kind, kind):
            found.append(f"{place}: the stub says {own_kind}, the extension {kind}")
    own_result = ast.unparse(node.returns) if node.returns else "Any"
    is_known = not name.endswith("__init__") and not UNKNOWN.search(result + own_result)
    if is_known and not is_same(own_result, result):
        found.append(f"{name}: the stub returns {own_result}, the extension {result}")
    return found


def test_stubs_say_what_the_extension_says(said):
    compared, wrong = 0, []
    for name, node, decorators in stub_functions():
        signatures = said.get(name)
        # Some stubs leave all arguments to the functions of Python that call them.
        if signatures is None or node.args.vararg or any(d.endswith(".setter") for d in decorators):
            continue
        compared += 1
        # Of several forms, the stub gives each in some place.
        found = [differences(name, node, signature) for signature in signatures]
        if all(found):
            wrong += min(found, key=len)
    assert not wrong, "\n".join(wrong)
    assert compared > 150


def test_functions_of_many_arguments_name_them(said):
    """Nobody counts more than four places: callers may give names."""
    nameless = {
        name
        for name, signatures in said.items()
        for signature in signatures
        if "(" in signature
        and sum(bool(re.fullmatch(r"arg\d+", each)) for each, *_ in parsed(signature)[0]) > 4
    }
    assert not nameless


def test_attributes_have_the_types_that_the_extension_says(said):
    compared, wrong = 0, []
    for name, ours in stub_fields():
        # What reads an attribute has no name; a number's own words are no signature.
        for signature in (words for words in said.get(name, []) if words.startswith("(")):
            theirs = parsed(signature)[1]
            if UNKNOWN.search(theirs + ours):
                continue
            compared += 1
            if not is_same(ours, theirs):
                wrong.append(f"{name}: the stub says {ours}, the extension {theirs}")
    assert not wrong, "\n".join(wrong)
    assert compared > 100
