"""The house has floors: an include may only point down.

Reads every #include of the tree and fails on one that points up, sideways, or out of a public
header into a private one. The modules of libtessera are linked floor by floor as well
(cmake/TesseraModule.cmake), by the same arrows.
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
    "planner": {"core"},
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
# The torch-free part of comm that engines stand on: what a transport is, what calls are and whether they
# agree. The rest of comm stands on the engines.
COMM_GROUND = {"call_agreement", "call_board", "own_process", "rank_list", "rank_set", "transport"}

# Floors above the library. Of a folder that two of them share, the files are named.
UPPER = {
    "workloads/dlrm/log": set(),
    "workloads/settings": {"workloads/dlrm/log"},
    "workloads/report": {"workloads/settings"},
    "workloads/data": {"workloads/settings", "workloads/dlrm/log"},
    "workloads/trainer": {"workloads/settings", "workloads/report"},
    "workloads/dlrm": {
        "workloads/settings",
        "workloads/report",
        "workloads/dlrm/log",
        "workloads/data",
        "workloads/trainer",
    },
    "workloads/gnn": {"workloads/settings", "workloads/report", "workloads/data", "workloads/trainer"},
    "workloads/lm": {"workloads/settings", "workloads/report", "workloads/trainer"},
    "cli/programs": set(),
    "cli/doctor": {"cli/programs", "workloads/report"},
    "cli": {
        "cli/programs",
        "cli/doctor",
        "workloads/settings",
        "workloads/report",
        "workloads/dlrm/log",
        "workloads/data",
        "workloads/dlrm",
        "workloads/gnn",
        "workloads/lm",
        "workloads/trainer",
    },
    "cli/worker": {
        "cli",
        "workloads/settings",
        "workloads/report",
        "workloads/dlrm/log",
        "workloads/data",
        "workloads/dlrm",
        "workloads/gnn",
        "workloads/lm",
        "workloads/trainer",
    },
}
# A click log, what tells a file by its content and what writes one whole: under the readers of data.
CLICK_LOG = {
    f"workloads/dlrm/{stem}"
    for stem in (
        "click_file", "click_file_writer", "click_layout", "click_log", "criteo", "half", "mapped_file",
        "metrics", "open_log", "synthetic", "text_blocks",
    )
} | {"workloads/data/content", "workloads/data/whole_file"}  # fmt: skip
# Wherever they lie, trainings' settings are a part of settings, and data's errors of the trainer a header
# that stands on nothing.
SETTINGS = {f"workloads/{name}/settings" for name in ("dlrm", "gnn", "lm", "trainer")}
WORDS = {"workloads/trainer/data_error"}

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


def declared_arrows():
    """What CMake links each module of libtessera with."""
    arrows = {}
    for path in sorted((ROOT / "src").glob("*/CMakeLists.txt")):
        for name, rest in re.findall(
            r"^tessera_module\((\w+)\n(.*?)^  SOURCES", path.read_text(), re.M | re.S
        ):
            uses = re.search(r"^  USES (.*)$", rest, re.M)
            arrows[name] = set(uses.group(1).split()) if uses else set()
    return arrows


def test_modules_are_linked_by_the_same_arrows():
    declared = declared_arrows()
    assert declared == {name: BELOW[name] for name in declared}
    without_libtorch = {"kernels", "launch", "planner", "serving"}
    assert set(declared) == set(BELOW) - without_libtorch


def test_arrows_have_no_cycle():
    below = {**BELOW, **{name: floors for name, floors in UPPER.items()}}
    while free := {name for name, floors in below.items() if not floors & set(below)}:
        below = {name: floors for name, floors in below.items() if name not in free}
    assert not below, f"modules in a circle: {sorted(below)}"


def test_engines_stand_on_the_ground_of_comm():
    wrong = []
    for path in sources("src/comm"):
        name = path.relative_to(ROOT / "src" / "comm").as_posix()
        is_ground = path.parent.name == "comm" and path.stem in COMM_GROUND
        if not is_ground and not name.startswith("shm/"):
            continue
        for include in includes(path):
            target = re.match(r"comm/(.+)\.h$", include)
            if target is None or target.group(1) in COMM_GROUND:
                continue
            if is_ground or not target.group(1).startswith("shm/"):
                wrong.append(f"{path.relative_to(ROOT)} includes {include}")
    assert not wrong, "\n".join(wrong)


def test_gloo_does_not_see_what_stands_on_it():
    """Its folder and all of comm that it needs; of the rest, some files hold a transport over Gloo."""
    root = ROOT / "src" / "comm"
    seen_by, above = {}, set()
    for path in sources("src/comm"):
        stem = path.relative_to(root).with_suffix("").as_posix()
        targets = {
            target.group(1) for target in map(re.compile(r"comm/(.+)\.h$").match, includes(path)) if target
        }
        seen_by.setdefault(stem, set()).update(targets)
        if not stem.startswith("gloo/") and any(target.startswith("gloo/") for target in targets):
            above.add(stem)
    under = {stem for stem in seen_by if stem.startswith("gloo/")}
    assert {"gloo/gloo_backend", "gloo/gloo_sockets", "gloo/gloo_transport", "gloo/pair_proofs"} <= under
    while more := set().union(*(seen_by.get(stem, set()) for stem in under)) - under:
        under |= more
    assert above == {"hierarchical_transport", "rendezvous"}
    assert not under & above


def upper_floor(path):
    """The floor of a file of workloads or cli, given without its ending."""
    if path in CLICK_LOG:
        return "workloads/dlrm/log"
    if path in SETTINGS:
        return "workloads/settings"
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "workloads" or len(parts) > 2 else parts[0]


def upper_target(path, include):
    """The file of workloads or cli that an include names, without its ending, or None for all others."""
    folders = [path.parent, ROOT / "workloads"]
    if path.relative_to(ROOT).parts[0] == "cli":
        folders.insert(1, ROOT / "cli")
    for folder in folders:
        if (folder / include).is_file():
            return (folder / include).resolve().relative_to(ROOT).with_suffix("").as_posix()
    return None


def test_every_folder_of_workloads_and_cli_is_known():
    folders = {f"workloads/{p.name}" for p in (ROOT / "workloads").iterdir() if p.is_dir()}
    folders |= {f"cli/{p.name}" for p in (ROOT / "cli").iterdir() if p.is_dir()}
    assert folders <= set(UPPER), f"folders without a floor: {sorted(folders - set(UPPER))}"


def test_includes_of_workloads_and_cli_point_down():
    wrong = []
    for path in sources("workloads", "cli"):
        own = path.relative_to(ROOT).with_suffix("").as_posix()
        floor = upper_floor(own)
        for include in includes(path):
            target = upper_target(path, include)
            if target is None or target in WORDS:
                continue
            below = upper_floor(target)
            if below != floor and below not in UPPER[floor]:
                wrong.append(f"{path.relative_to(ROOT)} includes {include}: {floor} may not use {below}")
    assert not wrong, "\n".join(wrong)


def test_a_workload_owns_no_mechanism():
    private = re.compile(r"^(kernels|" + "|".join(sorted(set(BELOW) - {"core"})) + r")/")
    wrong = [
        f"{path.relative_to(ROOT)} includes {include}"
        for path in sources("workloads")
        for include in includes(path)
        if private.match(include)
    ]
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
    ours = re.compile(r"^tessera/(planner/\w+|core/(export|version))\.h$")
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
