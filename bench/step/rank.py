"""One rank of `python -m bench step` or `peers`: the ways take turns, each with a model of its own.

Rank 0 writes the name of a way after each of its turns, and at the end a `StepRecord` as JSON.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench.shared.rank_process import run_rank, start_together
from bench.shared.ranks import BenchError
from bench.step.averaging import Averaging, EngineAveraging, TorchRounds
from bench.step.cases import Kind, StepNetwork, StepWay
from bench.step.grace import Grace
from bench.step.plans import plan_of, timed_codecs
from bench.step.sleeping_model import BackwardClock, SleepingModel, fixed_gradients
from bench.step.torchft_rounds import TorchFtRounds
from bench.step.workload import Workload
from cgx_ray.engine.chrome_trace import PhaseSpan
from cgx_ray.plan import DEFAULT_GROUP_BYTES, CodecSpec, Plan
from cgx_ray.planner.bits import WIDTHS
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.session.calibrate import measure_codec, measure_errors

# Per turn, not counted, at least one round: DDP rebuilds its buckets after the first step, torch's PowerSGD sends two
# steps whole and allocates in the third, and TCP connections begin slowly.
_WARM_UP_STEPS = 3
# Others are DDP itself or a hook of torch.
_AVERAGINGS: Mapping[Kind, type[Averaging]] = {
    "local_sgd": TorchRounds,
    "torchft_local_sgd": TorchFtRounds,
    "torchft_diloco": TorchFtRounds,
    "grace": Grace,
}


class _Runner:
    """One way at work. `step` starts when all ranks are ready and takes `lead_s` to agree on that."""

    def __init__(
        self,
        way: StepWay,
        model: DistributedDataParallel,
        averaging: Averaging,
        clock: BackwardClock,
        lead_s: float,
    ) -> None:
        self.way = way
        self._model, self._averaging = model, averaging
        self._clock = clock
        self._lead_s = lead_s

    def step(self) -> tuple[float, float]:
        """Do one step, or a round. Return its start, as of `time.perf_counter`, and the seconds of a step."""
        began_s = start_together(self._lead_s)
        for _ in range(self.way.period):
            self._model.zero_grad(set_to_none=True)
            loss = self._model(torch.zeros(()))
            self._clock.begin()
            loss.backward()
            self._averaging.end_step()
        self._averaging.end_round()
        return began_s, (time.perf_counter() - began_s) / self.way.period

    def check(self) -> None:
        """Raise BenchError unless all ranks hold the same averages, if that is what they should."""
        if self.way.kind in ("noop", "truncated") or self.way.period > 1:
            return
        averages = [parameter.grad for parameter in self._model.parameters()]
        sums_L = torch.stack([average.sum(dtype=torch.float64) for average in averages if average is not None])
        least_L, most_L = sums_L.clone(), sums_L.clone()
        dist.all_reduce(least_L, op=dist.ReduceOp.MIN)
        dist.all_reduce(most_L, op=dist.ReduceOp.MAX)
        if not torch.equal(least_L, most_L):
            num_layers = int((least_L != most_L).sum())
            raise BenchError(f"{self.way.name}: ranks hold different averages of {num_layers} layers")

    def spans(self, began_s: float) -> list[PhaseSpan]:
        """Return what the engine's groups did in the newest step, which began at `began_s`."""
        rank = dist.get_rank()
        return [
            PhaseSpan(rank, span.group, span.phase, max(span.begin_s - began_s, 0.0), span.end_s - began_s)
            for span in self._averaging.last_spans
        ]


class _Rank:
    """State that the ways of one rank share.

    plans        in force at the newest turn of each way of the engine
    codec_costs  by `str(CodecSpec)`; empty on loopback, where nothing can be planned
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._network = StepNetwork(**job["network"])
        self._workload = Workload.load(
            job["model"], backward_s=job["backward_s"], num_ranks=job["world_size"], divisor=job["divisor"]
        )
        self._gradients: Sequence[Tensor] = fixed_gradients(self._workload.shapes, seed=job["rank"])
        self.ways = [StepWay(**way) for way in job["ways"]]
        self.codec_costs = _codec_costs(self.ways) if self._network.link is not None else {}
        self.plans: dict[str, Plan] = {}

    @contextmanager
    def at_work(self, way: StepWay) -> Iterator[_Runner]:
        """Build the model of `way` with what averages it, and end both. Only one at a time fits into memory."""
        workload = self._workload
        clock = BackwardClock(workload.backward_s)
        model = DistributedDataParallel(
            SleepingModel([layer.name for layer in workload.layers], self._gradients, clock),
            bucket_cap_mb=workload.bucket_cap_mb(way),
            init_sync=False,
            # On a processor the copies between gradients and buckets cost time that a GPU does not need.
            gradient_as_bucket_view=True,
        )
        averaging: Averaging
        if way.has_engine:
            group_bytes = round(DEFAULT_GROUP_BYTES / workload.divisor) if workload.divisor > 1 else None
            averaging = EngineAveraging(model, way, self._plan(way), group_bytes)
        else:
            averaging = _AVERAGINGS.get(way.kind, Averaging)(model, way)
        if averaging.plan is not None:
            self.plans[way.name] = averaging.plan
        try:
            # Ranks talk six times, one after the other, before they agree on a start.
            yield _Runner(way, model, averaging, clock, lead_s=0.03 + 8 * self._network.latency_s)
        finally:
            averaging.close()

    def _plan(self, way: StepWay) -> Plan | None:
        """Return the plan that rank 0 makes for `way`, the same in every turn; None if nobody plans it."""
        if way.kind != "planned":
            return None
        if way.name in self.plans:
            return self.plans[way.name]
        found = [self._made_plan(way.planner).to_json() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(found, src=0)
        return Plan.from_json(found[0])

    def _made_plan(self, planner: str) -> Plan:
        workload, link = self._workload, self._network.link
        assert link is not None
        measured = workload.measured(link=link, codec_costs=self.codec_costs, compute_s=sum(workload.backward_s))
        if planner == "cgx":
            named = zip(workload.layers, self._gradients, strict=True)
            large = {layer.name: gradient.flatten() for layer, gradient in named if not layer.is_small}
            measured = replace(measured, layer_errors=measure_errors([large], WIDTHS))
        return plan_of(planner, measured, divisor=workload.divisor)


def _measure(job: dict[str, Any]) -> None:
    rank = _Rank(job)
    seconds: dict[str, list[float]] = {way.name: [] for way in rank.ways}
    spans: dict[str, list[PhaseSpan]] = {}
    for round_ in range(job["num_rounds"]):
        # A B C, then C B A, so that none always runs first.
        for way in rank.ways if round_ % 2 == 0 else reversed(rank.ways):
            with rank.at_work(way) as runner:
                slowest_s, spans[way.name] = _turn(runner, job["steps_per_turn"])
            # Reducer and model hold each other: without this the memory of several ways adds up.
            del runner
            gc.collect()
            seconds[way.name] += slowest_s
            if job["rank"] == 0:
                print(way.name, flush=True)
    if job["rank"] == 0:
        record = {
            "seconds": seconds,
            "plans": {name: plan.to_json() for name, plan in rank.plans.items()},
            "codec_costs": {codec: asdict(cost) for codec, cost in rank.codec_costs.items()},
            "spans": {name: found for name, found in spans.items() if found},
        }
        print(json.dumps(record), flush=True)
    dist.barrier()


def _turn(runner: _Runner, num_steps: int) -> tuple[list[float], list[PhaseSpan]]:
    """Return the slowest rank's seconds of each counted step, and the spans of all ranks in the last one."""
    for _ in range(math.ceil(_WARM_UP_STEPS / runner.way.period)):
        runner.step()
    runner.check()
    own_s = torch.zeros(num_steps, dtype=torch.float64)
    for index in range(num_steps):
        began_s, own_s[index] = runner.step()
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, runner.spans(began_s))
    dist.all_reduce(own_s, op=dist.ReduceOp.MAX)
    return own_s.tolist(), [span for spans in everyones for span in spans]


def _codec_costs(ways: Sequence[StepWay]) -> dict[str, CodecCost]:
    """Return the times of all codecs that a way or a plan may use, as rank 0 finds them while all ranks encode.

    Ranks encode at the same time in a step too, and may have to share the processor's cores.
    """
    own = [way.codec for way in ways if way.has_engine]
    specs = {str(CodecSpec.parse(codec)) for codec in (*own, *timed_codecs({way.planner for way in ways}))} - {"none"}
    found: list[Any] = [{}]
    for spec in sorted(specs):
        dist.barrier()
        found[0][spec] = measure_codec(CodecSpec.parse(spec))
    dist.broadcast_object_list(found, src=0)
    costs: dict[str, CodecCost] = found[0]
    return costs


if __name__ == "__main__":
    run_rank(_measure)
