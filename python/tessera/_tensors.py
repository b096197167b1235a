"""What arrives as a tensor: parts of a mesh, results that are still on their way, tensors without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

Columns = tuple[int, int]
_PLAIN = (Tensor, torch.nn.Parameter)


class _Wait(torch.autograd.Function):
    """The value of an asynchronous collective; the gradient goes back to it as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        return tensor.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _OwnPart(torch.autograd.Function):
    """This rank's part of a DTensor; its gradient is laid out as the DTensor is.

    `to_local` derives the strides of the gradient from this rank's part, which are not the DTensor's if it
    is cut unevenly. A leaf then gets a copy with its own strides, which torch 2.11 lays out whole on every
    rank: the gradient's local part had another shape than the leaf's.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.layout = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = ctx.layout
        return DTensor.from_local(gradients[0], mesh, placements, run_check=False, shape=shape, stride=stride)


def with_memory(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory the engine may read; the bindings ask for it if there is none.

    Raises TypeError if there is no such tensor. Tensors of the meta device stay as they are: the library
    knows them, and says what it does not do with them.
    """
    if type(tensor) in _PLAIN and tensor.device.type == "meta":
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return _Wait.apply(tensor)
    kind = type(tensor).__name__
    shape = "[" + ", ".join(str(extent) for extent in tensor.shape) + "]"
    if is_part_of_mesh(tensor):
        advice = "Pass its to_local()."
    elif type(tensor) in _PLAIN:
        advice = "Its storage was resized to 0."
    else:
        advice = "Pass the plain tensor that it stands for."
    raise TypeError(f"tessera: a {kind} of shape {shape} has no memory that can be read here. {advice}")


def is_part_of_mesh(tensor: Any) -> bool:
    """Return whether this is a DTensor."""
    if type(tensor) in _PLAIN or not isinstance(tensor, Tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; anything else is that part already."""
    return _part_of(tensor) if is_part_of_mesh(tensor) else tensor


def _part_of(tensor: Any) -> Tensor:
    # Addends have a gradient of another placement than their own, and without one nothing is laid out.
    differs = any(placement.is_partial() for placement in tensor.placements)
    if differs or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor.to_local()
    return _OwnPart.apply(tensor)


def whole_on_group(tensor: Tensor) -> Tensor:
    """Return hidden states that are the same on all ranks: a DTensor that is cut is brought together."""
    if not is_part_of_mesh(tensor):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def group_of(function: str, group: Any) -> ProcessGroup | None:
    """Return `group` if it is one that this rank belongs to, or None."""
    if group is None or isinstance(group, ProcessGroup):
        return group
    if type(group).__name__ == "DeviceMesh":
        raise TypeError(
            f"vocab.{function}: a DeviceMesh is not a group. Pass the group of one of its axes, as in "
            "mesh.get_group('tp')."
        )
    if group == torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"vocab.{function}: this rank does not belong to the group. Only its members call this function."
        )
    raise TypeError(f"vocab.{function}: a {type(group).__name__} is not a group of torch.distributed.")


def vocab_part(
    function: str, tensor: Tensor, group: Any, columns: Columns | None = None, dim: int = -1
) -> tuple[Tensor, ProcessGroup | None, Columns | None]:
    """Return this rank's part of a tensor whose dimension `dim` is the vocabulary, its group and its ids.

    A DTensor's placements say all three, whatever `columns` are; of plain tensors they are as given.
    """
    group = group_of(function, group)
    if tensor.device.type == "meta":
        raise TypeError(
            f"vocab.{function}: a tensor of shape {list(tensor.shape)} on the meta device has no values."
        )
    if not is_part_of_mesh(tensor):
        return tensor, group, columns
    dim %= tensor.dim()
    mesh = tensor.device_mesh
    places = []
    for place, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise TypeError(
                f"vocab.{function}: a DTensor of placements {tuple(tensor.placements)} holds addends, not "
                "values. Redistribute it first."
            )
        if placement.is_shard() and placement.dim % tensor.dim() == dim and mesh.size(place) > 1:
            places.append(place)
    local = _part_of(tensor)
    extent = tensor.shape[dim]
    if not places:
        return local, None, (0, extent)
    if len(places) > 1:
        raise TypeError(
            f"vocab.{function}: the vocabulary of a DTensor of placements {tuple(tensor.placements)} is cut "
            "by more than one axis of its mesh. Use one."
        )
    ranks = mesh.size(places[0])
    share = -(-extent // ranks)
    start = min(mesh.get_local_rank(places[0]) * share, extent)
    end = min(start + share, extent)
    if local.shape[dim] != end - start:
        raise ValueError(
            f"vocab.{function}: this rank's part of a DTensor has {local.shape[dim]} of {extent} ids, where "
            f"its placement on {ranks} ranks says {end - start}."
        )
    own = mesh.get_group(places[0])
    if group is not None and group.size() != ranks:
        raise ValueError(
            f"vocab.{function}: the group has {group.size()} ranks, the vocabulary of the DTensor is cut "
            f"over {ranks}."
        )
    return local, own if group is None else group, (start, end)
