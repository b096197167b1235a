"""Runs the Python of the pages on two ranks, each piece among what its page takes for granted.

`tessera run -n 2 page_snippets.py`; test_page_snippets.py starts it, and asks that every piece has a scene.
A scene gives the names that a piece uses, and may put numbers into it that fit two ranks.
"""

from __future__ import annotations

import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Pages whose Python is a program that another test runs: tutorials, recipes, an example.
PROGRAMS = ("tutorial_", "recipes", "train_your_own")


def pieces(page: str) -> list[str]:
    """The Python of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def pages() -> list[str]:
    """The pages that have some."""
    names = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    names = [name for name in names if not name.removeprefix("docs/").startswith(PROGRAMS)]
    return [name for name in names if pieces(name)]


def tables(*names: str):
    from tessera.modules.embedding_configs import EmbeddingBagConfig
    from tessera.modules.embedding_modules import EmbeddingBagCollection

    configs = [EmbeddingBagConfig(1000, 16, name, feature_names=[name.removesuffix("s")]) for name in names]
    return EmbeddingBagCollection(configs)


def bags(*features: str):
    import torch
    from tessera.sparse.jagged_tensor import KeyedJaggedTensor

    lengths = torch.ones(4 * len(features), dtype=torch.int32)
    return KeyedJaggedTensor.from_lengths_sync(list(features), torch.arange(4 * len(features)), lengths)


def everything() -> dict:
    """What pages name without importing it: modules that the text around names."""
    import torch
    import torch.distributed as dist
    from tessera import distributed, modules  # noqa: F401
    from tessera.distributed import (
        embedding,
        embeddingbag,
        fp_embeddingbag,
        mc_embeddingbag,
        model_parallel,
        sharding_plan,
        train_pipeline,
        types,
    )
    from tessera.modules import (
        embedding_configs,
        embedding_modules,
        feature_processor_,
        fp_embedding_modules,
        mc_embedding_modules,
        mc_modules,
    )

    names: dict = {"torch": torch, "dist": dist}
    for module in (
        embedding, embeddingbag, fp_embeddingbag, mc_embeddingbag, sharding_plan, model_parallel,
        train_pipeline, types, embedding_configs, embedding_modules, feature_processor_, fp_embedding_modules,
        mc_embedding_modules, mc_modules,
    ):  # fmt: skip
        names |= {name: value for name, value in vars(module).items() if name[0] != "_"}
    return names


def checkpoints(folder: str) -> dict:
    import torch
    import torch.distributed as dist
    from tessera.nn.parallel import DistributedDataParallel

    model = torch.nn.Linear(2, 2)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    state = {"model": model.state_dict()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {
        "step": 1, "model": model, "optimizer": optimizer, "state": state, "ddp": ddp, "shards": lambda: [],
        "group": dist.group.WORLD, "folder": folder,
    }  # fmt: skip


def main() -> None:
    """One page after the other."""
    import torch
    import torch.distributed as dist
    from tessera import _C

    done = []

    def play(page: str, number: int, names: dict | None = None, **numbers: str) -> dict:
        code = pieces(page)[number]
        for old, new in numbers.pop("replace", {}).items():
            assert old in code, (page, old)
            code = code.replace(old, new)
        scene = {} if names is None else names
        exec(compile(code, f"{page}[{number}]", "exec"), scene)
        done.append((page, number))
        return scene

    torch.manual_seed(1)
    play("README.md", 0)
    dist.destroy_process_group()
    named = play("docs/python.md", 0, {"tensor": torch.ones(3)})
    assert named["tensor"].tolist() == [2.0, 2.0, 2.0]
    dist.destroy_process_group()
    named = play("docs/python.md", 1, named)
    assert named["world"].size() == 2
    play("docs/python.md", 2, named, replace={'"vocab": 4': '"vocab": 1'})
    play("docs/python.md", 3, {**named, "train": lambda: None})

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        names = checkpoints(folder[0])
        play(
            "docs/checkpoint.md",
            0,
            names,
            replace={'"runs/a"': "folder", "state, group": "dict(state), group"},
        )
        dist.barrier()

    names = everything()
    Config, Ids = names["EmbeddingBagConfig"], names["MCHManagedCollisionModule"]
    user, item = (Config(1000, 16, name, feature_names=[name]) for name in ("user", "item"))
    names["fused_params"] = {"optimizer": "exact_adagrad", "learning_rate": 0.05}
    play("docs/collision.md", 0, names | {"tables": [user], "features": bags("user")})
    two = {
        table.name: Ids(1000, torch.device("cpu"), names["LFU_EvictionPolicy"](), eviction_interval=10)
        for table in (user, item)
    }
    names["module"] = names["ManagedCollisionEmbeddingBagCollection"](
        names["EmbeddingBagCollection"]([user, item]),
        names["ManagedCollisionCollection"](two, [user, item]),
        return_remapped_features=True,
    )
    play("docs/collision.md", 1, names | {"features": bags("user", "item")})
    names["options"] = _C.embedding.OptimizerOptions()
    grown = play("docs/collision.md", 2, names)
    play("docs/collision.md", 3, grown | {"features": bags("user")})

    net = torch.nn.Linear(4, 4)
    model = play("docs/data_parallel.md", 0, {"net": net})["model"]
    play("docs/comm_hooks.md", 0, {"model": model})
    pooled = play("docs/embedding.md", 0, {"batch": bags("user", "seen", "bought")})["pooled"]
    assert pooled.values().shape == (4, 64 + 17 + 17)
    names["device"] = torch.device("cpu")
    clicked = Config(1000, 16, "items", feature_names=["clicks"])
    names["ebc"] = names["EmbeddingBagCollection"]([clicked], is_weighted=True)
    play("docs/sharding.md", 0, names)
    from tessera.modules.embedding_configs import EmbeddingConfig
    from tessera.modules.embedding_modules import EmbeddingCollection

    configs = [EmbeddingConfig(100, 8, name, feature_names=[name[:-1]]) for name in ("users", "items")]
    names |= {"ec": EmbeddingCollection(configs), "features": bags("user", "item")}
    play("docs/sharding.md", 1, names)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ebc = tables("users", "items")
            self.top = torch.nn.Linear(32, 1)

        def forward(self, batch):
            logits = self.top(self.ebc(batch).values())
            return logits.sum(), logits

    names["model"] = Model()
    dmp = play("docs/sharding.md", 2, names)["dmp"]
    names |= {
        "ebc": tables("users"), "fused_params": {"learning_rate": 0.1}, "features": bags("user"),
        "env": names["ShardingEnv"].from_process_group(dist.group.WORLD),
    }  # fmt: skip
    sharder = names["EmbeddingBagCollectionSharder"](names["fused_params"])
    wishes = {"users": names["row_wise"]()}
    names["plan"] = names["construct_module_sharding_plan"](names["ebc"], wishes, sharder)
    play("docs/sharding.md", 3, names)

    names |= {"model": dmp, "batches": iter([bags("user", "item")] * 3)}
    names["optimizer"] = torch.optim.SGD(dmp.parameters(), 0.1)
    play("docs/pipeline.md", 0, names)
    play("docs/pipeline.md", 1, names)

    model = torch.nn.Module()
    model.sparse = tables("users", "items")
    play("docs/planner.md", 0, {"model": model, "dist": dist})

    model = torch.nn.Module()
    model.tables = names["EmbeddingBagCollection"]([user, item])
    sharded = play("docs/serving.md", 0, {"model": model, "torch": torch})["sharded"]
    assert sharded is not None
    logits = torch.randn(5, 8, requires_grad=True)
    labels = torch.randint(16, (5,), generator=torch.Generator().manual_seed(1))
    group = dist.group.WORLD
    play("docs/vocab_parallel.md", 0, {"local_logits": logits, "labels": labels, "group": group})[
        "loss"
    ].mean().backward()
    with tempfile.TemporaryDirectory() as own:
        (pathlib.Path(own) / "metrics.jsonl").write_text(
            '{"kind": "run", "workload": "dlrm", "steps": 1}\n{"kind": "step", "step": 1, "loss": 0.5}\n'
            '{"kind": "end", "step": 1, "status": "finished"}\n'
        )
        play("docs/report.md", 0, replace={'"runs/shop"': repr(own)})
    print("done", *sorted(done), sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
