"""Times training steps on one GPU beside the same models in plain torch; one line of JSON per row.

DLRM with MLPerf v2's layers and bags, also with tables in host memory and a cache of their rows, a GPT step
with the vocabulary's loss, a layer over a graph, jagged operators, and the wrapper around a model of 100
parameters. The floor of a row is the sum of its parts'
least times: bytes that must move over the measured bandwidth of a copy, and products over the measured
rate of a large one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

CUDA = torch.device("cuda", 0)
# MLPerf's DLRM v2: ids of each feature of a sample.
BAGS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


def milliseconds(call, count=10, warm_ups=3):
    """Return the times of single calls, by events, ascending."""
    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)


def print_row(name, times, **more):
    at = lambda share: times[min(len(times) - 1, int(share * len(times)))]  # noqa: E731
    row = {
        "name": name,
        "device": "cuda",
        "median_us": round(1e3 * statistics.median(times), 1),
        "p10_us": round(1e3 * at(0.1), 1),
        "p90_us": round(1e3 * at(0.9), 1),
        "repetitions": len(times),
        **more,
    }
    if row.get("floor_us"):
        row["times_floor"] = round(row["median_us"] / row["floor_us"], 2)
    print(json.dumps(row), flush=True)
    return row["median_us"]


def print_kernels(call):
    """Print where the time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.device_time_total)
    total = sum(row.device_time_total for row in rows)
    print(f"kernels of a step: {total / 3e3:.2f} ms")
    for row in rows[:45]:
        print(f"{row.device_time_total / 3e3:9.3f} ms {row.count // 3:4d} x  {row.key[:150]}")


class Ceilings:
    """Bytes and products a second, measured."""

    def __init__(self):
        source = torch.rand(1 << 29, device=CUDA)
        target = torch.empty_like(source)
        self.bytes_per_us = 2 * source.nbytes / (1e3 * milliseconds(lambda: target.copy_(source))[0])
        a, b = (torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        self.products_per_us = 2 * 8192**3 / (1e3 * statistics.median(milliseconds(lambda: a @ b)))
        print(
            json.dumps(
                {
                    "name": "cuda/ceilings/measured/h200",
                    "copy_gbps": round(self.bytes_per_us / 1e3),
                    "bf16_tflops": round(self.products_per_us / 1e6),
                }
            )
        )

    def us(self, num_bytes=0.0, products=0.0):
        return num_bytes / self.bytes_per_us + products / self.products_per_us


def dense_part():
    """Return MLPerf v2's dense layers: bottom, three low-rank crosses, top."""
    from tessera.models.dlrm import DenseArch, InteractionDCNArch, OverArch
    from tessera.modules.crossnet import LowRankCrossNet

    class Dense(torch.nn.Module):
        def __init__(self):
            super().__init__()
            columns = (len(BAGS) + 1) * 128
            self.bottom = DenseArch(13, [512, 256, 128])
            self.cross = InteractionDCNArch(len(BAGS), LowRankCrossNet(columns, 3, 512))
            self.top = OverArch(columns, [1024, 1024, 512, 256, 1])

        def forward(self, numbers, rows):
            return self.top(self.cross(self.bottom(numbers), rows)).squeeze(-1)

    torch.manual_seed(1)
    return Dense().to(CUDA)


def dense_products(batch):
    columns = (len(BAGS) + 1) * 128
    widths = [(13, 512), (512, 256), (256, 128)]
    widths += [(columns, 512), (512, columns)] * 3
    widths += [(columns, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)]
    return 3 * 2 * batch * sum(a * b for a, b in widths)  # forward, and both gradients


def dlrm(ceilings, batch, rows, compile_peer, profiled=False):
    from tessera import _C
    from tessera.modules.embedding_configs import BoundsCheckMode, DataType, EmbeddingBagConfig
    from tessera.modules.embedding_modules import EmbeddingBagCollection
    from tessera.sparse.jagged_tensor import KeyedJaggedTensor

    shape = f"26x{rows // 1000}kx128_b{batch}"
    generator = torch.Generator(CUDA).manual_seed(3)
    lengths = torch.tensor(BAGS, device=CUDA).repeat_interleave(batch)
    ids = torch.randint(rows, (batch * sum(BAGS),), generator=generator, device=CUDA)
    numbers = torch.rand(batch, 13, generator=generator, device=CUDA)
    labels = torch.randint(2, (batch,), generator=generator, device=CUDA).float()
    names = [f"f{i}" for i in range(len(BAGS))]

    optimizer = _C.embedding.OptimizerOptions()
    optimizer.kind = _C.embedding.OptimizerKind.ROWWISE_ADAGRAD
    optimizer.learning_rate = 0.01
    tables = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(rows, 128, f"t{i}", feature_names=[name], data_type=DataType.BF16)
            for i, name in enumerate(names)
        ],
        device=CUDA,
        bounds_check_mode=BoundsCheckMode.IGNORE,
        optimizer=optimizer,
    )
    features = KeyedJaggedTensor(names, ids, lengths=lengths, stride=batch)
    features.sync()
    dense = dense_part()
    stepper = torch.optim.SGD(dense.parameters(), 0.01, foreach=True)

    def loss_of(model, pooled):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(numbers, pooled)
        return F.binary_cross_entropy_with_logits(logits.float(), labels)

    def step(model):
        pooled = tables(features).values().view(batch, len(BAGS), 128)
        loss_of(model, pooled).backward()
        stepper.step()
        stepper.zero_grad(set_to_none=True)

    begins = torch.cumsum(torch.tensor([0] + [n * batch for n in BAGS]), 0).tolist()
    unique = sum(torch.unique(ids[a:b]).numel() for a, b in itertools.pairwise(begins))
    pooled_bytes = batch * len(BAGS) * 128 * 4
    parts = {
        "lookup": ceilings.us(ids.numel() * (256 + 8) + pooled_bytes),
        "update": ceilings.us(unique * (512 + 64) + pooled_bytes + 8 * ids.numel()),
        "dense": ceilings.us(products=dense_products(batch)),
        "activations": ceilings.us(4 * pooled_bytes),  # in and out of the dense part, and their gradients
    }
    floor = sum(parts.values())
    if profiled:
        print_kernels(lambda: step(torch.compile(dense) if compile_peer else dense))
        return
    ours = milliseconds(lambda: step(dense))
    own_us = print_row(
        f"cuda/dlrm_step/tessera/{shape}",
        ours,
        floor_us=round(floor, 1),
        floors={name: round(us, 1) for name, us in parts.items()},
    )
    if compile_peer:
        fast = torch.compile(dense)
        print_row(
            f"cuda/dlrm_step/tessera_compiled/{shape}",
            milliseconds(lambda: step(fast)),
            floor_us=round(floor, 1),
        )
    # The peer: one nn.EmbeddingBag a table, sparse gradients, plain SGD: less than ours does.
    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(rows, 128, mode="sum", sparse=True, device=CUDA, dtype=torch.bfloat16)
        for _ in BAGS
    )
    offsets = [torch.arange(0, n * batch, n, device=CUDA) for n in BAGS]
    sparse_stepper = torch.optim.SGD(bags.parameters(), 0.01)

    def peer_step(model):
        pooled = torch.stack(
            [
                bag(ids[a:b], offsets[i])
                for i, (bag, a, b) in enumerate(zip(bags, begins, begins[1:], strict=False))
            ],
            1,
        )
        loss_of(model, pooled.float()).backward()
        for each in (stepper, sparse_stepper):
            each.step()
            each.zero_grad(set_to_none=True)

    models = {"torch_eager": dense, **({"torch_compiled": fast} if compile_peer else {})}
    for name, model in models.items():
        times = milliseconds(lambda model=model: peer_step(model), 3, 2)
        us = print_row(f"cuda/dlrm_step/{name}/{shape}", times)
        print(json.dumps({"name": f"cuda/dlrm_speedup/{name}/{shape}", "times": round(us / own_us, 2)}))


class TableModel(torch.nn.Module):
    """DLRM with tables that DistributedModelParallel places."""

    def __init__(self, configs, dense, tables_device):
        from tessera.modules.embedding_modules import EmbeddingBagCollection

        super().__init__()
        self.tables = EmbeddingBagCollection(configs, device=tables_device)
        self.dense = dense

    def forward(self, batch):
        pooled = self.tables(batch.features).values().view(batch.labels.numel(), -1, 128)
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.dense(batch.numbers, pooled)
        return F.binary_cross_entropy_with_logits(logits.float(), batch.labels), logits


@dataclasses.dataclass
class TableBatch:
    features: object
    numbers: torch.Tensor
    labels: torch.Tensor

    def to(self, device, non_blocking=False):
        return TableBatch(*(part.to(device, non_blocking=non_blocking) for part in self.parts()))

    def record_stream(self, stream):
        for part in self.parts():
            part.record_stream(stream)

    def pin_memory(self):
        return TableBatch(*(part.pin_memory() for part in self.parts()))

    def parts(self):
        return self.features, self.numbers, self.labels


def zipf(rows, count, generator, exponent=1.05):
    """Return ids whose frequencies fall as rank^-exponent; ranks are spread over the rows."""
    weights = torch.arange(1, rows + 1, device=CUDA, dtype=torch.float64).pow(-exponent)
    ends = weights.cumsum(0)
    draws = torch.rand(count, generator=generator, device=CUDA, dtype=torch.float64) * ends[-1]
    return torch.searchsorted(ends, draws).clamp(max=rows - 1) * 7919 % rows


def cached(batch, rows=1_000_000, share=0.25):
    """Times DLRM steps whose tables lie in host memory with a cache for a quarter of their rows."""
    import tempfile

    import torch.distributed as dist
    from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from tessera.distributed.model_parallel import DistributedModelParallel, dense_parameters
    from tessera.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from tessera.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
    from tessera.distributed.types import CacheParams, ShardingEnv, ShardingPlan
    from tessera.modules.embedding_configs import BoundsCheckMode, DataType, EmbeddingBagConfig
    from tessera.sparse.jagged_tensor import KeyedJaggedTensor

    shape = f"26x{rows // 1000}kx128_b{batch}_zipf1.05"
    names = [f"f{i}" for i in range(len(BAGS))]
    generator = torch.Generator(CUDA).manual_seed(3)
    lengths = torch.tensor(BAGS).repeat_interleave(batch)
    batches = []
    for _ in range(12):
        ids = torch.cat([zipf(rows, n * batch, generator) for n in BAGS]).cpu()
        features = KeyedJaggedTensor(names, ids, lengths=lengths, stride=batch)
        features.sync()
        batches.append(
            TableBatch(features, torch.rand(batch, 13), torch.randint(2, (batch,)).float()).pin_memory()
        )

    def model_of(kernel):
        configs = [
            EmbeddingBagConfig(rows, 128, f"t{i}", feature_names=[name], data_type=DataType.BF16)
            for i, name in enumerate(names)
        ]
        model = TableModel(configs, dense_part(), torch.device("meta"))
        sharder = EmbeddingBagCollectionSharder(
            {
                "learning_rate": 0.01,
                "optimizer": "rowwise_adagrad",
                "bounds_check_mode": BoundsCheckMode.IGNORE,
            }
        )
        wishes = {config.name: table_wise(0) for config in configs}
        plan = construct_module_sharding_plan(model.tables, wishes, sharder, device_type="cuda")
        for own in plan.values():
            own.compute_kernel = kernel
            own.cache_params = CacheParams(load_factor=share)
        return DistributedModelParallel(
            model,
            ShardingEnv.from_process_group(dist.group.WORLD),
            CUDA,
            ShardingPlan({"tables": plan}),
            [sharder],
        )

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{store.name}", rank=0, world_size=1, device_id=CUDA
        )
        speeds = {}
        for kernel in ("fused", "fused_uvm_caching", "fused_uvm"):
            model = model_of(kernel)
            stepper = torch.optim.SGD(dense_parameters(model), 0.01, foreach=True)
            pipeline = PrefetchTrainPipelineSparseDist(model, stepper, CUDA)
            turns = itertools.cycle(batches)
            for _ in range(14):
                pipeline.progress(turns)
            torch.cuda.synchronize()
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                for _ in range(8):
                    pipeline.progress(turns)
                torch.cuda.synchronize()
                times.append(1e3 * (time.perf_counter() - begin) / 8)
            found = model.module.tables.cache_statistics().values()
            more = {}
            if found:
                more["cached_share"] = round(
                    sum(t.cached_rows for t in found) / sum(t.num_rows for t in found), 3
                )
                lookups = sum(t.num_found + t.num_loaded for t in found)
                more["miss_rate"] = round(sum(t.num_loaded for t in found) / lookups, 4)
                more["loaded_rows_per_step"] = round(
                    sum(t.num_loaded for t in found) / max(t.num_calls for t in found)
                )
            if speeds:
                more["share_of_resident"] = round(speeds["fused"] / statistics.median(times), 3)
            speeds[kernel] = statistics.median(times)
            print_row(f"cuda/cached_tables/{kernel}/{shape}", sorted(times), **more)
            del model, pipeline, stepper
            torch.cuda.empty_cache()
        dist.destroy_process_group()


def gpt(ceilings, tokens=8192, width=2048, vocab=128256, layers=2):
    from tessera import vocab_parallel

    torch.manual_seed(2)
    block = lambda: torch.nn.TransformerEncoderLayer(  # noqa: E731
        width, 16, 4 * width, 0.0, batch_first=True, norm_first=True, device=CUDA, dtype=torch.bfloat16
    )
    body = torch.nn.Sequential(*(block() for _ in range(layers)))
    head = torch.nn.Linear(width, vocab, bias=False, device=CUDA, dtype=torch.bfloat16)
    inputs = torch.randn(4, tokens // 4, width, device=CUDA, dtype=torch.bfloat16)
    labels = torch.randint(vocab, (tokens,), device=CUDA)
    parameters = [*body.parameters(), *head.parameters()]

    def step(loss_of):
        hidden = body(inputs).view(tokens, width)
        loss_of(hidden).backward()
        for parameter in parameters:
            parameter.grad = None

    def ours(hidden):
        return vocab_parallel.linear_cross_entropy(hidden, head.weight, labels)

    def eager(hidden):
        return F.cross_entropy(head(hidden).float(), labels)

    products = 3 * 2 * tokens * (layers * 12 * width * width + vocab * width)
    floor = ceilings.us(products=products)
    shape = f"{tokens}x{width}_v{vocab}"
    for name, loss_of in {
        "tessera": ours,
        "torch_eager": eager,
        "torch_compiled": torch.compile(eager),
    }.items():
        torch.cuda.reset_peak_memory_stats()
        times = milliseconds(lambda loss_of=loss_of: step(loss_of), 5)
        peak = torch.cuda.max_memory_allocated()
        print_row(f"cuda/gpt_step/{name}/{shape}", times, floor_us=round(floor, 1), peak_bytes=peak)


def graph_layer(ceilings, nodes=200_000, edges=4_000_000, width=128):
    from tessera import graph_parallel

    generator = torch.Generator(CUDA).manual_seed(5)
    x = torch.randn(nodes, width, generator=generator, device=CUDA, requires_grad=True)
    layer = torch.nn.Linear(width, width, device=CUDA)
    ends = torch.randint(nodes, (2, edges), generator=generator, device=CUDA)
    ends = ends[:, ends[1].argsort()].contiguous()

    def finish(summed):
        layer(summed).relu().square().mean().backward()
        x.grad = None
        layer.zero_grad(set_to_none=True)

    def plain():
        return torch.zeros_like(x).index_add(0, ends[1], x.index_select(0, ends[0]))

    adjacency = graph_parallel.Adjacency(ends, nodes, nodes)
    ways = {
        "tessera": lambda: graph_parallel.neighbour_sum(x, adjacency),
        "torch_eager": plain,
        "torch_compiled": torch.compile(plain),
    }
    floor = ceilings.us(
        2 * (edges * width * 4 + nodes * width * 4 + 8 * edges), 3 * 2 * nodes * width * width
    )
    for name, way in ways.items():
        times = milliseconds(lambda way=way: finish(way()), 5)
        print_row(f"cuda/graph_layer/{name}/{nodes}n_{edges}e_{width}", times, floor_us=round(floor, 1))


def jagged(ceilings, features=26, batch=65536, mean=8):
    from tessera.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator(CUDA).manual_seed(6)
    lengths = torch.randint(0, 2 * mean + 1, (features * batch,), generator=generator, device=CUDA)
    values = torch.randint(1 << 30, (int(lengths.sum()),), generator=generator, device=CUDA)
    names = [f"f{i}" for i in range(features)]
    order = torch.randperm(features, generator=torch.Generator().manual_seed(1)).tolist()
    kjt = KeyedJaggedTensor(names, values, lengths=lengths, stride=batch)
    kjt.sync()
    floor = ceilings.us(2 * (values.nbytes + lengths.nbytes))
    begins = [0, *torch.cumsum(torch.tensor(kjt.length_per_key()), 0).tolist()]

    def plain():
        parts = [values[begins[i] : begins[i + 1]] for i in order]
        return torch.cat(parts), lengths.view(features, batch)[order].reshape(-1)

    shape = f"{features}x{batch}x{mean}"
    print_row(
        f"cuda/jagged_permute/tessera/{shape}",
        milliseconds(lambda: kjt.permute(order)),
        floor_us=round(floor, 1),
    )
    print_row(f"cuda/jagged_permute/torch_eager/{shape}", milliseconds(plain), floor_us=round(floor, 1))


def wrapper():
    """What the wrapper adds to a model of 100 parameter tensors on one rank."""
    import tempfile

    import torch.distributed as dist
    from tessera.nn.parallel import DistributedDataParallel
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group(
            "nccl", init_method=f"file://{store.name}", rank=0, world_size=1, device_id=CUDA
        )
        make = lambda: torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(50))).to(CUDA)  # noqa: E731
        ways = {
            "alone": make(),
            "tessera": DistributedDataParallel(make(), device_ids=[0], gradient_as_bucket_view=True),
            "torch": TorchDDP(make(), device_ids=[0], gradient_as_bucket_view=True),
        }
        x = torch.randn(1, 16, device=CUDA)
        times = {name: [] for name in ways}
        for turn in range(220):
            for name, model in ways.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                model(x).sum().backward()
                torch.cuda.synchronize()
                if turn >= 20:
                    times[name].append(1e3 * (time.perf_counter() - begin))
        alone = statistics.median(times["alone"])
        for name, own in times.items():
            print_row(
                f"cuda/wrapper_step/{name}/100_parameters",
                sorted(own),
                added_us=round(1e3 * (statistics.median(own) - alone), 1),
            )
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="cached, dlrm, gpt, graph, jagged, wrapper")
    parser.add_argument("--batch", type=int, default=65536)
    parser.add_argument("--cached-batch", type=int, default=32768, help="of the cached tables")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument(
        "--no-compile", action="store_true", help="without torch.compile of DLRM's dense part"
    )
    parser.add_argument("--profile", action="store_true", help="DLRM: print its kernels instead of rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("steps_bench: there is no GPU here.")
    ceilings = Ceilings()
    parts = {
        "jagged": lambda: jagged(ceilings),
        "graph": lambda: graph_layer(ceilings),
        "gpt": lambda: gpt(ceilings),
        "dlrm": lambda: dlrm(ceilings, options.batch, options.rows, not options.no_compile, options.profile),
        "cached": lambda: cached(options.cached_batch),
        "wrapper": wrapper,
    }
    for name, part in parts.items():
        if options.only and name not in options.only:
            continue
        try:
            part()
        except Exception as error:  # the other rows are still worth having
            print(
                json.dumps({"name": f"cuda/{name}/failed", "error": f"{type(error).__name__}: {error}"[:500]})
            )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
