"""Checksums, keys and random numbers, refused arguments, and what happens without threads or native module."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import ops, reference

BITS = range(1, 9)
SIZES = (0, 1, 7, 127, 128, 129, (1 << 16) + 3)
KEY = ops.message_key(1, 2, 3, 4, 5)


def test_random_numbers_are_uniform_and_neighbours_and_neighbouring_keys_are_uncorrelated() -> None:
    numel = 1 << 18
    u_KN = torch.stack([reference.uniform(numel, key, torch.device("cpu")) for key in (*range(8), KEY)]).double()
    assert u_KN.min() >= 0
    assert u_KN.max() < 1
    limit = 6 / math.sqrt(numel)  # six sigma; a sample correlation has sigma 1 / sqrt(N)
    # A uniform number has variance 1/12, its square has 4/45.
    assert ((u_KN.mean(1) - 0.5).abs() < limit / math.sqrt(12) + 2**-17).all(), u_KN.mean(1)
    assert (((u_KN**2).mean(1) - 1 / 3).abs() < limit * math.sqrt(4 / 45) + 2**-16).all()
    centered_KN = (u_KN - 0.5) * math.sqrt(12)
    for lag in (0, 1, 2, 3, 4, 8, 64, 128, 129, 1024):
        correlation_KK = centered_KN[:, lag:] @ centered_KN[:, : numel - lag].T / (numel - lag)
        if lag == 0:
            correlation_KK.fill_diagonal_(0)
        worst = correlation_KK.abs().max().item()
        assert worst < limit * 1.01, f"lag {lag}: correlation {worst}, limit {limit}"


def test_message_keys_of_neighbouring_messages_all_differ() -> None:
    numbers = range(6)
    keys = [
        ops.message_key(seed, step, group, rank, phase)
        for seed in numbers
        for step in numbers
        for group in numbers
        for rank in numbers
        for phase in (0, 1)
    ]
    # 2,592 random keys of 32 bits would collide in one of 1,300 tests; these keys are always the same.
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 32 for key in keys)
    ones = [sum(key >> bit & 1 for key in keys) / len(keys) for bit in range(32)]
    assert max(abs(share - 0.5) for share in ones) < 5 * 0.5 / math.sqrt(len(keys)), ones


def test_a_hash_is_the_same_of_an_int_and_of_a_tensor() -> None:
    keys = [0, 1, KEY, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    assert [reference.lowbias32(key) for key in keys] == reference.lowbias32(torch.tensor(keys)).tolist()
    assert [reference.random_below(key, 1 << 32) for key in keys] == [reference.lowbias32(key) for key in keys]


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_gives_the_published_check_values(data: bytes, crc: int) -> None:
    assert ops.crc32c(_bytes(data)) == crc
    assert reference.crc32c(_bytes(data), 0) == crc


@pytest.mark.parametrize("size", [1, 7, 8, 9, 12_287, 12_288, 12_289, 24_583])
def test_native_crc32c_equals_the_reference_at_every_block_edge_and_at_odd_addresses(size: int) -> None:
    data = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    assert ops.crc32c(data[1:], seed=99) == reference.crc32c(data[1:], 99)


def test_crc32c_of_the_parts_in_turn_is_that_of_the_whole() -> None:
    data = torch.randint(0, 256, (40_000,), dtype=torch.uint8)
    for cut in (0, 1, 12_288, 25_001, 40_000):
        assert ops.crc32c(data[cut:], seed=ops.crc32c(data[:cut])) == ops.crc32c(data)


def test_crc32c_notices_a_single_flipped_bit_and_reads_strided_tensors() -> None:
    data = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    flipped = data.clone()
    flipped[7777] ^= 4
    assert ops.crc32c(flipped) != ops.crc32c(data)
    assert ops.crc32c(data[::2]) == ops.crc32c(data[::2].contiguous())


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_payload_size_is_what_codec_spec_says_and_any_other_is_refused(bits: int, numel: int) -> None:
    size = CodecSpec(name="qsgd", bits=bits, bucket_size=128).payload_bytes(numel)
    for wrong in (size + 1, size - 1)[: 2 if size else 1]:
        payload = torch.empty(wrong, dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"has {wrong} bytes.* take {size} bytes"):
            ops.qsgd_encode(torch.randn(numel), payload, bits=bits, bucket_size=128, key=0)
        with pytest.raises(ValueError, match=rf"has {wrong} bytes.* take {size} bytes"):
            ops.qsgd_decode(payload, torch.empty(numel), bits=bits, bucket_size=128)


def test_wrong_arguments_are_refused_by_name() -> None:
    grad_N, out = torch.randn(128), torch.empty(68, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bits 9 is not allowed; give 1 to 8"):
        ops.qsgd_encode(grad_N, out, bits=9, bucket_size=128, key=0)
    with pytest.raises(ValueError, match="bucket_size 12 is not allowed"):
        ops.qsgd_encode(grad_N, out, bits=4, bucket_size=12, key=0)
    with pytest.raises(ValueError, match="key -1 is not a 32-bit number"):
        ops.qsgd_encode(grad_N, out, bits=4, bucket_size=128, key=-1)
    with pytest.raises(TypeError, match=r"grad_N is torch\.float64"):
        ops.qsgd_encode(grad_N.double(), out, bits=4, bucket_size=128, key=0)
    with pytest.raises(TypeError, match=r"out is torch\.int8"):
        ops.qsgd_encode(grad_N, out.view(torch.int8), bits=4, bucket_size=128, key=0)
    with pytest.raises(ValueError, match="1-D"):
        ops.qsgd_encode(grad_N.view(2, 64), out, bits=4, bucket_size=128, key=0)
    with pytest.raises(TypeError, match=r"out_N is torch\.float16"):
        ops.qsgd_decode(out, grad_N.half(), bits=4, bucket_size=128)
    with pytest.raises(TypeError, match=r"data is torch\.float32"):
        ops.crc32c(grad_N)


_WITHOUT_MORE_THREADS = """
import os, resource, threading, torch
from cgx_ray.runtime_ext import ops

options = {"bits": 4, "bucket_size": 128, "key": 7}
grad_N = torch.randn(1 << 20)
torch.set_num_threads(1)


def encoded(num_threads):
    payload = torch.zeros(ops.qsgd_bytes(grad_N.numel(), 4, 128, "max_min"), dtype=torch.uint8)
    torch.set_num_threads(num_threads)
    ops.qsgd_encode(grad_N, payload, **options)
    torch.set_num_threads(1)  # torch itself fails if it cannot start threads
    return payload


alone = encoded(1)
num_before = len(os.listdir("/proc/self/task"))
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Room for less than the stack of one thread, but for everything else.
resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20), hard))
try:
    threading.Thread(target=int).start()
    raise AssertionError("a thread starts all the same")
except RuntimeError as error:
    assert "start new thread" in str(error), error
assert torch.equal(encoded(4), alone)
assert len(os.listdir("/proc/self/task")) == num_before
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
assert torch.equal(encoded(4), alone)
num_after = len(os.listdir("/proc/self/task"))
assert num_after == num_before + 3, (num_before, num_after)
"""


def test_a_kernel_works_without_threads_that_the_system_refuses_to_start() -> None:
    # With stacks of 1 GiB, a limit of memory stops threads and nothing else.
    command = ["sh", "-c", 'ulimit -S -s 1048576 && exec "$@"', "sh", sys.executable, "-c", _WITHOUT_MORE_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_native_module_is_one_error_that_says_how_to_build_it() -> None:
    code = "import sys; sys.modules['cgx_ray.runtime_ext._native'] = None; import cgx_ray.runtime_ext.ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "_native is missing or does not load; build it: pip install -e ." in done.stderr
