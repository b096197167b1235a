"""Tables of ids that grow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tessera import _C
from tessera.modules._mc_base import LARGEST, Features, ManagedCollisionModule, validate, with_values

_engine = _C.collision
_FIRST_ROW = 1  # row 0 is for ids without one


def _admission(text: str, seed: int) -> _C.collision.Admission:
    """Read `always`, `freq:N` or `prob:P`."""
    admission = _engine.Admission()
    admission.seed = seed
    kind, _, number = text.partition(":")
    try:
        if kind == "freq":
            admission.kind, admission.sightings = _engine.AdmissionKind.FREQUENCY, int(number)
        elif kind == "prob":
            admission.kind, admission.probability = _engine.AdmissionKind.PROBABILITY, float(number)
        elif text != "always":
            raise ValueError
    except ValueError:
        raise ValueError(
            f"collision.growing: admission is '{text}'; use 'always', 'freq:N' or 'prob:P'."
        ) from None
    return admission


def _eviction(text: str, decay_exponent: float, interval: int) -> _C.collision.Eviction:
    """Read `none`, `lfu`, `lru`, `distance-lfu` or `ttl:N`."""
    eviction = _engine.Eviction()
    eviction.decay_exponent = decay_exponent
    eviction.interval = interval
    kinds = {
        "none": "NONE",
        "lfu": "LFU",
        "lru": "LRU",
        "distance-lfu": "DISTANCE_LFU",
        "ttl": "TIME_TO_LIVE",
    }
    kind, _, number = text.partition(":")
    if kind not in kinds or (kind == "ttl") != number.isdigit():
        raise ValueError(
            f"collision.growing: eviction is '{text}'; use 'none', 'lfu', 'lru', 'distance-lfu' or 'ttl:N'."
        )
    eviction.kind = getattr(_engine.EvictionKind, kinds[kind])
    if number:
        eviction.time_to_live = int(number)
    return eviction


def _together(features: Features) -> torch.Tensor:
    given = [feature.values() for feature in features.values()]
    return given[0] if len(given) == 1 else torch.cat(given)


def _scratch_rows(values: torch.Tensor, rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Let unknown ids read rows from `first` on, which hold what their own would begin with.

    Returns these ids and their rows.
    """
    is_unknown = rows == 0
    unknown, places = torch.unique(values[is_unknown], return_inverse=True)
    rows[is_unknown] = places + first
    return unknown, torch.arange(unknown.numel()) + first


def undo_plans(modules: Iterable[nn.Module]) -> None:
    """Take back what growing tables among the modules have planned."""
    for module in modules:
        if isinstance(module, GrowingManagedCollisionModule):
            module.undo_plan()


def prepare_states(
    modules: Iterable[tuple[str, nn.Module]], state: Mapping[str, Any], prefix: str
) -> dict[str, int | None]:
    """Check the state of the growing tables among the modules, by name, before anything changes.

    Returns how many ids each has in it; None: it is not there.
    """
    growing = [(name, one) for name, one in modules if isinstance(one, GrowingManagedCollisionModule)]
    try:
        return {name: module.prepare_state(state, f"{prefix}{name}.") for name, module in growing}
    except BaseException:
        for _, module in growing:
            module.forget_prepared()
        raise


class _Plan(NamedTuple):
    """What the next batch reads and changes."""

    rows: torch.Tensor
    changes: tuple | None  # None in eval mode
    scratch: tuple[torch.Tensor, torch.Tensor]  # ids that read what their row would begin with, and where
    num_rows: int  # of ids


class GrowingManagedCollisionModule(ManagedCollisionModule):
    """Give every id a row of its own; the table grows with them.

    `capacity` is the most ids, None for no limit; each of 1024 buckets of ids has its part of it, rounded
    up. `admission` says which unknown ids get a row: `always`, `freq:N` from the n-th sighting on, `prob:P`
    each sighting with a probability. `eviction` says which go when a bucket is full: `none` (then
    `when_full`: `error` or `refuse`), `lfu`, `lru`, `distance-lfu`, or `ttl:N`, those not seen for N calls.

    Row 0 is for ids without a row. `default` says what they read: `row`, a row that trains; `zero`;
    `init`, what their row would begin with. A row's first values depend on `seed`, the table's name and the
    id alone. With `track_removed`, ids that lose their row are remembered until `take_removed_ids`.

    >>> from tessera.sparse.jagged_tensor import JaggedTensor
    >>> ids = GrowingManagedCollisionModule()
    >>> batch = {"t": JaggedTensor(torch.tensor([-5, 2**62, -5]), lengths=torch.tensor([3]))}
    >>> ids(batch)["t"].values(), len(ids)
    (tensor([1, 2, 1]), 2)
    """

    def __init__(
        self,
        capacity: int | None = None,
        device: torch.device | None = None,
        *,
        admission: str = "always",
        eviction: str = "none",
        default: str = "row",
        when_full: str = "error",
        decay_exponent: float = 1.0,
        eviction_interval: int = 1,
        protect: Sequence[int] = (),
        seed: int = 0,
        name: str = "",
        track_removed: bool = False,
    ) -> None:
        super().__init__(device or torch.device("cpu"), [], skip_state_validation=True)
        if capacity is not None and capacity < 1:
            raise ValueError(
                f"collision.growing: a capacity of {capacity} cannot be. Give at least 1, or None."
            )
        if default not in ("row", "zero", "init"):
            raise ValueError(f"collision.growing: default is '{default}'; use 'row', 'zero' or 'init'.")
        if when_full not in ("error", "refuse"):
            raise ValueError(f"collision.growing: when_full is '{when_full}'; use 'error' or 'refuse'.")
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64))
        self.register_load_state_dict_post_hook(validate)
        self._capacity = capacity
        self._default = default
        self._seed = seed
        self._track_removed = track_removed
        self._settings = (admission, eviction, when_full, decay_exponent, eviction_interval, list(protect))
        self._evicted: list[torch.Tensor] = []
        self.begin(name)

    def begin(self, name: str) -> None:
        """Take the name of the table; before the first ids."""
        self._name = name
        # Tables of one seed begin with different rows.
        digest = hashlib.sha256(name.encode()).digest()
        self._row_seed = self._seed ^ int.from_bytes(digest[:8], "little") if name else self._seed
        self._ids = self._new_table()
        self._forget_changes()

    def _table_options(self, seed: int | None = None) -> _C.collision.IdTableOptions:
        admission, eviction, when_full, decay_exponent, interval, protect = self._settings
        options = _engine.IdTableOptions()
        options.name = self._name or "ids"
        options.capacity = self._capacity or 0
        options.admission = _admission(admission, self._seed if seed is None else seed)
        options.eviction = _eviction(eviction, decay_exponent, interval)
        options.refuse_when_full = when_full == "refuse"
        options.protect = protect
        return options

    def _new_table(self) -> _C.collision.IdTable:
        return _engine.IdTable(self._table_options())

    def _forget_changes(self) -> None:
        nothing = torch.empty(0, dtype=torch.int64)
        self._fresh = (nothing, nothing)  # ids, and the rows to fill for them
        self._scratch = (nothing, nothing)  # the same, of this batch alone
        self._gone: list[torch.Tensor] = []
        self._num_scratch = 0

    # ---- one batch ----

    def preprocess(self, features: Features) -> Features:
        """Return the features as they are: all ids are legal."""
        return features

    def profile(self, features: Features) -> Features:
        """Return the features as they are: `remap` counts them."""
        return features

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Return the rows in place of the ids: `remap`, as the other two do nothing here."""
        return self.remap(features, mutate_miss_lengths)

    def remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> Features:
        """Return the rows in place of the ids; in train mode unknown ids may get one."""
        if self._planned is None:
            self.plan(features)
        (rows, changes, self._scratch, _), self._planned = self._planned, None
        if changes is not None:
            self._ids.keep_admitted()
            self._current_iter_tensor += 1
            self._take_changes(*changes)
        self._num_scratch = self._scratch[0].numel()
        if self._device.type != "cpu":
            rows = rows.to(self._device)
        parts = rows.split([feature.values().numel() for feature in features.values()])
        pairs = zip(features.items(), parts, strict=True)
        return {name: with_values(feature, part) for (name, feature), part in pairs}

    def plan(self, features: Features) -> None:
        """Find the ids of the next `remap`, which must be of the same features, and in train mode admit them.

        `num_table_rows` counts what it needs; `undo_plan` takes it back. On an error nothing has changed.
        """
        values = _together(features)
        try:
            changes = None
            num_rows = self._ids.num_rows()
            if self.training:
                step = int(self._current_iter_tensor) + 1
                rows, changes = self._ids.plan_admit(values, None, step, _FIRST_ROW)
                num_rows = max(num_rows, int(changes[1].max()) + 1 if changes[1].numel() > 0 else 0)
            else:
                rows = self._ids.find(values, _FIRST_ROW)
            nothing = torch.empty(0, dtype=torch.int64)
            scratch = (nothing, nothing)
            if self._default == "init":
                scratch = _scratch_rows(values.cpu().to(torch.int64), rows, num_rows + 1)
            self._planned = _Plan(rows, changes, scratch, num_rows)
        except BaseException:
            self.undo_plan()
            raise

    def undo_plan(self) -> None:
        """Take back what was planned, if anything was."""
        self._planned = None
        self._ids.undo_admitted()

    def _take_changes(self, new_ids, new_rows, evicted_ids, evicted_rows, num_refused) -> None:
        self.num_refused += num_refused
        self.num_evicted += evicted_ids.numel()
        self.num_admitted += new_ids.numel()
        if evicted_ids.numel() > 0 and self._track_removed:
            self._gone.append(evicted_ids)
        ids, rows = self._fresh
        if ids.numel() > 0:  # some were not filled, and may belong to others by now
            stays = ~torch.isin(rows, new_rows + 1)
            ids, rows = ids[stays], rows[stays]
        self._fresh = (torch.cat([ids, new_ids]), torch.cat([rows, new_rows + 1]))

    def fresh_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and rows that must be filled before the next lookup, until `forget_fresh_rows`."""
        (ids, rows), (unknown, scratch) = self._fresh, self._scratch
        return torch.cat([ids, unknown]), torch.cat([rows, scratch])

    def forget_fresh_rows(self) -> None:
        """Note that rows were filled."""
        nothing = torch.empty(0, dtype=torch.int64)
        self._fresh = self._scratch = (nothing, nothing)

    def take_removed_ids(self) -> torch.Tensor:
        """Return the ids that lost their row since the last call, for those who keep copies."""
        self.check_tracks_removed()
        gone, self._gone = self._gone, []
        return torch.cat(gone) if gone else torch.empty(0, dtype=torch.int64)

    def check_tracks_removed(self) -> None:
        """Raise ValueError unless ids that lose their row are remembered."""
        if not self._track_removed:
            raise ValueError(
                f"collision.growing: table '{self._name}' does not remember the ids it removes. Make the "
                "module with track_removed=True."
            )

    def first_values(self, ids: torch.Tensor, columns: int, low: float, high: float) -> torch.Tensor:
        """Return what the rows of these ids begin with."""
        return _engine.init_rows(ids, self._row_seed & (2**64 - 1), columns, low, high)

    def evict(self) -> torch.Tensor | None:
        """Return the rows that got an id since they were last filled; None if none did."""
        rows = self.fresh_rows()[1]
        return rows.to(self._device) if rows.numel() > 0 else None

    # ---- what others ask ----

    num_admitted = 0
    num_refused = 0
    num_evicted = 0
    _planned: _Plan | None = None
    _prepared: tuple[torch.Tensor, _C.collision.IdTable] | None = None  # of a load, by its ids

    def __len__(self) -> int:
        return len(self._ids)

    def __bool__(self) -> bool:
        return True

    def num_table_rows(self) -> int:
        """Return how many rows the table must have for the next lookup, of what is planned if anything is."""
        if self._planned is not None:
            return 1 + self._planned.num_rows + self._planned.scratch[0].numel()
        return 1 + self._ids.num_rows() + self._num_scratch

    def output_size(self) -> int | None:
        """Return the most ids; None if there is no limit."""
        return self._capacity

    def input_size(self) -> int:
        """Return 2**63 - 1: all ids are legal."""
        return LARGEST

    def buckets(self) -> int:
        """Return 1024."""
        return _engine.NUM_BUCKETS

    def open_slots(self) -> torch.Tensor:
        """Return how many ids can still come without one going; 2**63 - 1 without a limit."""
        most = LARGEST if self._capacity is None else max(self._capacity - len(self._ids), 0)
        return torch.tensor([most], device=self._device)

    def export_ids(self) -> dict[str, torch.Tensor]:
        """Return all ids with their rows, counts and last calls, in order of bucket and row."""
        ids, rows, counts, last_steps = self._ids.export_ids()
        return {"ids": ids, "rows": rows + 1, "counts": counts, "last_steps": last_steps}

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """Refuse: rows of a growing table have no ranges."""
        raise ValueError("collision.growing: the rows of a growing table are not cut by ranges.")

    # ---- state: rows are numbered anew, in the order of the file ----

    _STATE = ("ids", "counts", "last_steps", "sketch_buckets", "sketch_counters", "sketch_sightings")

    def validate_state(self) -> None:
        """Do nothing: what was loaded has been checked."""

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the ids mean."""
        return {"id_hash": _engine.ID_HASH, "seed": self._seed, "name": self._name}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Check that the saved ids were hashed as here; take their seed."""
        self._check_hash(state)
        self._seed = state["seed"]
        digest = hashlib.sha256(self._name.encode()).digest()
        self._row_seed = self._seed ^ int.from_bytes(digest[:8], "little") if self._name else self._seed

    def _check_hash(self, state: Mapping[str, Any]) -> None:
        if state["id_hash"] != _engine.ID_HASH:
            raise ValueError(
                f"collision.growing: table '{self._name}' was saved with the hash '{state['id_hash']}'; this "
                f"is '{_engine.ID_HASH}'."
            )

    def prepare_state(self, state: Mapping[str, Any], prefix: str) -> int | None:
        """Check saved ids and number them, for the load that follows; return how many, or None without any.

        Raises ValueError for what no table has saved, and changes nothing.
        """
        lists = [f"{prefix}_{name}" for name in self._STATE]
        if not any(name in state for name in lists):
            return None
        needed = [*lists, f"{prefix}_extra_state", f"{prefix}_current_iter_tensor"]
        missing = [name for name in needed if name not in state]
        if missing:
            raise ValueError(
                f"collision.growing: the state of table '{self._name}' has no '{missing[0]}'. Load all that "
                "was saved of it."
            )
        extra = state[f"{prefix}_extra_state"]
        self._check_hash(extra)
        if self._prepared is None or self._prepared[0] is not state[lists[0]]:
            ids, counts, last_steps, *sketch = (state[name] for name in lists)
            table = _engine.IdTable(self._table_options(extra["seed"]))
            table.load(ids, counts, last_steps)
            table.load_sketch(*sketch)
            self._prepared = (ids, table)
        return len(self._prepared[1])

    def forget_prepared(self) -> None:
        """Give up what was prepared for a load that does not come."""
        self._prepared = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        ids, _, counts, last_steps = self._ids.export_ids()
        values = (ids, counts, last_steps, *self._ids.export_sketch())
        destination.update({f"{prefix}_{n}": v for n, v in zip(self._STATE, values, strict=True)})

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        has_ids = self.prepare_state(state_dict, prefix) is not None
        own = {f"{prefix}_{name}" for name in self._STATE}
        known = {name: value for name, value in state_dict.items() if name not in own}
        super()._load_from_state_dict(known, prefix, metadata, strict, missing, unexpected, errors)
        missing.extend(sorted(own - set(state_dict)))
        if not has_ids:
            return
        (_, self._ids), self._prepared = self._prepared, None
        self._forget_changes()

    def __getstate__(self):
        raise TypeError(
            "collision.growing: a growing table is not copied, as its rows would be numbered anew. Make "
            "another module and load the state dict."
        )
