"""Checkpoints of state dicts: whole or absent, loaded at any world size.

A state dict is what torch's modules and optimizers give: dicts and lists of tensors and plain values,
nested as one likes. Tensors are the same on every rank unless they are a :class:`Shard`.

>>> import tempfile, torch
>>> from tessera import checkpoint
>>> root = tempfile.mkdtemp()
>>> model = torch.nn.Linear(2, 3)
>>> report = checkpoint.save(root, 10, {"model": model.state_dict(), "epoch": 4})
>>> report.step
10
>>> state = {"model": torch.nn.Linear(2, 3).state_dict(), "epoch": 0}
>>> checkpoint.load(root, state).step
10
>>> state["epoch"], torch.equal(state["model"]["weight"], model.weight)
(4, True)
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tessera import _C

if not hasattr(_C, "checkpoint_save"):
    raise ImportError("tessera.checkpoint: this build has no checkpoints; nlohmann-json was missing.")

from tessera._C import CheckpointReader, LoadReport, SaveReport, TableShard

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "CheckpointReader",
    "HookState",
    "LoadReport",
    "SaveReport",
    "Shard",
    "TableShard",
    "Tables",
    "fused_state",
    "import_plain",
    "load",
    "open_checkpoint",
    "read",
    "save",
    "steps",
]

# The plain values of a state dict, by path, as JSON text.
_PLAIN = "python.state_dict"
# What row optimizers keep.
_SLOTS = ("momentum1", "momentum2")


class CheckpointError(RuntimeError):
    """Tell what is wrong with a checkpoint, naming file and cause.

    ``kind`` is ``"missing"``, ``"corrupt"``, ``"write"``, ``"invalid"`` or ``"read"`` (the disk or the
    system refused, also when tried again; nothing is known to be wrong with the checkpoint).
    """

    def __init__(self, message: str = "", kind: str = "invalid"):
        super().__init__(message)
        self.kind = kind

    def __reduce__(self):
        return type(self), (str(self), self.kind)


@dataclass
class Shard:
    """The part of a tensor that this rank holds.

    ``offsets`` say where ``tensor`` begins in the whole, whose shape is ``shape``. A rank that holds
    several parts gives further ones in ``more`` as (offsets, tensor); one that holds nothing gives
    an empty tensor. ``touched_rows`` (int64, ascending) lets a delta write only these rows.
    """

    tensor: torch.Tensor
    shape: Sequence[int]
    offsets: Sequence[int]
    touched_rows: torch.Tensor | None = None
    more: list[tuple[Sequence[int], torch.Tensor]] = field(default_factory=list)


@dataclass
class Tables:
    """Parts of embedding tables with the state of their optimizer, as a value in a state dict.

    Saved under any way of cutting, they load under any other. `shards` are `TableShard`; several may be
    of one table. `optimizer` is the row optimizer that steps them, or one for each table's name. With
    `has_weights` false only the state is saved: the weights are in the state dict already.
    """

    shards: list[TableShard]
    optimizer: _C.embedding.RowOptimizer | dict[str, _C.embedding.RowOptimizer] | None = None
    has_weights: bool = True

    def _optimizer_of(self, shard: TableShard) -> _C.embedding.RowOptimizer | None:
        return self.optimizer.get(shard.name) if isinstance(self.optimizer, dict) else self.optimizer

    def _values(self) -> dict[str, Any]:
        values = {}
        for shard in self.shards:
            optimizer = self._optimizer_of(shard)
            if optimizer is not None:
                values[f"{shard.name}.step"] = optimizer.num_steps
                values[f"{shard.name}.lr"] = optimizer.options.learning_rate
        return values

    def _restore(self, prefix: str, values: dict[str, Any]) -> None:
        done: list[_C.embedding.RowOptimizer] = []
        for shard in self.shards:
            optimizer = self._optimizer_of(shard)
            if optimizer is None or any(optimizer is other for other in done):
                continue
            done.append(optimizer)
            name = f"{prefix}{shard.name}"
            if f"{name}.lr" in values:
                optimizer.set_learning_rate(values[f"{name}.lr"])
            if f"{name}.step" in values:
                state = optimizer.state_dict()
                state["step"] = torch.tensor(values[f"{name}.step"])
                optimizer.load_state_dict(state)


def fused_state(module: torch.nn.Module) -> dict[str, Tables]:
    """Return the state of the optimizers that run in the backward of the module's embedding collections.

    By path of the collection, sharded or not; put it into the state dict beside `module.state_dict()`,
    which has the weights. It loads into any other sharding. Rows that `track_rows` has seen stepped are
    all that a delta writes.
    """
    found = {}
    for path, part in module.named_modules():
        if hasattr(part, "_checkpoint_tables"):
            found[path] = Tables(*part._checkpoint_tables(), has_weights=False)
            continue
        tables = getattr(part, "embedding_bags", None) or getattr(part, "embeddings", None)
        if tables is None or not hasattr(part, "fused_optimizer"):
            continue
        optimizer = part.fused_optimizer()
        if optimizer is None:
            continue
        state = optimizer.state_dict()
        shards = []
        for name, table in tables.items():
            weight = table.weight.detach()
            kept = {slot: state[f"{name}.{slot}"] for slot in _SLOTS if f"{name}.{slot}" in state}
            rows = optimizer.stepped_rows(name)
            shards.append(TableShard(name, *weight.shape, 0, 0, weight, kept, True, rows))
        found[path] = Tables(shards, optimizer, has_weights=False)
    return found


@dataclass
class HookState:
    """What the communication hook of a `tessera.nn.parallel.DistributedDataParallel` keeps.

    A value in a state dict: error feedback, factors, and the state of an optimizer in backward, by
    parameter name. Loads at any number of ranks.
    """

    model: Any

    def _hook(self) -> tuple[_C.CommHook, int, int] | None:
        hook = self.model._replica.comm_hook()
        group = self.model.process_group
        return None if hook is None else (hook, group.rank(), group.size())


def _shard_of_dtensor(tensor) -> Shard:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Shard(tensor.to_local(), tuple(tensor.shape), tuple(offsets))


def _shard_of_sharded_tensor(value: ShardedTensor) -> Shard:
    parts = [(tuple(part.metadata.shard_offsets), part.tensor) for part in value.local_shards()]
    metadata = value.metadata()  # the tensor's own size and dtype warn of its deprecation
    shape, dtype = tuple(metadata.size), metadata.tensor_properties.dtype
    first = parts[0] if parts else ((0,) * len(shape), torch.empty((0,) * len(shape), dtype=dtype))
    return Shard(first[1], shape, first[0], more=parts[1:])


def _as_shard(value: Any) -> Shard | None:
    if isinstance(value, Shard):
        return value
    if isinstance(value, ShardedTensor):
        return _shard_of_sharded_tensor(value)
    placements = getattr(value, "placements", ()) if isinstance(value, torch.Tensor) else ()
    return _shard_of_dtensor(value) if any(placement.is_shard() for placement in placements) else None


def _children(value: Any):
    """Yield (key as text, key, child) of a container; None if it is not one."""
    if isinstance(value, dict):
        return [(_key_text(key), key, child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(str(place), place, child) for place, child in enumerate(value)]
    return None


def _key_text(key: Any) -> str:
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise TypeError(f"checkpoint: a state dict has the key {key!r}; keys are strings or integers.")
    return str(key)


def _flatten(state: Any, prefix: str, tensors: dict[str, Any], plain: dict[str, Any]) -> None:
    """Collect tensors by dotted name, and describe everything else in `plain`."""
    if prefix in plain:
        both = isinstance(state, torch.Tensor | Shard) and plain[prefix] == ["tensor"]
        what = "tensors" if both else "parts"
        raise ValueError(f"checkpoint: two {what} of the state dict are called '{prefix}'.")
    children = _children(state)
    if children is not None:
        keys = [key for _, key, _ in children]
        kind = "dict" if isinstance(state, dict) else type(state).__name__
        if not isinstance(state, dict | list | tuple) or kind not in ("dict", "list", "tuple"):
            kind = "tuple"  # a named one
        plain[prefix] = [kind, keys if kind == "dict" else len(keys)]
        for text, _, child in children:
            _flatten(child, f"{prefix}.{text}" if prefix else text, tensors, plain)
        return
    if isinstance(state, Tables | HookState):
        tensors[prefix] = state
        plain[prefix] = ["part"]
        return
    if isinstance(state, torch.Tensor | Shard):
        tensors[prefix] = state
        plain[prefix] = ["tensor"]
        return
    if state is None or isinstance(state, bool | int | float | str):
        plain[prefix] = ["value", state]
        return
    raise TypeError(
        f"checkpoint: '{prefix}' is a {type(state).__name__}; tensors, numbers, strings, None, and dicts and "
        "lists of them can be saved."
    )


def _placed(tensors: dict[str, Any]) -> list[tuple]:
    placed = []
    for name, value in tensors.items():
        shard = _as_shard(value)
        if shard is None:
            tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
            placed.append((name, list(tensor.shape), [([0] * tensor.dim(), tensor, None)], True, -1))
            continue
        pieces = [(list(shard.offsets), shard.tensor, shard.touched_rows)]
        pieces += [(list(offsets), tensor, None) for offsets, tensor in shard.more]
        placed.append((name, list(shard.shape), pieces, False, -1))
    return placed


def _described(state: Any) -> tuple[_C.CheckpointLeaves, str, dict[str, Tables]]:
    found: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    _flatten(state, "", found, plain)
    tables = {f"{name}.": part for name, part in found.items() if isinstance(part, Tables)}
    hooks = {f"{name}.": part._hook() for name, part in found.items() if isinstance(part, HookState)}
    tensors = {name: part for name, part in found.items() if not isinstance(part, Tables | HookState)}
    leaves = _C.CheckpointLeaves(
        _placed(tensors),
        [
            (prefix if part.has_weights else None, prefix, part.shards, part._values())
            for prefix, part in tables.items()
        ],
        [(prefix, *hook) for prefix, hook in hooks.items() if hook is not None],
    )
    return leaves, json.dumps(list(plain.items())), tables


def _build(plain: dict[str, Any], prefix: str, tensor_of, used: set[str]) -> Any:
    if prefix not in plain or prefix in used:
        raise ValueError(f"'{prefix}' is {'there twice' if prefix in used else 'missing'}")
    used.add(prefix)
    entry = plain[prefix]
    if entry[0] == "value":
        return entry[1]
    if entry[0] == "tensor":
        return tensor_of(prefix)
    if entry[0] == "part":
        return None

    def child(key):
        return _build(plain, f"{prefix}.{key}" if prefix else str(key), tensor_of, used)

    if entry[0] == "dict":
        return {key: child(key) for key in entry[1]}
    items = [child(place) for place in range(entry[1])]
    return items if entry[0] == "list" else tuple(items)


def _fill_plain(state: Any, prefix: str, plain: dict[str, Any]) -> None:
    """Put the plain values that were saved into `state`, where they are."""
    for text, key, child in _children(state) or []:
        name = f"{prefix}.{text}" if prefix else text
        if _children(child) is not None:
            _fill_plain(child, name, plain)
        elif not isinstance(state, tuple) and plain.get(name, [""])[0] == "value":
            state[key] = plain[name][1]


def _is_entry(entry: Any) -> bool:
    match entry:
        case ["tensor"] | ["part"]:
            return True
        case ["value", value]:
            return value is None or isinstance(value, bool | int | float | str)
        case ["dict", list() as keys]:
            return all(isinstance(key, str | int) and not isinstance(key, bool) for key in keys)
        case ["list" | "tuple", int() as size]:
            return not isinstance(size, bool)
    return False


def _plain_of(values: dict[str, Any], folder: str) -> dict[str, Any]:
    if _PLAIN not in values:
        raise CheckpointError(f"{folder}: was not saved from a state dict.", "missing")
    plain: dict[str, Any] = {}
    try:
        for path, entry in json.loads(values[_PLAIN]):
            if not isinstance(path, str) or path in plain or not _is_entry(entry):
                raise ValueError(f"'{path}' is there twice or is no part of a state dict")
            plain[path] = entry
    except (TypeError, ValueError, RecursionError) as error:
        raise _not_a_state_dict(folder, error) from None
    return plain


def _not_a_state_dict(folder: str, error: Exception) -> CheckpointError:
    text = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
    return CheckpointError(f"{folder}: its state dict makes no sense: {text}.", "corrupt")


# What managed collision saves of ids when there is some, beside a table's sorted ids.
_ID_LISTS = ("_tessera_history_ids", "_tessera_history_iter", "_tessera_num_ids")
_SORTED_IDS = "_mch_sorted_raw_ids"


def _id_lists(state: Any, prefix: str = ""):
    """Yield dict, key and dotted name of the lists that tables of managed collision have or may have."""
    if isinstance(state, dict):
        for base in [key.removesuffix(_SORTED_IDS) for key in state if str(key).endswith(_SORTED_IDS)]:
            for name in _ID_LISTS:
                key = base + name
                yield state, key, f"{prefix}.{key}" if prefix else key
    for text, _, child in _children(state) or []:
        yield from _id_lists(child, f"{prefix}.{text}" if prefix else text)


def _put_lists_aside(state: Any) -> list[tuple[dict, str, torch.Tensor | None]]:
    return [(holder, key, holder.pop(key, None)) for holder, key, _ in list(_id_lists(state))]


def _tell_changed(holder: dict) -> None:
    """Let modules see that their sorted ids are others now: memory is read into without torch's knowledge."""
    for key, value in holder.items():
        if str(key).endswith(_SORTED_IDS):
            parts = value.local_shards() if isinstance(value, ShardedTensor) else [value]
            for part in parts:
                torch.autograd.graph.increment_version(getattr(part, "tensor", part))


def _read_lists(state: Any, reader: CheckpointReader) -> list[tuple[dict, str, torch.Tensor]]:
    saved = set(reader.names())
    return [(holder, key, reader.read(name)) for holder, key, name in _id_lists(state) if name in saved]


def save(
    root: str | os.PathLike,
    step: int,
    state_dict: Any,
    group: ProcessGroup | None = None,
    *,
    rank_values: dict[str, bool | int | float | str] | None = None,
    keep: int = 0,
    plan: str = "",
    base: int | None = None,
    replace: bool = False,
) -> SaveReport:
    """Save a state dict as step `step` under `root`, and return when it is safely on the disk.

    Collective over `group`; without one, this process alone. Either the whole checkpoint appears or
    nothing changes; a full disk or a failed write raises CheckpointError on every rank, and training
    may go on. `rank_values` are this rank's own, such as its place in the data. The `keep`
    checkpoints committed last stay (0: all), this one always. With `base`, shards that know
    their touched rows write only these. A step that another job saved, and that this one has not loaded
    from `root` since, is an error; `replace` replaces it.
    """
    leaves, plain, _ = _described(state_dict)
    options = _C.SaveOptions(keep=keep, plan=plan, base=base, replaces=replace)
    return _C.checkpoint_save(
        os.fspath(root), step, leaves, {_PLAIN: plain}, rank_values or {}, group, options
    )


def load(
    root: str | os.PathLike,
    state_dict: Any,
    group: ProcessGroup | None = None,
    *,
    step: int | None = None,
) -> LoadReport:
    """Load the newest whole checkpoint into the tensors of `state_dict`, and its plain values.

    Collective over `group`, whose size and shards may differ from those that saved; all ranks load
    the same checkpoint. A newer one that is damaged is named in a warning. Raises CheckpointError if
    there is none, or if a tensor is missing or has another shape or type. Ids of managed collision that
    wait, whose number differs, take the place of those in `state_dict`: load it into the module then.
    """
    put_aside = _put_lists_aside(state_dict)
    try:
        leaves, _, tables = _described(state_dict)
        report = _C.checkpoint_load(os.fspath(root), leaves, group, step)
        lists = _read_lists(state_dict, CheckpointReader(os.fspath(root), report.step)) if put_aside else []
    except BaseException:
        for holder, key, value in put_aside:
            holder.update({} if value is None else {key: value})
        raise
    for holder, key, value in lists:
        holder[key] = value
    for holder in (holder for holder, key, _ in put_aside if key.endswith(_ID_LISTS[0])):
        _tell_changed(holder)
    for prefix, part in tables.items():
        part._restore(prefix, report.values)
    if _PLAIN in report.values:
        _fill_plain(state_dict, "", _plain_of(report.values, report.folder))
    return report


def read(root: str | os.PathLike, step: int | None = None) -> Any:
    """Read a whole state dict into memory, e.g. for an optimizer that has no state yet.

    Not collective. Takes the newest checkpoint that opens, or `step`. Tables and hooks are None; load
    them into objects.
    """
    reader = open_checkpoint(root, step)
    plain = _plain_of(reader.values, reader.folder)
    try:
        return _build(plain, "", reader.read, set())
    except (ValueError, RecursionError) as error:
        raise _not_a_state_dict(reader.folder, error) from None


def open_checkpoint(root: str | os.PathLike, step: int | None = None) -> CheckpointReader:
    """Open the newest checkpoint that opens, or that of `step`, to read single tensors."""
    if step is not None:
        return CheckpointReader(os.fspath(root), step)
    reader, problems = CheckpointReader.newest(os.fspath(root))
    if reader is not None:
        return reader
    text = " ".join([f"checkpoint: there is no whole checkpoint in {os.fspath(root)}.", *problems])
    raise CheckpointError(text, "missing")


def steps(root: str | os.PathLike) -> list[int]:
    """Return the steps of the checkpoints in `root`, highest first."""
    return _C.checkpoint_steps(os.fspath(root))


def import_plain(
    path: str | os.PathLike, root: str | os.PathLike, step: int = 0, *, replace: bool = False
) -> None:
    """Save plain safetensors files (one, or a folder of them) as a checkpoint; `replace` as for `save`."""
    _C.checkpoint_import(os.fspath(path), os.fspath(root), step, replace)


class AsyncSaver:
    """Save beside training: the caller waits only for a copy of its own tensors.

    Collective over `group`. The memory of the copy is kept for the next save. An error of the writer
    is raised by the next :meth:`save`, :meth:`check` or :meth:`wait`.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        group: ProcessGroup | None = None,
        *,
        keep: int = 0,
        plan: str = "",
        replace: bool = False,
    ):
        options = _C.SaveOptions(keep=keep, plan=plan, replaces=replace)
        self._saver = _C.AsyncSaver(os.fspath(root), group, options)

    def save(
        self,
        step: int,
        state_dict: Any,
        *,
        rank_values: dict[str, bool | int | float | str] | None = None,
        base: int | None = None,
    ) -> None:
        """Copy the state dict and return; waits for the save before, if it is still running."""
        leaves, plain, _ = _described(state_dict)
        self._saver.save(step, leaves, {_PLAIN: plain}, rank_values or {}, base)

    def check(self) -> None:
        """Raise what the last save raised, if it has failed by now. Call it every step."""
        self._saver.check()

    def wait(self) -> SaveReport | None:
        """Wait for the save in progress and raise what it raised."""
        return self._saver.wait()

    @property
    def is_saving(self) -> bool:
        return self._saver.is_saving()
