"""Strangers at the port where a rank waits for the one before it, for signs of life."""

from __future__ import annotations

import pytest
from support.meshes import TIMEOUT_S, in_threads
from support.strangers import HOST, is_hung_up, strangers

from cgx_ray.collectives.transport.lifeline import TOKEN_BYTES, Lifeline

TOKEN = bytes(range(TOKEN_BYTES))


@pytest.mark.fault("1,000 silent connections where ranks wait for signs of life", "the ranks connect all the same")
@pytest.mark.parametrize("says", [b"", TOKEN[: TOKEN_BYTES // 2 - 1], bytes(TOKEN_BYTES)])
def test_a_thousand_strangers_before_the_ranks_do_not_stop_them(says: bytes) -> None:
    ring = [Lifeline(rank, 3, HOST, silent_s=TIMEOUT_S) for rank in range(3)]
    addresses = [lifeline.address for lifeline in ring]
    with strangers(addresses[1][1], 1000, says) as others:
        assert in_threads([lambda one=lifeline: one.connect(addresses, TOKEN, TIMEOUT_S) for lifeline in ring]) == [
            None
        ] * len(ring)
        assert all(is_hung_up(one) for one in others)
    ring[0].report_failure("a reason")
    assert {lifeline.wait(TIMEOUT_S) for lifeline in ring} == {"rank 0: a reason"}
    for lifeline in ring:
        lifeline.close()


def test_silent_strangers_are_hung_up_on_while_a_rank_is_missing() -> None:
    ring = [Lifeline(rank, 2, HOST, silent_s=TIMEOUT_S) for rank in range(2)]
    addresses = [lifeline.address for lifeline in ring]
    with strangers(addresses[0][1], 1000) as others:

        def come_last() -> None:
            assert all(is_hung_up(one) for one in others)
            ring[1].connect(addresses, TOKEN, TIMEOUT_S)

        assert in_threads([lambda: ring[0].connect(addresses, TOKEN, 2 * TIMEOUT_S), come_last]) == [None, None]
    for lifeline in ring:
        lifeline.close()
