"""torchrec's own tests, which its package carries, with one word of every import changed: to tessera.

The files are read where torchrec is installed. They import a module that the package leaves out, and a few
names that tessera has not; those are classes here that say so when one is made. Tests that ask for GPUs are
tried without, which torchrec itself judges: what it does not hold without a GPU is not asked of tessera.

    python tests/peers/torchrec_suite.py [word ...]    # in .venv-peers; tests with such a word in a name
    python tests/peers/torchrec_suite.py --root torchrec --json out.json    # what torchrec holds
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib.abc
import importlib.util
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
import unittest

import hypothesis
import torch
import torchrec_page

LIMIT = int(os.environ.get("TESSERA_SUITE_LIMIT", "120"))  # seconds for one test, on a loaded machine
ROOTS = ("tessera", "torchrec")
ENGINES = ("gloo", "shm")

# What the package carries of its tests, below its root. Of `distributed.tests` it has nothing.
CARRIED = ("test_utils", "distributed.test_utils", "models.experimental")
FILES = {  # of tests: their classes
    "distributed.test_utils.test_model_parallel": ("_ModelParallelBase",),
    "distributed.test_utils.test_model_parallel_base": (
        "ModelParallelSparseOnlyBase",
        "ModelParallelStateDictBase",
    ),
    "models.experimental.test_transformerdlrm": (
        "InteractionArchTransformerTest",
        "DLRMTransformerTest",
        "DLRMTransformerTrainTest",
    ),
}

# Names of torchrec's own use: the groups that a test has left behind, and offsets of lengths.
PRIVATE = {
    "_CROSS_PG": None,
    "_INTRA_PG": None,
    "_to_offsets": lambda lengths: torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
}


class CarriedFiles(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find what torchrec's package carries of its tests, as modules of `root` that import from `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.folder = pathlib.Path(importlib.util.find_spec("torchrec").origin).parent
        self.missing: set[str] = set()

    def find_spec(self, fullname, path=None, target=None):
        root, _, name = fullname.partition(".")
        if root != self.root or not any(name == part or name.startswith(f"{part}.") for part in CARRIED):
            return None
        place = self.folder.joinpath(*name.split("."))
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if not file.exists():
            return None
        spec = importlib.util.spec_from_file_location(
            fullname, file, loader=self, submodule_search_locations=[str(place)] if place.is_dir() else None
        )
        spec.cached = None  # Python would take what was compiled for torchrec
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        file = module.__spec__.origin
        with open(file) as stream:
            tree = ast.parse(re.sub(r"\btorchrec\b", self.root, stream.read()), file)
        for node in list(tree.body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == self.root:
                unknown = [alias for alias in node.names if not self.has(node.module, alias.name)]
                for alias in unknown:
                    name = f"{node.module}.{alias.name}"
                    if alias.name not in PRIVATE:
                        self.missing.add(name)
                    value = PRIVATE[alias.name] if alias.name in PRIVATE else stand_in(name)
                    setattr(module, alias.asname or alias.name, value)
                    node.names.remove(alias)
                if not node.names:
                    tree.body.remove(node)
        exec(compile(tree, file, "exec"), vars(module))

    def has(self, path: str, name: str) -> bool:
        try:
            if hasattr(importlib.import_module(path), name):
                return True
            importlib.import_module(f"{path}.{name}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"{self.root}."):
                raise
            return False
        return True


def stand_in(path: str) -> type:
    """Return what may be written where a type is, or be a base."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"there is no {path}")

    name = path.rpartition(".")[2]
    return type(name, (), {"__init__": __init__, "__class_getitem__": classmethod(lambda cls, item: cls)})


def make_suite(base: type, engine: str) -> type:
    """Return the tests of one class of torchrec, on one engine, those that ask for GPUs among them."""
    examples = 0

    class Suite(base):
        backend = engine

        @classmethod
        def setUpClass(cls):
            pass  # torchrec's skips whatever is not Gloo or NCCL

        def setUp(self):
            super().setUp()
            self._mp_init_mode = "fork"  # a process that imports everything again takes seconds

        def _run_multi_process_test(self, **kwargs):
            nonlocal examples
            examples += 1  # processes that are forked draw the same batches, on all ranks and in every run
            seed[0] = examples
            super()._run_multi_process_test(**kwargs)

    Suite.__name__ = base.__name__
    for name in unittest.TestLoader().getTestCaseNames(base):
        test = getattr(base, name)
        if getattr(test, "__unittest_skip__", False):
            setattr(Suite, name, test.__wrapped__)
    return Suite


seed = [0]


def load(root: str, engine: str) -> tuple[list[type], CarriedFiles]:
    """Return all suites, and who found their files."""
    finder = CarriedFiles(root)
    sys.meta_path.insert(0, finder)
    os.register_at_fork(after_in_child=lambda: random.seed(seed[0]))
    # The examples that Hypothesis takes are the same in every run.
    hypothesis.settings.register_profile("same", derandomize=True, database=None)
    hypothesis.settings.load_profile("same")
    importlib.import_module(f"{root}.test_utils").time = types.SimpleNamespace(time=lambda: 1.0)
    suites = [
        make_suite(getattr(importlib.import_module(f"{root}.{file}"), name), engine)
        for file, names in FILES.items()
        for name in names
    ]
    return suites, finder


def run(suite: type, name: str) -> tuple[str, str]:
    """Run one test and return how it ended, and what it printed or why torchrec skips it."""

    def give_up(*args):
        raise TimeoutError(f"not ended within {LIMIT} s")

    result = unittest.TestResult()
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        signal.signal(signal.SIGALRM, give_up)
        try:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            signal.alarm(LIMIT)
            suite(name).run(result)
        finally:
            signal.alarm(0)
            sys.stdout.flush()
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
        file.seek(0)
        text = file.read().decode(errors="replace")
    if result.failures or result.errors:
        return "failed", text + "".join(trace for _, trace in result.failures + result.errors)
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", text)


def fail_with_torchrec(names: list[str]) -> set[str]:
    """Return those of the tests that torchrec itself does not hold here."""
    if not names:
        return set()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-W", "ignore", __file__, *names, "--root", "torchrec"]
        subprocess.run([*command, "--json", file.name], stdout=subprocess.DEVNULL, check=True)
        tests = json.load(file)["tests"]
    return {name for name in names if tests[name]["outcome"] == "failed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", default=["test_"], help="parts of names")
    parser.add_argument("--root", choices=ROOTS, default="tessera", help="what the tests import")
    parser.add_argument("--engine", choices=ENGINES, default="gloo", help="the backend of their groups")
    parser.add_argument("--json", help="write how each test ended into this file, and judge nothing")
    parser.add_argument("--verbose", action="store_true", help="print what failed tests printed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    suites, finder = load(arguments.root, arguments.engine)
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    ended: dict[str, dict[str, str]] = {}
    for suite in suites:
        for test in unittest.TestLoader().getTestCaseNames(suite):
            name = f"{suite.__name__}.{test}"
            if not any(word in name for word in arguments.words):
                continue
            begin = time.monotonic()
            outcome, text = run(suite, test)
            ended[name] = {"outcome": outcome, "why": "" if outcome == "passed" else text[-6000:]}
            if outcome == "failed" and torchrec_page.explanation_of(name):
                outcome = "explained"
            elif outcome == "failed":
                wrong.append(name)
                print(f"{name}: failed ({time.monotonic() - begin:.1f} s)", flush=True)
                if arguments.verbose:
                    print(text[-6000:], flush=True)
            counts[outcome] += 1
    if arguments.root != "torchrec" and not arguments.json:
        judged = fail_with_torchrec(wrong)
        wrong = [name for name in wrong if name not in judged]
        counts["failed"] -= len(judged)
        counts["failed with torchrec, too"] = len(judged)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()) if count))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"tests": ended, "missing": sorted(finder.missing)}, file, indent=1)
        return 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
