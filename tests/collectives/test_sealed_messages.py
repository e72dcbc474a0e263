"""Messages whose checksums a thread of the mesh writes and checks, over TCP and through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from support.meshes import OVER, TIMEOUT_S, close_all, connect_meshes, in_threads, make_message, seal

from cgx_ray.runtime_ext.mesh import SEALED_BYTES


@OVER
def test_a_message_for_several_ranks_is_sealed_and_one_with_a_wrong_checksum_is_marked(sharers: Sequence[int]) -> None:
    meshes = connect_meshes(4, 1, sharers)
    sent, empty = make_message(0, 1, 0, 300_000), torch.ones(SEALED_BYTES, dtype=torch.uint8)
    received = [torch.zeros_like(sent) for _ in meshes]
    # Sent by rank 3 as it is.
    tickets = [meshes[0].post({peer: sent for peer in (1, 2, 3)}, {3: received[0]}, is_sealed=True)]
    damaged = make_message(3, 0, 0, 300_000)
    seal(damaged)
    damaged[-1] ^= 1
    tickets += [meshes[rank].post({}, {0: received[rank]}, is_sealed=True) for rank in (1, 2, 3)]
    meshes[3].wait(meshes[3].post({0: damaged}, {}), TIMEOUT_S)
    for mesh, ticket in zip(meshes, tickets, strict=True):
        mesh.wait(ticket, TIMEOUT_S)
    assert all(torch.equal(one, sent) for one in received[1:])
    assert received[0][:2].tolist() == [0, 0]
    assert torch.equal(received[0][2:], damaged[2:])
    # Without elements.
    tickets = [meshes[0].post({1: empty}, {}, is_sealed=True), meshes[1].post({}, {0: empty}, is_sealed=True)]
    for mesh, ticket in zip(meshes, tickets, strict=False):
        mesh.wait(ticket, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="a message with a checksum has 32 bytes or more"):
        meshes[0].post({1: empty[1:]}, {}, is_sealed=True)
    close_all(meshes)


@OVER
def test_sealed_messages_of_a_mesh_that_is_closed_fail_at_both_ends(sharers: Sequence[int]) -> None:
    for _ in range(10):
        meshes = connect_meshes(4, 1, sharers)
        sent = make_message(0, 2, 0, 2_000_000)
        sends = [meshes[0].post({2: sent}, {}, channel=channel, is_sealed=True) for channel in range(8)]
        receive = meshes[2].post({}, {0: torch.zeros_like(sent)}, channel=9, is_sealed=True)
        meshes[0].close()
        waits = [partial(meshes[0].wait, ticket, TIMEOUT_S) for ticket in sends]
        *at_sender, at_receiver = in_threads([*waits, partial(meshes[2].wait, receive, TIMEOUT_S)])
        # The first may have left before.
        assert all(outcome in ([0.0] * 4, "the connections are closed") for outcome in at_sender)
        assert at_receiver == "rank 0 hung up"
        close_all(meshes)
