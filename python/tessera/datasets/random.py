"""Random batches of clicks.

>>> dataset = RandomRecDataset(["f", "g"], 2, hash_size=100, ids_per_feature=3, num_dense=4, num_batches=2)
>>> [batch.sparse_features.lengths().tolist() for batch in dataset]
[[3, 3, 3, 3], [3, 3, 3, 3]]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

from tessera.datasets.utils import Batch
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["RandomRecDataset"]


class RandomRecDataset(IterableDataset[Batch]):
    """Give batches of random dense features, ids and labels: `num_batches`, or without end.

    Ids of a feature are below its hash size (100 if left out); a bag has from `min_ids_per_feature(s)` to
    `ids_per_feature(s)` ids: exactly the latter if only that is given, 0 to 2 if neither. Lists say it for
    each key. `num_generated_batches` are made in advance and given in turn; -1 makes each when it is asked
    for. The same `manual_seed` gives the same batches.
    """

    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        super().__init__()
        if hash_sizes is None:
            hash_sizes = [100 if hash_size is None else hash_size] * len(keys)
        has_ids = ids_per_feature is not None or ids_per_features is not None
        if ids_per_features is None:
            ids_per_features = [2 if ids_per_feature is None else ids_per_feature] * len(keys)
        if min_ids_per_features is None:
            if min_ids_per_feature is not None:
                min_ids_per_features = [min_ids_per_feature] * len(keys)
            else:
                min_ids_per_features = list(ids_per_features) if has_ids else [0] * len(keys)
        lists = {
            "hash_sizes": hash_sizes,
            "ids_per_features": ids_per_features,
            "min_ids_per_features": min_ids_per_features,
        }
        for name, values in lists.items():
            if len(values) != len(keys):
                raise AssertionError(
                    f"RandomRecDataset: {name} has {len(values)} entries for {len(keys)} keys."
                )
        if num_generated_batches == 0:
            raise ValueError(
                "RandomRecDataset: num_generated_batches is 0; give -1 to make batches as asked for."
            )
        self._keys = keys
        self._batch_size = batch_size
        self._bags = list(zip(min_ids_per_features, ids_per_features, hash_sizes, strict=True))
        self._num_dense = num_dense
        self._num_batches = num_batches
        self._generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        self._made = [self._new_batch() for _ in range(num_generated_batches)]

    def __iter__(self) -> Iterator[Batch]:
        batches = itertools.cycle(self._made) if self._made else iter(self._new_batch, None)
        return itertools.islice(batches, self._num_batches)

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("RandomRecDataset: it has no end; give num_batches.")
        return self._num_batches

    def _new_batch(self) -> Batch:
        generator = self._generator
        values, lengths = [], []
        for fewest, most, rows in self._bags:
            lengths.append(torch.randint(fewest, most + 1, (self._batch_size,), generator=generator))
            values.append(torch.randint(0, rows, (int(lengths[-1].sum()),), generator=generator))
        features = KeyedJaggedTensor.from_lengths_sync(
            self._keys, torch.cat(values), torch.cat(lengths).to(torch.int32)
        )
        dense = torch.randn(self._batch_size, self._num_dense, generator=generator)
        labels = torch.randint(0, 2, (self._batch_size,), generator=generator)
        return Batch(dense, features, labels)
