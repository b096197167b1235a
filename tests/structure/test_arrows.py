"""The house has floors: an include may only point down.

Reads every #include of the tree and fails on one that points up, sideways, or out of a public
header into a private one.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

# Which modules each module may include. A module may always include itself.
BELOW = {
    "core": set(),
    "kernels": set(),
    "comm": {"core"},
    "regions": {"core", "comm"},
    "data_parallel": {"core", "comm", "regions"},
    "vocab_parallel": {"core", "comm", "regions"},
    "graph_parallel": {"core", "comm", "regions"},
    "jagged": {"core"},
    "embedding": {"core", "jagged"},
    "sharding": {"core", "jagged", "embedding", "comm", "data_parallel"},
    "planner": {"core", "jagged", "embedding", "comm", "sharding"},
    "pipeline": {"core", "jagged", "embedding", "comm", "sharding"},
    "collision": {"core", "jagged", "embedding", "comm", "sharding"},
    "checkpoint": {
        "core",
        "comm",
        "regions",
        "data_parallel",
        "jagged",
        "embedding",
        "sharding",
        "collision",
    },
    "launch": {"core", "comm"},
    "serving": {"core", "embedding", "checkpoint", "collision"},
}
# Only the module that owns an operator calls its kernel, from its source files.
CALLS_KERNELS = {
    "comm",
    "regions",
    "data_parallel",
    "vocab_parallel",
    "graph_parallel",
    "jagged",
    "embedding",
    "sharding",
    "collision",
    "serving",
}

FORBIDDEN_IN_PUBLIC = re.compile(r"^(gloo/|nccl|cuda|.*ProcessGroupGloo|.*ProcessGroupNCCL)", re.I)
FORBIDDEN_IN_KERNELS = re.compile(r"^(torch/|c10/|ATen/(?!cpu/vec|native/cpu)|tessera/)")


def sources(*folders):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
                yield path


def includes(path):
    return INCLUDE.findall(path.read_text())


def module_of(path):
    parts = path.relative_to(ROOT).parts
    return parts[2] if parts[0] == "include" else parts[1]


def target_module(include):
    """The module an include of ours names, or None for everybody else's headers."""
    parts = include.split("/")
    if parts[0] == "tessera" and len(parts) > 2:
        return parts[1]
    return parts[0] if parts[0] in BELOW and len(parts) > 1 else None


def test_every_folder_is_a_known_module():
    folders = {p.name for base in ("include/tessera", "src") for p in (ROOT / base).iterdir() if p.is_dir()}
    assert folders <= set(BELOW), f"modules without a floor: {sorted(folders - set(BELOW))}"


def test_includes_point_down():
    wrong = []
    for path in sources("include", "src"):
        module = module_of(path)
        if module not in BELOW:
            continue
        allowed = BELOW[module] | {module}
        if path.relative_to(ROOT).parts[0] == "src" and module in CALLS_KERNELS:
            allowed = allowed | {"kernels"}
        for include in includes(path):
            target = target_module(include)
            if target is not None and target not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} includes {include}: {module} may not use {target}")
    assert not wrong, "\n".join(wrong)


def test_public_headers_show_no_private_ones():
    wrong = []
    for path in sources("include"):
        for include in includes(path):
            is_private = target_module(include) is not None and not include.startswith("tessera/")
            if is_private or FORBIDDEN_IN_PUBLIC.match(include):
                wrong.append(f"{path.relative_to(ROOT)} includes {include}")
    assert not wrong, "\n".join(wrong)


def test_kernels_stand_on_nothing():
    wrong = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("src/kernels")
        for include in includes(path)
        if FORBIDDEN_IN_KERNELS.match(include)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_launcher_and_the_program_do_without_libtorch():
    wrong = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("src/launch", "include/tessera/launch", "cli")
        if "worker" not in path.relative_to(ROOT).parts
        for include in includes(path)
        if re.match(r"^(torch/|c10/|ATen/|tessera/comm/)", include)
    ]
    assert not wrong, "\n".join(wrong)


# The rest of the module stands on LibTorch; these are linked into the program.
TORCH_FREE_CHECKPOINT = {
    "checksum", "convert", "disk", "error", "folder", "job", "json", "manifest", "manifest_check",
    "merged_list", "open_file", "plain_reader", "reader", "root_lock", "run_beside", "safetensors",
    "stored_region", "writer",
}  # fmt: skip


def test_the_format_of_checkpoints_does_without_libtorch():
    files = [
        p for p in sources("src/checkpoint", "include/tessera/checkpoint") if p.stem in TORCH_FREE_CHECKPOINT
    ]
    assert {p.stem for p in files} == TORCH_FREE_CHECKPOINT
    allowed = re.compile(r"^(?!torch/|c10/|ATen/|tessera/comm/)")
    ours = re.compile(r"^(?:tessera/)?checkpoint/(\w+)\.h$")
    wrong = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in files
        for include in includes(path)
        if not allowed.match(include)
        or ((match := ours.match(include)) and match.group(1) not in TORCH_FREE_CHECKPOINT)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_planner_does_without_libtorch():
    allowed = re.compile(r"^(?!torch/|c10/|ATen/)")
    ours = re.compile(r"^tessera/(planner/\w+|core/export)\.h$")
    wrong = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("src/planner", "include/tessera/planner")
        for include in includes(path)
        if not allowed.match(include) or (include.startswith("tessera/") and not ours.match(include))
    ]
    assert not wrong, "\n".join(wrong)


def test_serving_does_without_libtorch():
    allowed = re.compile(r"^(?!torch/|c10/|ATen/|tessera/comm/)")
    ours = re.compile(r"^(?:tessera/)?(checkpoint|embedding)/(\w+)\.h$")
    wrong = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("src/serving", "include/tessera/serving")
        for include in includes(path)
        if not allowed.match(include)
        or (
            (match := ours.match(include))
            and match.group(2) not in TORCH_FREE_CHECKPOINT | {"quantised_rows"}
        )
    ]
    assert not wrong, "\n".join(wrong)


def test_gloo_is_seen_by_one_file():
    seen = [
        path.relative_to(ROOT).as_posix()
        for path in sources("include", "src", "cli", "python")
        for include in includes(path)
        if include.endswith("ProcessGroupGloo.hpp")
    ]
    assert seen == ["src/comm/gloo/gloo_backend.cpp"]


@pytest.mark.parametrize(
    ("path", "include", "is_wrong"),
    [
        ("include/tessera/comm/group.h", "tessera/core/check.h", False),
        ("include/tessera/core/check.h", "tessera/comm/group.h", True),
        ("src/comm/backend.cpp", "kernels/reduce.h", False),
        ("src/launch/job.cpp", "kernels/reduce.h", True),
    ],
)
def test_the_rules_themselves(path, include, is_wrong):
    module = module_of(ROOT / path)
    allowed = BELOW[module] | {module}
    if path.startswith("src") and module in CALLS_KERNELS:
        allowed = allowed | {"kernels"}
    assert (target_module(include) not in allowed) == is_wrong
