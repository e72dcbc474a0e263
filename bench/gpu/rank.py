"""One rank of `python -m bench gpu`: trains models whose backward lasts a known time, on the GPU that all ranks share.

Rank 0 writes the name of each part when it begins, and at the end a `GpuRecord` as JSON.
"""

from __future__ import annotations

import gc
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from bench.shared.rank_process import run_rank, start_together
from bench.shared.ranks import BenchError
from bench.step.sleeping_model import BackwardClock, SleepingModel, fixed_gradients
from bench.step.torch_hooks import register_hook
from cgx_ray.codecs import make_codec
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext.streams import Mark, streams_of
from cgx_ray.session.attachment import Attachment

STREAMS = streams_of(torch.device("cuda", 0))
_MIB = 1 << 20
# Of ten layers, each is a group and a bucket of DDP.
APART_SHAPES = [(2048, 4096)] * 10
APART_BACKWARD_S = 0.02
# 350 M parameters: token embeddings and 24 blocks of a transformer of width 1,024.
_BLOCK = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)]
LARGE_SHAPES = [(50304, 1024), *(shape for _ in range(24) for shape in _BLOCK)]
LARGE_BACKWARD_S = 0.18
CODEC, SCHEME = "qsgd:bits=4,bucket_size=128", "sra"
# Codec of each way to average, as `_Way` takes it. qsgd before other users of pinned memory, of which torch keeps all.
WAYS = {"noop": "noop", "qsgd": CODEC, "dense": "none", "ddp": None}
NUM_PARTS = len(WAYS) + 2
# Gains are measured in steps 1 and 3.
WARM_UP_STEPS, TIMED_STEPS = 5, 3
# Calls of CUDA that are counted. CuPy launches kernels by the driver's.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
# By threads that do nothing else.
WATCHES = ("cudaEventSynchronize",)
# In a step they wait as well.
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


@dataclass(slots=True, kw_only=True)
class GpuRecord:
    """Measurements of rank 0; seconds of steps are those of the slowest rank.

    lags_s      from each group's gradient to the begin of its encoding
    calls       of CUDA by all threads in one step, by name, less those of a step without exchange
    num_groups  of the model whose calls were counted
    step_s      of the large model, by the way to average
    thread_s    processor time of the engine's thread in a step of the large model, by the way
    num_groups_large  of the large model
    wire_s      to exchange as many bytes by plain sockets as a step of the large model sends
    device_bytes, pinned_bytes  most that torch keeps more for the large model, by the way
    """

    lags_s: list[float] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    num_groups: int = 0
    step_s: dict[str, float] = field(default_factory=dict)
    thread_s: dict[str, float] = field(default_factory=dict)
    num_groups_large: int = 0
    wire_s: float = 0.0
    device_bytes: dict[str, int] = field(default_factory=dict)
    pinned_bytes: dict[str, int] = field(default_factory=dict)


class _KernelClock:
    """Lets the device sleep each layer's share of backward, and marks when its gradient is computed.

    All hooks are called while the device still sleeps, as in a real training.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        cycles = APART_BACKWARD_S * len(shares) * _cycles_a_second()
        self._cycles = [int(share * cycles) for share in shares]

    def begin(self) -> None:
        self._begun = STREAMS.mark()
        STREAMS.wait_for_all()
        self._begin_s = time.perf_counter()
        self._computed: list[Mark] = []

    def wait(self, index: int) -> None:
        torch.cuda._sleep(self._cycles[index])
        self._computed.append(STREAMS.mark())

    def computed_s(self) -> list[float]:
        """Return the host time of each gradient, in the order of backward. The device must have done all."""
        return [self._begin_s + mark.seconds_since(self._begun) for mark in self._computed]


_MakeClock = Callable[[Sequence[float]], BackwardClock | _KernelClock]


class _Way:
    """One way to average the gradients of one model."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], codec: str | None, bucket_mb: int, make_clock: _MakeClock
    ) -> None:
        """
        codec       None averages by DDP alone; "noop" not at all
        make_clock  gets each layer's share of backward, in the order of backward
        """
        gradients = [gradient.cuda() for gradient in fixed_gradients(shapes, seed=dist.get_rank())]
        total = sum(gradient.numel() for gradient in gradients)
        self.clock = make_clock([gradient.numel() / total for gradient in reversed(gradients)])
        names = [f"layer{index}" for index in range(len(shapes))]
        self.model = DistributedDataParallel(
            SleepingModel(names, gradients, self.clock),  # type: ignore[arg-type]  # both begin and wait
            bucket_cap_mb=bucket_mb,
            init_sync=False,
            gradient_as_bucket_view=True,
        )
        self.attachment: Attachment | None = None
        if codec == "noop":
            register_hook(self.model, "noop")
        elif codec is not None:
            scheme = "dense" if codec == "none" else SCHEME
            self.attachment = cgx_ray.attach(
                self.model, codec=codec, scheme=scheme, shared_memory=False, weight_check_steps=0
            )

    def step(self) -> float:
        """Return the seconds until the averages are there."""
        self.model.zero_grad(set_to_none=True)
        start_together(0.01)
        loss = self.model(torch.zeros((), device="cuda"))
        self.clock.begin()
        begin_s = time.perf_counter()
        loss.backward()
        STREAMS.wait_for_all()
        return time.perf_counter() - begin_s

    def num_groups(self) -> int:
        assert self.attachment is not None
        assert self.attachment.plan is not None
        return len(self.attachment.plan.groups)


def _host_clock(shares: Sequence[float]) -> BackwardClock:
    """Return a clock whose backward sleeps on the host: kernels of two processes would take turns on one GPU."""
    return BackwardClock([LARGE_BACKWARD_S * share for share in shares])


@contextmanager
def _at_work(
    shapes: Sequence[tuple[int, ...]],
    codec: str | None,
    bucket_mb: int = 25,
    make_clock: _MakeClock = _host_clock,
) -> Iterator[_Way]:
    way = _Way(shapes, codec, bucket_mb, make_clock)
    try:
        for _ in range(WARM_UP_STEPS):
            way.step()
        yield way
    finally:
        if way.attachment is not None:
            way.attachment.close()


def _cycles_a_second() -> float:
    """Return how many cycles of `torch.cuda._sleep` the device does in a second."""
    torch.cuda._sleep(10_000_000)
    STREAMS.wait_for_all()
    begin_s = time.perf_counter()
    torch.cuda._sleep(100_000_000)
    STREAMS.wait_for_all()
    return 1e8 / (time.perf_counter() - begin_s)


def _measure_overlap(record: GpuRecord) -> None:
    with _at_work(APART_SHAPES, CODEC, 1, _KernelClock) as way:
        way.step()
        record.num_groups = way.num_groups()
        # The last layer is computed first, as its group is.
        assert isinstance(way.clock, _KernelClock)
        assert way.attachment is not None
        computed_s = sorted(way.clock.computed_s())
        begun_s: dict[int, float] = {}
        for span in way.attachment.last_spans:
            if span.phase == "encode":
                begun_s[span.group] = min(span.begin_s, begun_s.get(span.group, span.begin_s))
        if len(begun_s) != len(computed_s):
            raise BenchError(f"{len(begun_s)} groups encode {len(computed_s)} layers; each has to be a group")
        record.lags_s = [begun - done for begun, done in zip(sorted(begun_s.values()), computed_s, strict=True)]
        calls = _calls(way)
    with _at_work(APART_SHAPES, "noop", 1, _KernelClock) as way:
        calls.subtract(_calls(way))
    record.calls = dict(calls)


def _calls(way: _Way) -> Counter[str]:
    """Return how often all threads call CUDA in one step, and copies by their direction."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        way.step()
    names = Counter[str]()
    for event in profile.events():
        if event.name.startswith(("cuda", "cuLaunch", "Memcpy")):
            names[event.name] += 1
    return names


def _measure_large(record: GpuRecord, way_name: str, codec: str | None) -> None:
    # The model before lived as long as the frame of this function.
    gc.collect()
    STREAMS.wait_for_all()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    device_before, pinned_before = torch.cuda.memory_reserved(), _pinned_bytes()
    with _at_work(LARGE_SHAPES, codec) as way:
        cpu_s = _engine_cpu_s()
        seconds = torch.tensor([way.step() for _ in range(TIMED_STEPS)], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        record.step_s[way_name] = median(seconds.tolist())
        record.device_bytes[way_name] = torch.cuda.max_memory_reserved() - device_before
        record.pinned_bytes[way_name] = _pinned_bytes() - pinned_before
        if way.attachment is not None:
            record.thread_s[way_name] = (_engine_cpu_s() - cpu_s) / TIMED_STEPS
            record.num_groups_large = way.num_groups()


def _pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _engine_cpu_s() -> float:
    """Return the seconds that the engine's thread has run; 0 without one."""
    total_ns = 0
    for thread in threading.enumerate():
        if thread.name == "cgx-ray-engine" and thread.native_id is not None:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            total_ns += int(text.split()[0])
    return 1e-9 * total_ns


def _measure_wire(record: GpuRecord, num_bytes: int) -> None:
    """Send `num_bytes` from each of two ranks to the other, both at once, by plain sockets."""
    rank = dist.get_rank()
    port: list[Any] = [None]
    if rank == 0:
        server = socket.create_server(("127.0.0.1", 0))
        port = [server.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    link = server.accept()[0] if rank == 0 else socket.create_connection(("127.0.0.1", port[0]))
    with link:
        room = bytearray(_MIB)
        start_together(0.05)
        begin_s = time.perf_counter()
        sender = threading.Thread(target=link.sendall, args=(bytes(num_bytes),))
        sender.start()
        left = num_bytes
        while left:
            left -= link.recv_into(room, min(_MIB, left))
        sender.join()
        record.wire_s = time.perf_counter() - begin_s
    if rank == 0:
        server.close()


def _measure(job: dict[str, Any]) -> None:
    torch.cuda.set_device(0)
    record = GpuRecord()

    def begin(part: str) -> None:
        if job["rank"] == 0:
            print(part, flush=True)

    for way_name, codec in WAYS.items():
        begin(f"350 M parameters: {way_name}")
        _measure_large(record, way_name, codec)
    begin("overlap and calls")
    _measure_overlap(record)
    begin("wire")
    numel = sum(map(math.prod, LARGE_SHAPES))
    # Of two ranks each sends half of the gradient, and half of the average.
    _measure_wire(record, make_codec(CodecSpec.parse(CODEC)).payload_bytes(numel))
    if job["rank"] == 0:
        print(json.dumps(asdict(record)), flush=True)
    dist.barrier()


if __name__ == "__main__":
    run_rank(_measure)
