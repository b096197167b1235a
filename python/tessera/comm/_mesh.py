"""One arrangement of all ranks, with a name for each direction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch.distributed import ProcessGroup

from tessera import _C
from tessera.comm._group import group_or_world, make_subgroup

# Meshes made over each world group, by its name: every rank of the group counts alike.
_num_meshes: dict[str, int] = {}


class Mesh:
    """The ranks of a group as an array with named axes; the last axis is the fastest.

    With axes ``{"data": 2, "vocab": 4}``, rank 5 sits at data 1, vocab 1; its "vocab" group is ranks
    4, 5, 6, 7 and its "data" group ranks 1, 5. `axes` is a mapping or pairs of name and size.
    Collective over `world`, which is torch.distributed's default group if left out.

    Raises ValueError when the sizes do not multiply to the number of ranks or a name is empty or
    repeated, and CommError of kind "mismatch", on all ranks, when ranks ask for different meshes.

    >>> import tessera, torch, torch.distributed as dist
    >>> world = tessera.comm.init()
    >>> mesh = Mesh({"data": 1, "vocab": 1})
    >>> tensor = torch.ones(2)
    >>> dist.all_reduce(tensor, group=mesh.group("vocab"))
    >>> mesh.size("vocab"), mesh.coordinate("data"), tensor
    (1, 0, tensor([1., 1.]))
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]],
        world: ProcessGroup | None = None,
    ):
        pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
        self.world = group_or_world(world)
        _C.check_mesh(self.world, pairs)
        self.axes: tuple[tuple[str, int], ...] = tuple(pairs)
        number = _num_meshes.get(self.world.group_name, 0)
        _num_meshes[self.world.group_name] = number + 1
        self._prefix = f"mesh {number} of {self.world.group_name}"
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        for index in range(len(pairs)):
            self._group_along((index,))

    def group(self, axis: str) -> ProcessGroup:
        """Return the group of ranks that differ from this one in `axis` only. Not collective."""
        return self._groups[(self._index_of(axis),)]

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along `axis`."""
        return self._coordinates()[self._index_of(axis)]

    def size(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        return self.axes[self._index_of(axis)][1]

    def flatten(self, axes: Sequence[str]) -> ProcessGroup:
        """Return the group of ranks that differ from this one in the given axes only, in mesh order.

        Collective over the world the first time; the order of `axes` does not matter.
        """
        indices = tuple(sorted({self._index_of(axis) for axis in axes}))
        if len(indices) != len(axes) or not indices:
            raise ValueError(f"comm.mesh: flatten takes different axes, at least one, not {list(axes)}.")
        return self._group_along(indices)

    def __repr__(self) -> str:
        return f"Mesh({dict(self.axes)})"

    def _index_of(self, axis: str) -> int:
        for index, (name, _) in enumerate(self.axes):
            if name == axis:
                return index
        shape = " x ".join(f"{name} {size}" for name, size in self.axes)
        raise ValueError(f"comm.mesh: there is no axis '{axis}' in the mesh {shape}.")

    def _strides(self) -> list[int]:
        return [math.prod(size for _, size in self.axes[i + 1 :]) for i in range(len(self.axes))]

    def _coordinates(self) -> list[int]:
        sizes = (size for _, size in self.axes)
        return [
            self.world.rank() // stride % size for size, stride in zip(sizes, self._strides(), strict=True)
        ]

    def _group_along(self, free: tuple[int, ...]) -> ProcessGroup:
        if free in self._groups:
            return self._groups[free]
        ranks = [0]
        strides, coordinates = self._strides(), self._coordinates()
        for index, (_, size) in enumerate(self.axes):
            places = range(size) if index in free else [coordinates[index]]
            ranks = [base + place * strides[index] for base in ranks for place in places]
        label = "+".join(self.axes[index][0] for index in free)
        name = f"{self._prefix}, {label}, from rank {ranks[0]}"
        self._groups[free] = make_subgroup(self.world, ranks, name, label)
        return self._groups[free]
