"""The same tensor, or tensors that share memory, as inputs and outputs of collectives.

Judged by torch's Gloo where it defines the result, else by what the operator means.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

SIZES = [3, 300_000]  # one message, and many pieces


def coalesced(rank, count, group):
    base = torch.arange(2.0 * count) * (rank + 1)
    same = base[:count].clone()
    overlapping = [base[:count], base[count // 2 : count // 2 + count]]
    dist.all_reduce_coalesced([same, same], group=group)
    dist.all_reduce_coalesced(overlapping, group=group)
    return [same, base]


def gathered(rank, count, group):
    data = torch.arange(float(count)) + 1000 * rank
    twice = torch.zeros(count)
    dist.all_gather([twice, twice], data, group=group)
    shifted = torch.zeros(2 * count)
    dist.all_gather([shifted[:count], shifted[count // 2 : count // 2 + count]], data, group=group)
    # The input is the other rank's output.
    swapped = torch.stack([torch.arange(float(count)) + 10, torch.arange(float(count)) + 20])
    dist.all_gather([swapped[0], swapped[1]], swapped[1 - rank], group=group)
    in_place = torch.zeros(2 * count)
    in_place[rank * count :][:count] = data
    dist.all_gather([in_place[:count], in_place[count:]], in_place[rank * count :][:count], group=group)
    whole = torch.arange(2.0 * count) * (rank + 1)
    dist.all_gather_into_tensor(whole, whole[count // 2 : count // 2 + count], group=group)
    return [twice, shifted, swapped, in_place, whole]


def rooted(rank, count, group):
    data = torch.arange(float(count)) + 1000 * rank
    outputs = torch.zeros(2, count)
    if rank == 0:
        outputs[1] = data
        dist.gather(outputs[1], [outputs[0], outputs[1]], dst=0, group=group)
    else:
        dist.gather(data, dst=0, group=group)
    same = data.clone()
    dist.scatter(same, [data, data] if rank == 0 else None, src=0, group=group)
    return [outputs, same]


def compare(rank, body, count):
    gloo = dist.new_group(backend="gloo")
    return body(rank, count, None), body(rank, count, gloo)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("body", [coalesced, gathered, rooted])
def test_as_gloo_does_it(body, count):
    for mine, theirs in run_ranks(2, compare, body, count):
        assert len(mine) == len(theirs)
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(one, other), index


def exchanged(rank, count):
    data = torch.arange(2.0 * count) + 10_000_000 * rank
    peers = [torch.arange(2.0 * count) + 10_000_000 * r for r in range(2)]
    meant = torch.cat([peer[rank * count :][:count] for peer in peers])
    single = data.clone()
    dist.all_to_all_single(single, single)
    listed = data.clone()
    halves = list(listed.chunk(2))
    dist.all_to_all(halves, halves)
    turned = data.clone()
    dist.all_to_all(list(turned.chunk(2))[::-1], list(turned.chunk(2)))
    sums = (peers[0] + peers[1])[rank * count :][:count]
    own = data.clone()
    dist.reduce_scatter_tensor(own[rank * count :][:count], own)
    other = data.clone()
    dist.reduce_scatter_tensor(other[(1 - rank) * count :][:count], other)
    scattered = torch.stack([torch.arange(float(count)), torch.arange(float(count)) + 500])
    given = scattered[1] if rank == 0 else torch.zeros(count)  # Gloo sends what it has just written
    dist.scatter(given, [scattered[0], scattered[1]] if rank == 0 else None, src=0)
    parts = data.clone()
    dist.reduce_scatter(parts[count // 2 :][:count], list(parts.chunk(2)))
    return [
        torch.equal(single, meant),
        torch.equal(listed, meant),
        torch.equal(turned, torch.cat(list(meant.chunk(2))[::-1])),
        torch.equal(own[rank * count :][:count], sums),
        torch.equal(other[(1 - rank) * count :][:count], sums),
        torch.equal(parts[count // 2 :][:count], sums),
        torch.equal(given, torch.arange(float(count)) + 500 * rank),
    ]


@pytest.mark.parametrize("count", SIZES)
def test_in_place_where_gloo_has_no_answer(count):
    for outcome in run_ranks(2, exchanged, count):
        assert outcome == [True] * 7


def expanded(rank):
    said = []
    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.all_gather([t, t], torch.ones(4)),
    ):
        try:
            call(torch.ones(1).expand(4))
            said.append("")
        except ValueError as error:
            said.append(str(error))
    value = torch.ones(1)
    dist.all_reduce(value)
    return said, value.item()


def test_an_output_with_elements_in_one_place_is_refused_before_anything_is_sent():
    for said, value in run_ranks(2, expanded):
        assert all("elements of the output share memory" in text for text in said), said
        assert value == 2.0


def of_rank(rank, count):
    """What a rank brings; others can say it as well."""
    return torch.arange(float(count)) * 3 + 1_000_000 * rank


def all_reduced(rank, size, count, group):
    """Several tensors of a rank count one by one; results are written in the order of the list."""
    same = of_rank(rank, count)
    group.allreduce([same, same], dist.AllreduceOptions()).wait()
    sums = sum(of_rank(r, 2 * count) for r in range(size))
    yield same, 2 * sums[:count], True
    base, half = of_rank(rank, 2 * count), count // 2
    group.allreduce([base[:count], base[half:][:count]], dist.AllreduceOptions()).wait()
    whole = sums[:count] + sums[half:][:count]
    expected = torch.cat([whole[:half], whole, of_rank(rank, 2 * count)[half + count :]])
    yield base, expected, False  # Gloo: other values on every rank


def gathered_lists(rank, size, count, group):
    """What comes in is what was there before anything came out."""
    data = of_rank(rank, count)
    shared = [torch.zeros(count) for _ in range(size)]  # of both inputs: the second's stay
    dist.all_gather_coalesced([[one, one] for one in shared], [data, data + 7], group=group)
    yield torch.stack(shared), torch.stack([of_rank(r, count) + 7 for r in range(size)]), True
    parts, others = torch.zeros(size, count), torch.zeros(size, count)
    parts[rank], parts[(rank + 1) % size] = data, data + 7
    outputs = [[parts[r], others[r]] for r in range(size)]
    dist.all_gather_coalesced(outputs, [parts[rank], parts[(rank + 1) % size]], group=group)
    yield parts, torch.stack([of_rank(r, count) for r in range(size)]), False
    yield others, torch.stack([of_rank(r, count) + 7 for r in range(size)]), False


def gathered_wholes(rank, size, count, group):
    whole, other = of_rank(rank, size * count), torch.zeros(size * count)
    # In its own place, and what the first writes over.
    group.allgather_into_tensor_coalesced(
        [whole, other], [whole[rank * count :][:count], whole[:count]]
    ).wait()
    yield whole, torch.cat([of_rank(r, size * count)[r * count :][:count] for r in range(size)]), True
    yield other, torch.cat([of_rank(r, size * count)[:count] for r in range(size)]), True
    across, half = of_rank(rank, size * count), count // 2
    group.allgather_into_tensor_coalesced([across], [across[half:][:count]]).wait()
    yield across, torch.cat([of_rank(r, size * count)[half:][:count] for r in range(size)]), True


def scattered_sums(rank, size, count, group):
    whole, other = of_rank(rank, size * count), torch.zeros(count)
    outputs = [whole[:count], other]
    group.reduce_scatter_tensor_coalesced(outputs, [whole, whole], dist.ReduceScatterOptions()).wait()
    sums = sum(of_rank(r, size * count) for r in range(size))[rank * count :][:count]
    yield outputs[0], sums, True
    yield other, sums, True
    across, half = of_rank(rank, size * count), count // 2
    group.reduce_scatter_tensor_coalesced(
        [across[half:][:count]], [across], dist.ReduceScatterOptions()
    ).wait()
    yield across[half:][:count], sums, True


def as_meant(rank, body, count, is_torchs):
    for number, (found, meant, is_defined) in enumerate(
        body(rank, dist.get_world_size(), count, dist.group.WORLD)
    ):
        assert (is_torchs and not is_defined) or torch.equal(found, meant), number


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("engine", ["shm", "gloo", "torch"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("body", [all_reduced, gathered_lists, gathered_wholes, scattered_sums])
def test_several_tensors_that_share_memory(body, size, engine, count):
    """Of torch's Gloo only what does not depend on the order in which it goes over the tensors."""
    if engine == "torch":
        run_ranks(size, as_meant, body, count, True, backend="gloo")
    else:
        run_ranks(size, as_meant, body, count, False, env={"TESSERA_ENGINE": engine})
