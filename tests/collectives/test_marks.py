"""A transport takes a point in a stream of a device as a handle, beside messages."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from support.device.marks import GivenMark
from support.ranks import run_ranks

from cgx_ray.collectives import Transport
from cgx_ray.collectives.transport.tcp import connect_mesh
from cgx_ray.errors import PeerTimeoutError, TransportError

PATIENCE_S = 20.0


def _transport() -> Transport:
    group = dist.group.WORLD
    assert group is not None
    return Transport(group, mesh=connect_mesh(group, PATIENCE_S), timeout_s=PATIENCE_S)


def _wait_beside_messages(rank: int) -> list[int | None]:
    """Return what `wait_any` finds of a mark and a receive, when neither, the receive, and both are done."""
    transport = _transport()
    mark, received, found = GivenMark(), torch.zeros(4), []
    handle = transport.start({}, {1 - rank: received})
    found.append(transport.wait_any([mark, handle], 0.0))
    dist.barrier()
    sent = transport.start({1 - rank: torch.ones(4)}, {})
    while (place := transport.wait_any([mark, handle], PATIENCE_S)) is None:
        pass
    found.append(place)
    transport.finish(handle)
    transport.finish(sent)
    # The thread that waits for the mark wakes this one.
    threading.Thread(target=lambda: mark.is_awaited.wait(PATIENCE_S) and mark.set()).start()
    while (place := transport.wait_any([mark], PATIENCE_S)) is None:
        pass
    found.append(place)
    transport.finish(mark)
    dist.barrier()
    transport.close()
    return found


def test_the_first_handle_that_is_done_is_found_be_it_a_message_or_a_mark() -> None:
    assert run_ranks(2, _wait_beside_messages) == [[None, 1, 0]] * 2


def _broken_sums(rank: int) -> None:
    transport = _transport()
    mark = GivenMark()
    with pytest.raises(PeerTimeoutError, match="work of the device did not get through"):
        transport.finish(mark, PATIENCE_S)
    mark.set()
    transport.finish(mark)
    dist.barrier()
    transport.abort()
    with pytest.raises(TransportError, match="the connections are closed"):
        transport.finish(mark)


def test_a_sum_of_the_device_that_was_aborted_or_does_not_end_is_no_result() -> None:
    run_ranks(2, _broken_sums)
