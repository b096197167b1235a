"""Which machine's profile a planner takes, and what it says of one that was measured elsewhere."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
import tessera._C
import torch
from ranks import run_ranks
from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection

if not hasattr(tessera._C, "planner"):
    pytest.skip("the library was built without the planner", allow_module_level=True)
from tessera.distributed.planner import EmbeddingShardingPlanner, Topology
from tessera.distributed.planner._profile import Measured, alike, measured_here
from tessera.distributed.planner.planners import default_planner


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def write_profile(path, machine=None, ranks=2, memory=20e9, version=None):
    version = version or ".".join(tessera.__version__.split(".")[:3])
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {
        "kind": "tessera machine profile",
        "machine": machine or processor(),
        "version": version,
        "engine": "shm",
        "ranks": ranks,
        "threads_per_rank": 1,
        "spread": 0,
        "curves": {
            "rows": [[size, 1e-8 + size / memory] for size in (64, 1024)],
            "host": [[size, 1e-5 + size / 4e9] for size in (1000, 1000000)],
        },
    }
    path.write_text(json.dumps(profile))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file that the doctor keeps, without a variable that names it."""
    monkeypatch.delenv("TESSERA_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tessera" / "machine.json"


def model():
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=50_000, embedding_dim=64, feature_names=[f"f{i}"])
        for i in range(6)
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def planned(**topology):
    planner = EmbeddingShardingPlanner(
        topology=Topology(compute_device="cpu", **{"world_size": 2, **topology}), debug=False
    )
    planner.plan(torch.nn.ModuleDict({"bags": model()}))
    return planner.last_result


def test_the_kept_profile_of_this_machine_is_used_without_a_word(kept, caplog):
    assert '"row_seconds"' not in planned().problem
    write_profile(kept)
    assert '"row_seconds"' in planned().problem
    assert "measured" not in caplog.text


def test_the_kept_profile_of_another_machine_is_not_used(kept, caplog, monkeypatch):
    write_profile(kept, machine="an abacus")
    assert '"row_seconds"' not in planned().problem
    assert f"profile {kept} was measured on an abacus (here {processor()}), so it is not used" in caplog.text
    # Who names it wants it.
    caplog.clear()
    monkeypatch.setenv("TESSERA_PROFILE", str(kept))
    assert '"row_seconds"' in planned().problem
    assert "was measured on an abacus" in caplog.text and "not used" not in caplog.text


def test_other_ranks_engines_and_versions_are_told(kept, caplog):
    write_profile(kept, ranks=8, version="0.0.1")
    assert '"row_seconds"' in planned().problem
    here = ".".join(tessera.__version__.split(".")[:3])
    assert f"was measured with 8 ranks (here 2), by version 0.0.1 (here {here}): " in caplog.text
    assert "over shm (here gloo)" in measured_here(8, "gloo").caution


def test_machines_alike_have_the_speeds_of_the_first():
    one, other = Measured({"memory_speed": 1.0}, "a"), Measured({"memory_speed": 2.0}, "a")
    third, unknown = Measured({"memory_speed": 3.0}, "b"), Measured()
    speeds = alike([one, other, third, unknown, other])
    assert [found.get("memory_speed") for found in speeds] == [1.0, 1.0, 3.0, None, 1.0]


def _collective(rank, files):
    os.environ["TESSERA_PROFILE"] = files[rank]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=len(files), compute_device="cpu"), debug=False
    )
    plan = planner.collective_plan(torch.nn.ModuleDict({"bags": model()}))
    speeds = [planner._topology.speeds(r)["memory_speed"] for r in range(len(files))]
    return str(plan), speeds


def _default(rank, files):
    os.environ["TESSERA_PROFILE"] = files[rank]
    planner = default_planner(len(files), len(files), torch.device("cpu"))
    planner.collective_plan(torch.nn.ModuleDict({"bags": model()}))
    return [planner._topology.speeds(r)["memory_speed"] for r in range(len(files))]


def test_machines_that_were_not_measured_are_assumed_beside_others(tmp_path):
    file = tmp_path / "fast.json"
    write_profile(file, memory=20e9)
    for speeds in run_ranks(2, _default, [str(file), "assume"]):
        assert speeds == [pytest.approx(20e9), 51e9]


def test_every_rank_has_the_speeds_of_its_machine(tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("slow", "fast", "again")]
    write_profile(files[0], machine="slow", ranks=3, memory=5e9)
    write_profile(files[1], machine="fast", ranks=3, memory=20e9)
    write_profile(files[2], machine="slow", ranks=3, memory=5.5e9)
    found = run_ranks(3, _collective, [str(file) for file in files])
    assert len({plan for plan, _ in found}) == 1
    for _, speeds in found:
        assert speeds[0] == pytest.approx(5e9) and speeds[1] == pytest.approx(20e9)
        assert speeds[2] == speeds[0]
