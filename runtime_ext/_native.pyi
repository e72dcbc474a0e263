# Addresses are those of Tensor.data_ptr(), 0 for None. Nothing here checks them; ops.py and sparse.py do.
from collections.abc import Sequence
from typing import overload

class Mesh:
    TOKEN_BYTES: int
    SEALED_BYTES: int

    def __init__(
        self,
        rank: int,
        world_size: int,
        num_streams: int,
        address: str,
        token: bytes,
        far_s: float,
        ports: tuple[int, int],
    ) -> None: ...
    @property
    def port(self) -> int: ...
    def connect(
        self, addresses: Sequence[tuple[str, int]], timeout_s: float, segment: Segment | None, sharers: Sequence[int]
    ) -> None: ...
    def post(
        self,
        sends: Sequence[tuple[int, int, int]],
        receives: Sequence[tuple[int, int, int]],
        channel: int,
        is_sealed: bool,
    ) -> int: ...
    def post_minimum(
        self, values: int, num_bytes: int, is_int64: bool, rounds: Sequence[Sequence[int]], channel: int
    ) -> int: ...
    def wait(self, ticket: int, timeout_s: float, waited_s: float) -> list[float]: ...
    def wait_any(self, tickets: Sequence[int], timeout_s: float) -> int | None: ...
    def is_over(self, ticket: int) -> bool: ...
    def has_failed(self, ticket: int) -> bool: ...
    def wake(self) -> None: ...
    def take_bursts(self) -> list[tuple[int, int, float]]: ...
    def close(self) -> None: ...
    def close_copies(self) -> None: ...

class Heartbeat:
    def __init__(self, sockets: Sequence[int], beat: bytes, every_s: float) -> None: ...
    def stop(self) -> None: ...
    def close_copy(self) -> None: ...

class Segment:
    SLOT_BYTES: int

    @overload
    def __init__(self, num_ranks: int) -> None: ...
    @overload
    def __init__(self, num_ranks: int, name: str, nonce: bytes) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def nonce(self) -> bytes: ...
    def unlink(self) -> None: ...

class LocalGroup:
    def __init__(self, segment: Segment, rank: int, names: Sequence[int], timeout_s: float) -> None: ...
    def reduce_scatter(self, values_N: int, type: int, bounds: Sequence[tuple[int, int]]) -> None: ...
    def all_gather(self, values_N: int, type: int, bounds: Sequence[tuple[int, int]]) -> None: ...
    def all_reduce(self, values_N: int, numel: int, type: int) -> None: ...

def instruction_sets() -> list[str]: ...
def crc32c(data: int, num_bytes: int, seed: int) -> int: ...
def qsgd_encode(
    grad_N: int,
    residual_N: int,
    next_N: int,
    numel: int,
    out: int,
    bits: int,
    bucket_size: int,
    grid: int,
    key: int,
    stochastic: bool,
    num_threads: int,
) -> None: ...
def qsgd_decode(
    payload: int, out_N: int, numel: int, bits: int, bucket_size: int, grid: int, add: bool, num_threads: int
) -> None: ...
def sign_encode(
    grad_N: int,
    residual_N: int,
    next_N: int,
    numel: int,
    out: int,
    bucket_size: int,
    kind: int,
    num_threads: int,
) -> None: ...
def sign_decode(
    payload: int, out_N: int, numel: int, bucket_size: int, kind: int, add: bool, num_threads: int
) -> None: ...
def poison(grad_N: int, numel: int, num_threads: int) -> float: ...
def add_poison(grad_N: int, numel: int, value_K: int, num_threads: int) -> None: ...
def add_momentum(
    grad_N: int,
    momentum_N: int,
    residual_N: int,
    next_momentum_N: int,
    next_N: int,
    numel: int,
    factor: float,
    scale: float,
    num_threads: int,
) -> None: ...
def topk_select(
    grad_N: int,
    residual_N: int,
    next_N: int,
    numel: int,
    ends_L: int,
    kept_ends_L: int,
    num_layers: int,
    index_K: int,
    value_K: int,
    num_kept: int,
    num_threads: int,
) -> None: ...
def topk_encode(
    grad_N: int,
    residual_N: int,
    next_N: int,
    numel: int,
    ends_L: int,
    kept_ends_L: int,
    num_layers: int,
    payload: int,
    index_K: int,
    value_K: int,
    num_kept: int,
    num_threads: int,
) -> None: ...
def magnitude_histogram(grad_N: int, numel: int, counts: int, num_threads: int) -> None: ...
def bisect_thresholds(
    grad_N: int, numel: int, num_kept: int, num_rounds: int, thresholds_2: int, num_threads: int
) -> None: ...
def rank_thresholds(grad_N: int, numel: int, rank: int, thresholds_2: int, num_threads: int) -> None: ...
def sidco_thresholds(
    grad_N: int, numel: int, ratios: Sequence[float], num_kept: int, thresholds_2: int, num_threads: int
) -> None: ...
def collect(
    grad_N: int,
    numel: int,
    thresholds_2: int,
    key: int,
    index_K: int,
    value_K: int,
    num_kept: int,
    count_1: int,
    num_threads: int,
) -> None: ...
def random_indices(numel: int, key: int, index_K: int, num_kept: int) -> None: ...
def pack_indices(index_K: int, count_1: int, num_kept: int, numel: int, out: int) -> None: ...
def unpack_indices(packed: int, count_1: int, num_kept: int, numel: int, index_K: int) -> bool: ...
def scatter_add(index_K: int, value_K: int, count_1: int, num_kept: int, out_N: int, numel: int) -> None: ...
def scatter_zero(index_K: int, count_1: int, num_kept: int, out_N: int, numel: int) -> None: ...
def pack_message(index_K: int, value_K: int, count_1: int, num_kept: int, numel: int, payload: int) -> None: ...
def unpack_message(
    payload: int, index_K: int, num_kept: int, out_N: int, numel: int, add: bool, num_threads: int
) -> bool: ...
