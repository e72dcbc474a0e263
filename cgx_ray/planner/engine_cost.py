"""Cost of a group to the engine besides its codec and its bytes: it depends on where the gradients are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cgx_ray.errors import ConfigError
from cgx_ray.plan import PIECE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """How the engine handles groups whose gradients lie on one kind of device. By default it is the host.

    thread_s             seconds of its thread per group besides codec and messages; where it codes rows, per piece
    message_s            seconds of its thread per message that it takes in: Python between the turns, posts. Too much
                         for short messages over sra and allgather, which are posted together
    byte_s               seconds per byte that it encodes or decodes: checksums, which over sra and allgather another
                         thread computes. On the host they are part of `message_s`
    piece_bytes          encoded bytes of a piece
    codes_rows           True: over sra, the messages of a piece to all others are encoded in one call, and those from
                         all others decoded in one; and each piece costs as much as a group
    vendor_window_bytes  bytes that the vendor has under way between two ranks at most; None: no such limit
    """

    # Processor time of 2 to 64 groups of 64 KB and more over sra was 0.31 ms per group with 2 ranks (3 messages) and
    # 0.77 ms with 4 (7 messages), AMD EPYC, Zen 5, before short messages were posted together.
    thread_s: float = 1e-4
    message_s: float = 1e-4
    byte_s: float = 0.0
    piece_bytes: int = PIECE_BYTES
    codes_rows: bool = False
    # TCP's default windows. Over Gloo with 1 Gbit/s and 10 ms one way, 102 MB in 5 groups took 1.6 s where the bytes
    # alone take 1.2; one group of 100 MB 2.3 s, with 25 ms 4.5 s. Our own connections are set up for long paths.
    vendor_window_bytes: int | None = 2 << 20

    def __post_init__(self) -> None:
        for name in ("thread_s", "message_s", "byte_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} {value!r} is not allowed; give finite seconds, 0 or more")
        for name in ("piece_bytes", "vendor_window_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value!r} is not allowed; give 1 or more")


# Of groups that the host encodes and sums, also those of a GPU (`Option.is_on_host`).
HOST_ENGINE = EngineCost()
