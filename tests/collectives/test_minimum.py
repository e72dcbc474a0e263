"""A minimum over many ranks in few messages, over real sockets."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from support.meshes import TIMEOUT_S, close_all, connect_meshes, in_threads

from cgx_ray.collectives.transport.greeting import MAX_DIRECT, partners


def test_every_rank_hears_of_every_other_in_two_log3_n_messages() -> None:
    for world_size in (*range(2, 100), 243, 244, 256, 1000, 4096):
        rounds = [partners(rank, world_size) for rank in range(world_size)]
        num_rounds = len(rounds[0])
        if world_size <= 1 + MAX_DIRECT:
            assert [sorted(peers) for peers in rounds[0]] == [list(range(1, world_size))]
            continue
        # Half a rank less, since the logarithm of a power of three may be a little too large.
        assert num_rounds == math.ceil(math.log(world_size - 0.5, 3)), world_size
        assert max(len(peers) for one in rounds for peers in one) == 2
        met = {
            (turn, rank, peer) for rank, one in enumerate(rounds) for turn, peers in enumerate(one) for peer in peers
        }
        assert met == {(turn, peer, rank) for turn, rank, peer in met}, "a rank sends to one that does not listen"
        # Of rank 0; by symmetry it is the same for each.
        reach = {0}
        for peers in rounds[0]:
            reach |= {(known + peer) % world_size for known in reach for peer in peers}
        assert len(reach) == world_size, f"{len(reach)} of {world_size}"


@pytest.mark.parametrize(
    ("world_size", "sharers", "dtype"),
    [
        *((world_size, (), torch.int64) for world_size in (1, 2, 3, 17, 18, 20)),
        (20, (3, 4, 5, 6), torch.int64),
        (20, (), torch.uint8),
    ],
)
def test_the_minimum_is_that_of_all_ranks(world_size: int, sharers: tuple[int, ...], dtype: torch.dtype) -> None:
    meshes = connect_meshes(world_size, sharers=sharers)

    def run(rank: int) -> list[list[int]]:
        found = []
        for step in range(5):
            values = torch.tensor([step + rank, 200 - rank, (rank * 7 + step) % world_size], dtype=dtype)
            meshes[rank].wait(meshes[rank].post_minimum(values, partners(rank, world_size), channel=5), TIMEOUT_S)
            found.append(values.tolist())
        return found

    results = in_threads([lambda r=rank: run(r) for rank in range(world_size)])
    close_all(meshes)
    for rank, found in enumerate(results):
        assert found == [[step, 201 - world_size, 0] for step in range(5)], rank


def test_ranks_pass_a_minimum_on_by_themselves_and_a_peer_that_hangs_up_fails_nothing_else() -> None:
    world_size = 20
    meshes = connect_meshes(world_size)
    has_left = threading.Event()

    def begin(rank: int, channel: int) -> tuple[torch.Tensor, int]:
        values = torch.tensor([100 if rank == 0 else rank])
        return values, meshes[rank].post_minimum(values, partners(rank, world_size), channel)

    def stay(rank: int) -> float:
        mesh, peer = meshes[rank], {1: 2, 2: 1}.get(rank)
        _, ticket = begin(rank, 5)
        # Does nothing more, but rank 0 gets the minimum all the same.
        assert has_left.wait(TIMEOUT_S)
        if peer is None:
            return 1.0
        if rank == 1:
            # Rank 0 is a partner in the first round, and has ended training.
            _, failing = begin(rank, 6)
            mesh.wait_any([failing], TIMEOUT_S)
            assert mesh.has_failed(failing)
        mesh.wait(ticket, TIMEOUT_S)
        received = torch.zeros(1)
        mesh.wait(mesh.post({peer: torch.ones(1)}, {peer: received}, 7), TIMEOUT_S)
        return received.item()

    def leave() -> float:
        values, ticket = begin(0, 5)
        meshes[0].wait(ticket, TIMEOUT_S)
        meshes[0].close()
        has_left.set()
        return float(values.item())

    results = in_threads([leave, *(lambda r=rank: stay(r) for rank in range(1, world_size))])
    close_all(meshes)
    assert results == [1.0] * world_size


def test_a_minimum_that_a_rank_never_joins_names_it() -> None:
    world_size = 20
    meshes = connect_meshes(world_size)
    silent = 5

    def run(rank: int) -> None:
        if rank == silent:
            return
        values = torch.tensor([rank])
        ticket = meshes[rank].post_minimum(values, partners(rank, world_size), channel=5)
        meshes[rank].wait(ticket, 1.0)

    results = in_threads([lambda r=rank: run(r) for rank in range(world_size)])
    close_all(meshes)
    assert results.pop(silent) is None
    assert any("rank 5 did not answer within 1000 ms" in said for said in results), results
    assert all("did not answer" in said or "hung up" in said or "closed" in said for said in results), results


def test_values_that_cannot_be_sent_are_refused() -> None:
    meshes = connect_meshes(2)
    with pytest.raises(ValueError, match=r"a minimum of torch\.float32 is not possible; give int64 or"):
        meshes[0].post_minimum(torch.zeros(2), partners(0, 2), channel=5)
    with pytest.raises(ValueError, match="give contiguous CPU tensors"):
        meshes[0].post_minimum(torch.zeros(4, dtype=torch.int64)[::2], partners(0, 2), channel=5)
    close_all(meshes)
