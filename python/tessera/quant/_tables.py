"""The engine's quantised tables under the reference's name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tessera import _C
from tessera.modules.embedding_configs import DataType, PoolingType

DEFAULT_ROW_ALIGNMENT = 16


def row_type(data_type: DataType) -> str:
    """Return the engine's name of a row type.

    >>> row_type(DataType.INT4)
    'int4'
    """
    kind = DataType(data_type)
    return "int8" if kind == DataType.UINT8 else kind.value.lower()


def output_dtype_of(value) -> torch.dtype:
    """Return torch's type for a type, or for the reference's record of one."""
    dtype = value if isinstance(value, torch.dtype) else value.as_dtype()
    if not dtype.is_floating_point:
        raise ValueError(f"embed.quantised: outputs are floating point, not {dtype}.")
    return dtype


class IntNBitTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Look up several tables with rows in few bits in one call, on the CPU or a GPU: the same bits.

    `embedding_specs` has name, rows, columns, DataType and place of each table, `feature_table_map` the
    table of each feature, in the order of the features. Rows begin at multiples of `row_alignment` bytes.

    >>> tables = IntNBitTableBatchedEmbeddingBagsCodegen([("t", 3, 2, DataType.INT8, None)])
    >>> tables.assign(0, torch.tensor([[0.0, 1.0], [2.0, 2.0], [4.0, 4.0]]))
    >>> tables(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).tolist()
    [[2.0, 2.0], [4.0, 4.0]]
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple],
        feature_table_map: Sequence[int] | None = None,
        pooling_mode: PoolingType = PoolingType.SUM,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        row_alignment: int | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device or "cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        self.device = device
        self.embedding_specs = [tuple(spec) for spec in embedding_specs]
        places = list(range(len(self.embedding_specs)) if feature_table_map is None else feature_table_map)
        if places != sorted(places):
            raise ValueError("embed.quantised: features must come in the order of their tables.")
        names = list(feature_names or [f"#{number}" for number in range(len(places))])
        self.feature_table_map = places
        self.feature_names = names
        self.pooling_mode = PoolingType(pooling_mode)
        self.output_dtype = output_dtype_of(output_dtype)
        self.row_alignment = row_alignment or DEFAULT_ROW_ALIGNMENT
        features = [
            [name for name, place in zip(names, places, strict=True) if place == table]
            for table in range(len(self.embedding_specs))
        ]
        self._engine = _C.embedding.QuantisedTables(
            [
                (name, rows, dim, row_type(data_type), own)
                for (name, rows, dim, data_type, *_), own in zip(self.embedding_specs, features, strict=True)
            ],
            getattr(_C.embedding.PoolingType, self.pooling_mode.value),
            self.row_alignment,
            self.device,
        )

    def __deepcopy__(self, memo) -> IntNBitTableBatchedEmbeddingBagsCodegen:
        copied = IntNBitTableBatchedEmbeddingBagsCodegen(
            self.embedding_specs,
            self.feature_table_map,
            self.pooling_mode,
            self.device,
            self.output_dtype,
            self.row_alignment,
            self.feature_names,
        )
        for table in range(len(self.embedding_specs)):
            copied.rows(table).copy_(self.rows(table))
        memo[id(self)] = copied
        return copied

    def rows(self, table: int) -> torch.Tensor:
        """Return the rows of a table, uint8 [rows, row bytes], shared."""
        return self._engine.rows(table)

    def assign(self, table: int, numbers: torch.Tensor) -> None:
        """Round numbers [rows, columns] into a table. ValueError names a row that cannot be kept."""
        self._engine.assign(table, numbers)

    def dequantised(self, table: int) -> torch.Tensor:
        """Return the numbers of a table, float32 [rows, columns]."""
        return self._engine.dequantised(table)

    def _head_bytes(self, table: int) -> int:
        data_type = DataType(self.embedding_specs[table][3])
        return 4 if row_type(data_type) in ("int8", "int4", "int2") else 0

    def split_embedding_weights_with_scale_bias(
        self, split_scale_bias_mode: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
        """Return codes, scales and biases of each table; mode 0: whole rows, None and None.

        Mode 2 gives scales and biases as float16 [rows, 1]. All share memory with the tables.
        """
        parts: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        for table, (name, _, dim, data_type, *_) in enumerate(self.embedding_specs):
            rows = self.rows(table)
            head = self._head_bytes(table)
            if split_scale_bias_mode == 0 or head == 0:
                parts.append((rows, None, None))
                continue
            if rows.size(1) % 2:
                raise ValueError(
                    f"embed.quantised: rows of table {name!r} have {rows.size(1)} bytes; scale and bias "
                    "stand alone only where that is even. Choose a row alignment of 2 or more."
                )
            end = _C.embedding.quantised_row_bytes(row_type(data_type), dim)
            scale, bias = (rows[:, k : k + 2].view(torch.float16) for k in (0, 2))
            parts.append((rows[:, head:end], scale, bias))
        return parts

    def split_embedding_weights(
        self, split_scale_shifts: bool = True
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the codes of each table and its scales and biases as bytes, or whole rows and None."""
        parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for table, (_, _, dim, data_type, *_) in enumerate(self.embedding_specs):
            rows, head = self.rows(table), self._head_bytes(table)
            if split_scale_shifts and head:
                end = _C.embedding.quantised_row_bytes(row_type(data_type), dim)
                parts.append((rows[:, head:end], rows[:, :head]))
            else:
                parts.append((rows, None))
        return parts

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return pooled rows [batch, columns of all features], or without pooling [ids, columns]."""
        return self._engine.forward(indices, offsets, per_sample_weights).to(self.output_dtype)
