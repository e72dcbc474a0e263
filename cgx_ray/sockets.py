"""TCP connections of this process, and what the kernel knows of them."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

_FOLDER = "/proc/self/fd"
# Of Linux's struct tcp_info, in order, until the last field that is read.
_INFO = struct.Struct("=8B24I4Q6I4QII2Q")
# What the kernel reports before it has measured a round trip.
_UNKNOWN_US = 0xFFFFFFFF


class TcpInfo(NamedTuple):
    """Counters of a connection since it was opened, and its last measurements.

    num_timeouts          time-outs in a row for the same data: above 2, nothing that is sent arrives any more
    segment_bytes         largest payload of a packet that is sent
    path_mtu              largest packet that the path is known to carry, with headers
    least_round_trip_s    None before the first measurement
    bytes_per_s           rate at which data arrived last, 0 if unknown; less than the link's if there was less to send
    busy_s                seconds with data under way
    receiver_limited_s    of these, those in which the receiver had no room
    """

    num_timeouts: int
    segment_bytes: int
    path_mtu: int
    round_trip_s: float
    least_round_trip_s: float | None
    bytes_per_s: float
    busy_s: float
    receiver_limited_s: float
    sent_bytes: int
    resent_bytes: int
    received_bytes: int


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Return what the kernel knows of a connection; None where it does not say: no Linux, or one before 4.19."""
    if sys.platform != "linux":
        return None
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(raw) < _INFO.size:
        return None
    fields = _INFO.unpack(raw)
    words, counters, segments, rates = fields[8:32], fields[32:36], fields[36:42], fields[42:46]
    least_us = segments[3]
    return TcpInfo(
        num_timeouts=fields[2],
        segment_bytes=words[2],
        path_mtu=words[13],
        round_trip_s=1e-6 * words[15],
        least_round_trip_s=1e-6 * least_us if 0 < least_us < _UNKNOWN_US else None,
        bytes_per_s=float(rates[0]),
        busy_s=1e-6 * rates[1],
        receiver_limited_s=1e-6 * rates[2],
        sent_bytes=fields[48],
        resent_bytes=fields[49],
        received_bytes=counters[3],
    )


def tcp_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each TCP socket of this process, which is closed when the next one is asked for.

    Raises OSError if the process may open no more files.
    """
    for name in os.listdir(_FOLDER):
        try:
            if not os.readlink(f"{_FOLDER}/{name}").startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:
            continue  # closed meanwhile
        try:
            # Without the flag, Python would give it the program's default time-out, and with that make it non-blocking
            # for all holders. The flag itself sets nothing on a descriptor that is there.
            opened = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
        except OSError:
            os.close(copy)  # no family that Python knows
            continue
        with opened:
            kind = opened.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
            if opened.family in (socket.AF_INET, socket.AF_INET6) and kind == socket.SOCK_STREAM:
                yield opened
