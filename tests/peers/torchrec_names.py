"""The names of torchrec 1.8.0 that Tessera does not have, found by walking both, and why.

    .venv-peers/bin/python tests/peers/torchrec_names.py    # print what is missing

A module is written as its path, a name as `module:Name`, a method, an attribute or a member of an enumeration
as `module:Name.method`, an argument of a function or constructor as `module:Name(argument)`. Methods,
arguments and constants are looked at in the modules that programs write by hand; elsewhere names alone.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pathlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

# Tests, measurements and what is marked as an experiment, and what wants a package that is not there.
LEFT_OUT = ("test", "benchmark", "github", "experimental", "_internal", "inference_legacy", "scripts", "fb")
UNREADABLE = ("inference.client", "inference.dlrm_packager")
MISSING = pathlib.Path(__file__).with_name("torchrec_missing.txt")
# What programs write by hand: there the arguments and methods are compared, too.
BY_HAND = re.compile(
    r"|optim(\..*)?|models(\..*)?|datasets(\..*)?|fx(\.tracer)?|types|streamable|sparse\.jagged_tensor"
    r"|modules\.(mlp|crossnet|deepfm|embedding_tower|activation|regroup|feature_processor_?|utils"
    r"|fused_embedding_modules|embedding_modules|embedding_configs)"
    r"|distributed\.(shard|model_parallel|sharding_plan|types|fbgemm_qcomm_codec|train_pipeline(\.train_pipelines)?)"
    r"|metrics\.(auc|ne|calibration|throughput|metric_module|rec_metric|metrics_config|metrics_namespace)"
    r"|quant\.embedding_modules|inference\.modules"
)


def paths(root: ModuleType) -> Iterator[str]:
    """Return the modules of torchrec, by their paths in it; "" is torchrec itself."""
    folder = pathlib.Path(root.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        if any(word in part for part in parts for word in LEFT_OUT):
            continue
        path = ".".join(part for part in parts if part != "__init__")
        if path not in UNREADABLE:
            yield path


def module_of(root: str, path: str) -> ModuleType | None:
    name = f"{root}.{path}" if path else root
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return None


def constants(module: ModuleType) -> set[str]:
    """Return the names in capitals that a module assigns."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text())
    targets = [node.targets for node in tree.body if isinstance(node, ast.Assign)]
    targets += [[node.target] for node in tree.body if isinstance(node, ast.AnnAssign)]
    return {
        target.id
        for several in targets
        for target in several
        # One letter, or two, name a type of annotations.
        if isinstance(target, ast.Name) and re.fullmatch("[A-Z][A-Z_]{2,}", target.id)
    }


def public(module: ModuleType) -> dict[str, type | Callable]:
    """Return what a module defines for others; of a package also what it hands on."""
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        place = getattr(value, "__module__", None) or ""
        if place == module.__name__ or (hasattr(module, "__path__") and place.startswith("torchrec.")):
            found[name] = value
    return found


def arguments(function: Any) -> tuple[list[str], bool]:
    """Return the names of arguments, and whether others are taken by name and handed on."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [one.name for one in given if one.kind not in variable and not one.name.startswith("_")]
    return names, any(one.kind == inspect.Parameter.VAR_KEYWORD for one in given)


def has(own: Any, name: str) -> bool:
    return hasattr(own, name) or name in getattr(own, "__dataclass_fields__", {})


def parts(name: str, theirs: Any, own: Any) -> Iterator[str]:
    """Return what a class or function of torchrec's has, and ours has not."""
    if not callable(theirs) or not callable(own):
        return
    if inspect.isclass(theirs) and issubclass(theirs, enum.Enum):
        yield from (f"{name}.{member}" for member in theirs.__members__ if not has(own, member))
        return
    if inspect.isclass(theirs):
        fields = getattr(theirs, "__dataclass_fields__", {})  # they are arguments, too
        methods = [part for part in vars(theirs) if not part.startswith("_") and part not in fields]
        yield from (f"{name}.{part}" for part in methods if not has(own, part))
    known, takes_any = arguments(own)
    if not takes_any:
        yield from (f"{name}({word})" for word in arguments(theirs)[0] if word not in known)


def missing() -> set[str]:
    """Return what torchrec has and Tessera has not."""
    warnings.simplefilter("ignore")
    found: set[str] = set()
    for path in paths(importlib.import_module("torchrec")):
        theirs, own = module_of("torchrec", path), module_of("tessera", path)
        if own is None:
            found.add(path)
            continue
        names = public(theirs)
        found |= {f"{path}:{name}" for name in names if not hasattr(own, name)}
        if BY_HAND.fullmatch(path):
            found |= {f"{path}:{name}" for name in constants(theirs) if not hasattr(own, name)}
            for name, value in names.items():
                if value.__module__ == theirs.__name__ and hasattr(own, name):
                    found.update(parts(f"{path}:{name}", value, getattr(own, name)))
    # What lies in a package that is not there is not there either.
    return {one for one in found if not any(one.startswith(f"{above}.") for above in found)}


def explained() -> dict[str, list[str]]:
    """Return what torchrec_missing.txt lists, in the same form, by reason."""
    reasons: dict[str, list[str]] = {}
    module = reason = ""
    for line in MISSING.read_text().split("\n\n", 1)[1].splitlines():
        depth = len(line) - len(line.lstrip())
        words = line.split()
        if depth == 0 and line:
            reason = line
            reasons[reason] = []
        elif depth == 4:
            module = words[0].rstrip(":")
            reasons[reason] += [f"{module}:{word}" for word in words[1:]] or [module]
        elif depth == 8:
            reasons[reason] += [f"{module}:{word}" for word in words]
    return reasons


def lines() -> list[str]:
    """Return the part of docs/compatibility.md that names what is missing."""
    rows = []
    for reason, names in explained().items():
        modules: dict[str, list[str]] = {}
        for name in names:
            module, _, rest = name.partition(":")
            modules.setdefault(module, []).extend([rest] if rest else [])
        told = [
            f"`{m}`: {', '.join(f'`{n}`' for n in own)}" if own else f"`{m}`" for m, own in modules.items()
        ]
        rows.append(f"| {reason} | {'; '.join(told)} |")
    count = sum(map(len, explained().values()))
    return [
        "## torchrec: names that are not there",
        "",
        f"All other modules, classes and functions of its package are at the same place; {count} names, "
        "methods and arguments are not. Tests, measurements and what is marked as an experiment are not "
        "counted; methods and arguments are compared in the modules that programs write by hand.",
        "",
        "| why | what |",
        "|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))
    print("\n".join(sorted(missing())))
