"""TCP connections between all ranks of a run, moved by a thread of their own in C++."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .checks import native

TOKEN_BYTES: int = native.Mesh.TOKEN_BYTES


class Mesh:
    """Tensors in, tensors out. Messages are pushed as soon as they are posted; the n-th receive from a rank takes its
    n-th send.

    address  numeric IP address to listen on, at `port`, which the kernel picks
    token    TOKEN_BYTES secret bytes that all ranks of the run have; whoever does not present them is hung up on

    Raises RuntimeError if the address is not this machine's.
    """

    def __init__(self, rank: int, world_size: int, num_streams: int, address: str, token: bytes) -> None:
        self.address = address
        self._native = native.Mesh(rank, world_size, num_streams, address, token)
        self._posted: dict[int, object] = {}

    @property
    def port(self) -> int:
        return self._native.port

    def connect(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> None:
        """Connect to all ranks at `addresses`, by rank. Raises RuntimeError that names those who did not come."""
        self._native.connect(list(addresses), timeout_s)

    def post(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> int:
        """Begin to send and receive contiguous CPU tensors, by rank, and return a ticket for `wait`.

        Sent tensors must stay as they are until `wait` returns.
        """
        ticket = self._native.post(_parts(sends), _parts(receives))
        self._posted[ticket] = (sends, receives)
        return ticket

    def wait(self, ticket: int, timeout_s: float) -> list[float]:
        """Return when everything posted under `ticket` is done: by rank, the seconds from `post` to when the kernel got
        the end of its last message; less than 0 if that was before, 0 without a message.

        Raises RuntimeError that names the ranks that did not answer within `timeout_s`, hung up, or sent a message of
        another size; all connections are closed then.
        """
        arrived_s = self._native.wait(ticket, timeout_s)
        del self._posted[ticket]
        return arrived_s

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """(rank, bytes, seconds) of what arrived in long messages since the last call, some 50 ms each.

        By the kernel's time stamps, so neither late ranks nor busy processors count. Rank -1 is all of them together,
        which is what this rank's link carries. The newest 1,024 if nobody called for long.
        """
        return self._native.take_bursts()

    def close(self) -> None:
        """Hang up. What is under way fails, on both ends."""
        self._native.close()


def _parts(messages: Mapping[int, Tensor]) -> list[tuple[int, int, int]]:
    for rank, tensor in messages.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"the message for rank {rank} is on {tensor.device} or strided; give contiguous CPU tensors"
            )
    return [(rank, tensor.data_ptr(), tensor.numel() * tensor.element_size()) for rank, tensor in messages.items()]
