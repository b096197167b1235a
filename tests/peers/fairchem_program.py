"""A training program as users of fairchem write it: energies and forces of atoms, each graph over all ranks.

Its imports that differ are those of graph parallelism, from `fairchem.core.common` or
`tessera.core.common`, and of DistributedDataParallel, from `torch.nn.parallel` or `tessera.nn.parallel`. As
in fairchem's models each rank keeps the nodes of its part and the edges that end there, and gathers the rows
of all before every layer.
"""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from torch import nn

SIDES = {  # name: (where gp_utils and the exchanges are, where the wrapper is)
    "tessera": ("tessera.core.common", "tessera.nn.parallel"),
    "fairchem": ("fairchem.core.common", "torch.nn.parallel"),
}
KINDS, WIDTH, RADII, CUTOFF = 4, 16, 4, 0.75


class Names:
    """What the program imports."""

    def __init__(self, side: str) -> None:
        common, parallel = SIDES[side]
        self.gp = importlib.import_module(f"{common}.gp_utils")
        self.exchange = importlib.import_module(f"{common}.parallelism.graph_parallel_a2a")
        self.DistributedDataParallel = importlib.import_module(parallel).DistributedDataParallel


def layers(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(into, WIDTH), nn.SiLU(), nn.Linear(WIDTH, out))


class Potential(nn.Module):
    """Predict energies of systems and forces on atoms; forces are derivatives, or `direct` from a head."""

    def __init__(self, names: Names, direct: bool) -> None:
        super().__init__()
        self.names, self.direct = names, direct
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.messages = nn.ModuleList([layers(2 * WIDTH + RADII, WIDTH) for _ in range(2)])
        self.energy = layers(WIDTH, 1)
        self.pull = layers(WIDTH, 1) if direct else None

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        gp, places, count = self.names.gp, batch["places"], len(batch["places"])
        if not self.direct:
            places = places.detach().requires_grad_()
        rank, size = (gp.get_gp_rank(), gp.get_gp_world_size()) if gp.initialized() else (0, 1)
        by_need = gp.initialized() and gp.get_gp_config().mode == "all_to_all"
        with torch.no_grad():
            same = batch["system"][:, None] == batch["system"][None, :]
            near = (torch.cdist(places, places) < CUTOFF) & same & ~torch.eye(count, dtype=torch.bool)
            edges = near.nonzero().t()
        owners = torch.zeros(count, dtype=torch.long)
        for part, nodes in enumerate(torch.arange(count).tensor_split(size)):
            owners[nodes] = part
        mine = (owners == rank).nonzero().view(-1)
        edges = edges[:, owners[edges[1]] == rank]
        ends = edges[1] - mine[0]
        context = None
        if by_need:
            context = self.names.exchange.build_gp_context(edges, owners, rank, size, mine)
        distance = (places[edges[0]] - places[edges[1]]).norm(dim=1, keepdim=True)
        waves = torch.arange(1, RADII + 1) * torch.pi / CUTOFF
        radial = torch.sin(distance * waves) / distance * (1 - distance / CUTOFF) ** 2
        x = self.kinds(batch["kind"][mine])
        for message in self.messages:
            if by_need:
                received = self.names.exchange.all_to_all_collect(x, context)
                sources = torch.cat([x, received])[context.edge_index_local[0]]
            elif gp.initialized():
                sources = gp.gather_from_model_parallel_region_sum_grad(x, count)[edges[0]]
            else:
                sources = x[edges[0]]
            sent = message(torch.cat([sources, x[ends], radial], 1))
            x = x + torch.zeros_like(x).index_add(0, ends, sent)
        part = torch.zeros(len(batch["energy"]), dtype=x.dtype)
        part = part.index_add(0, batch["system"][mine], self.energy(x).view(-1) / 10)
        energy = gp.reduce_from_model_parallel_region(part) if gp.initialized() else part
        if self.direct:
            pulls = self.pull(x)[ends] * (places[edges[0]] - places[edges[1]]) / distance
            forces = torch.zeros_like(places[mine]).index_add(0, ends, pulls)
            return energy, gp.gather_from_model_parallel_region(forces, count) if gp.initialized() else forces
        (slope,) = torch.autograd.grad(part.sum(), places, create_graph=True)
        return energy, gp.reduce_from_model_parallel_region(-slope) if gp.initialized() else -slope


def systems(step: int) -> dict[str, torch.Tensor]:
    """Two clouds of atoms with energies and forces of a pair potential; sizes no number of ranks divides."""
    generator = torch.Generator().manual_seed(step)
    sizes = [9 + step % 3, 12]
    places = torch.cat([torch.rand(size, 3, generator=generator, dtype=torch.float64) for size in sizes])
    system = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
    kind = torch.randint(KINDS, (len(places),), generator=generator)
    places.requires_grad_()
    apart = torch.where(torch.eye(len(places), dtype=torch.bool), 1.0, torch.cdist(places, places) ** 2 + 0.1)
    pairs = (system[:, None] == system[None, :]) & ~torch.eye(len(places), dtype=torch.bool)
    each = (torch.where(pairs, (kind[:, None] + kind[None, :] + 1) * torch.exp(-4 * apart), 0)).sum(1) / 2
    energy = torch.zeros(2, dtype=torch.float64).index_add(0, system, each)
    (slope,) = torch.autograd.grad(energy.sum(), places)
    return {
        "places": places.detach(),
        "system": system,
        "kind": kind,
        "energy": energy.detach(),
        "forces": -slope,
    }


def train(side: str, steps: int, mode: str = "allgather", group: int = 0) -> tuple[list[float], dict]:
    """Train on all ranks, `group` of them to a graph (0: all); return the losses and the model's state.

    With several groups each takes batches of its own. `mode` is fairchem's: "allgather", with forces that are
    derivatives, or "all_to_all", with direct ones. Side "alone" uses no graph parallelism at all, and takes
    the batches of all groups in every step.
    """
    names = Names("tessera" if side == "alone" else side)
    gp, world = names.gp, dist.get_world_size()
    group = group or world
    groups, first = world // group, dist.get_rank() // group
    if side != "alone":
        gp.setup_graph_parallel_groups(group, dist.get_backend())
        gp.set_gp_config(gp.GraphParallelConfig(group_size=group, mode=gp.GPMode(mode)))
    torch.manual_seed(4)
    bare = Potential(names, direct=mode == "all_to_all").double()
    model = bare if side == "alone" else names.DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        taken = range(groups) if side == "alone" else [first]
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for place in taken:
            batch = systems(step * groups + place)
            energy, forces = model(batch)
            loss = (energy - batch["energy"]).square().mean() / 100
            loss = loss + (forces - batch["forces"]).square().mean()
            if side == "alone":
                loss = loss / groups
            elif gp.initialized():
                loss = gp.scale_backward_grad(loss)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if side != "alone":  # the mean over the groups: a group's ranks have the same loss
            dist.all_reduce(total)
            total /= world
        losses.append(total.item())
    if side != "alone":
        gp.cleanup_gp()
    return losses, {name: value.clone() for name, value in bare.state_dict().items()}
