"""Importing, stubs and the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest
import tessera
import tessera.distributed
import torch
from ranks import run_ranks
from tessera import _built_for, _torch_check

PACKAGE = pathlib.Path(tessera.__file__).parent
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(PACKAGE)], "tessera.")
    if not module.name.startswith("tessera._C")
)


def test_import_needs_torch_only():
    code = (
        "import sys, torch; before = set(sys.modules); import time; begin = time.perf_counter();"
        "import tessera; print(time.perf_counter() - begin);"
        "print(*{n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    seconds, names = result.stdout.splitlines()
    assert names == "tessera"
    assert float(seconds) < 0.5
    assert result.stderr == ""


def test_one_import_finds_every_module():
    paths = [name for name in MODULES if not any(part.startswith("_") for part in name.split("."))]
    paths.remove("tessera.optim.apply_optimizer_in_backward")  # a function of this name, as in torchrec
    assert "tessera.inference.modules" in paths and len(paths) > 100
    code = (
        "import operator, sys, tessera\n"
        "for path in sys.argv[1:]:\n"
        "    found = operator.attrgetter(path.partition('.')[2])(tessera)\n"
        "    if type(found) is not type(sys): print(path, 'is', found)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *paths], capture_output=True, text=True, timeout=120
    )
    assert (result.stdout, result.stderr) == ("", "")


def test_another_torch_is_refused_before_the_extension_is_loaded():
    code = (
        "import sys, types; other = types.ModuleType('tessera._built_for');"
        "other.torch, other.cuda = {torch!r}, {cuda!r}; sys.modules['tessera._built_for'] = other\n"
        "try: import tessera\n"
        "except ImportError as error: print(error, 'tessera._C' in sys.modules)"
    )

    def refusal(torch_version, cuda):
        return subprocess.run(
            [sys.executable, "-c", code.format(torch=torch_version, cuda=cuda)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    text = refusal("1.2.3+cu99", None)
    assert text.startswith("tessera was built for torch 1.2.3+cu99, but this Python has torch ")
    assert text.endswith("Install torch 1.2, or build tessera again with this torch (make). False\n")
    if torch.version.cuda is None:
        assert "is built for the CPU alone" in refusal(torch.__version__, "13.0")
    else:
        assert "is built for CUDA " in refusal(torch.__version__, "1.0")
    assert refusal(torch.__version__, torch.version.cuda) == ""  # and the same one is taken


def test_a_torch_for_another_cuda_is_refused():
    with pytest.raises(ImportError) as refused:
        _torch_check.check("2.13.0+cu130", "13.0", "2.13.1+cu126", "12.6")
    assert str(refused.value) == (
        "tessera was built for CUDA 13.0 with torch 2.13.0+cu130, but torch 2.13.1+cu126 here is built for "
        "CUDA 12.6. Install torch 2.13 for CUDA 13, or build tessera again with this torch (make)."
    )
    _torch_check.check("2.13.0+cu130", "13.0", "2.13.1+cu132", "13.2")
    _torch_check.check("2.13.0+cpu", None, "2.13.0+cu126", "12.6")


def test_the_build_writes_down_its_torch():
    if _built_for.torch == torch.__version__:
        assert _built_for.cuda == torch.version.cuda
    kind = _built_for.torch.partition("+")[2]
    if not re.fullmatch(r"|cpu|cu\d+", kind):
        return  # a torch of one's own, which has another word there
    assert kind in ("", "cpu") if _built_for.cuda is None else kind == f"cu{_built_for.cuda.replace('.', '')}"


def test_an_extension_that_was_not_built_is_named():
    code = (
        "import sys; sys.modules['tessera._built_for'] = None\n"
        "try: import tessera\n"
        "except ImportError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith("tessera's extension is not built for this Python (cpython-")


def test_there_is_one_standard_library_in_the_process():
    """A second copy, linked in statically, crashes in its first stream."""
    with open("/proc/self/maps") as maps:
        ours = {line.split()[-1] for line in maps if "libtessera" in line or "tessera/_C" in line}
    # the library and the extension; libtessera_data too where a test before this one wrote click data
    assert {pathlib.Path(library).name.split(".")[0] for library in ours} >= {"libtessera", "_C"}
    for library in ours:
        needs = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        assert "libstdc++.so.6" in needs, library


def test_stubs_name_what_the_extension_has():
    tree = ast.parse((PACKAGE / "_C.pyi").read_text())
    stubs = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stubs.remove("_Options")  # what type checkers know structs of options by
    assert stubs == {name for name in dir(tessera._C) if not name.startswith("__")}
    assert (PACKAGE / "py.typed").exists()


def run_examples(rank, name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0, f"{result.failed} examples of {name} fail"
    return result.attempted


@pytest.mark.parametrize("name", ["tessera", *MODULES])
def test_examples_in_docstrings_run(name):
    run_ranks(1, run_examples, name, backend=None)


def test_most_modules_have_examples():
    counts = run_ranks(1, count_examples, backend=None)[0]
    for name in (
        "tessera",
        "tessera._error",
        "tessera.comm._awaitable",
        "tessera.comm._failure",
        "tessera.comm._group",
        "tessera.comm._mesh",
        "tessera.distributed.collective_utils",
        "tessera.distributed.comm",
    ):
        assert counts[name] > 0, name


def count_examples(rank):
    finder = doctest.DocTestFinder(exclude_empty=True)
    return {
        name: sum(len(test.examples) for test in finder.find(importlib.import_module(name)))
        for name in ["tessera", *MODULES]
    }


def test_examples_of_the_extension_run():
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for name in dir(tessera._C):
        text = getattr(tessera._C, name).__doc__ or ""
        names = {name: getattr(tessera._C, name)}
        result = runner.run(parser.get_doctest(text, names, name, None, None))
        assert result.failed == 0, name
    assert runner.summarize(verbose=False).attempted > 0


def test_public_functions_say_what_they_do():
    for name in ("tessera.comm", "tessera.distributed.comm", "tessera.distributed.collective_utils"):
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, public)
            if public.startswith("_") or not callable(value):
                continue
            if getattr(value, "__module__", "").startswith("tessera"):
                first = (value.__doc__ or "").strip().splitlines()[:1]
                assert first, f"{name}.{public} has no docstring"
                assert first[0][0].isupper(), f"{name}.{public}: {first[0]}"
                assert first[0].endswith("."), f"{name}.{public}: {first[0]}"
