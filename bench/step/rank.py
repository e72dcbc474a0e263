"""One rank of `python -m bench step`: the ways take turns, each with a model of its own.

Rank 0 writes the name of a way after each of its turns, and at the end a `StepRecord` as JSON.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from bench.shared.rank_process import run_rank, start_together
from bench.shared.ranks import BenchError
from bench.step.cases import StepNetwork, StepWay
from bench.step.sleeping_model import BackwardClock, SleepingModel, fixed_gradients
from bench.step.torch_hooks import register_hook
from bench.step.workload import GAINS, Workload, joint_plan
from cgx_ray.engine.chrome_trace import PhaseSpan
from cgx_ray.plan import STEPS_TOGETHER, CodecSpec, Plan
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.session.attachment import Attachment
from cgx_ray.session.calibrate import measure_codec

# Per turn, not counted: DDP rebuilds its buckets after the first step, torch's PowerSGD sends two steps whole and
# allocates in the third, and TCP connections begin slowly.
_WARM_UP_STEPS = 3


class _Runner:
    """One way at work. `step` starts when all ranks are ready and takes `lead_s` to agree on that."""

    def __init__(
        self,
        way: StepWay,
        model: DistributedDataParallel,
        attachment: Attachment | None,
        clock: BackwardClock,
        lead_s: float,
    ) -> None:
        self.way, self.attachment = way, attachment
        self._model = model
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
        if self.attachment is not None:
            self.attachment.end_round()
        return began_s, (time.perf_counter() - began_s) / self.way.period

    def check(self) -> None:
        """Raise BenchError unless all ranks hold the same averages."""
        averages = [parameter.grad for parameter in self._model.parameters()]
        sums_L = torch.stack([average.sum(dtype=torch.float64) for average in averages if average is not None])
        least_L, most_L = sums_L.clone(), sums_L.clone()
        dist.all_reduce(least_L, op=dist.ReduceOp.MIN)
        dist.all_reduce(most_L, op=dist.ReduceOp.MAX)
        if self.way.kind != "noop" and self.way.period == 1 and not torch.equal(least_L, most_L):
            num_layers = int((least_L != most_L).sum())
            raise BenchError(f"{self.way.name}: ranks hold different averages of {num_layers} layers")

    def spans(self, began_s: float) -> list[PhaseSpan]:
        """Return what the engine's groups did in the newest step, which began at `began_s`."""
        if self.attachment is None:
            return []
        rank = dist.get_rank()
        return [
            PhaseSpan(rank, span.group, span.phase, max(span.begin_s - began_s, 0.0), span.end_s - began_s)
            for span in self.attachment.last_spans
        ]


class _Rank:
    """State that the ways of one rank share.

    plans        in force at the newest turn of each way of the engine
    codec_costs  by `str(CodecSpec)`; empty on loopback, where nothing can be planned
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._network = StepNetwork(**job["network"])
        self._workload = Workload.load(job["model"], backward_s=job["backward_s"], num_ranks=job["world_size"])
        self._gradients: Sequence[Tensor] = fixed_gradients(self._workload.shapes, seed=job["rank"])
        self.ways = [StepWay(**way) for way in job["ways"]]
        self.codec_costs = _codec_costs(self.ways) if self._network.link is not None else {}
        self.plans: dict[str, Plan] = {}

    @contextmanager
    def at_work(self, way: StepWay) -> Iterator[_Runner]:
        """Build the model of `way` with its hook or engine, and end both. Only one at a time fits into memory."""
        workload = self._workload
        clock = BackwardClock(workload.backward_s)
        model = DistributedDataParallel(
            SleepingModel([layer.name for layer in workload.layers], self._gradients, clock),
            bucket_cap_mb=way.bucket_cap_mb,
            init_sync=False,
            # On a processor the copies between gradients and buckets cost time that a GPU does not need.
            gradient_as_bucket_view=True,
        )
        attachment = None
        # Without shared memory between ranks, which would go around the links of a lab. Nobody trains these weights.
        if way.kind == "engine":
            attachment = cgx_ray.attach(
                model,
                codec=way.codec,
                scheme=way.scheme,
                period=way.period,
                shared_memory=False,
                weight_check_steps=0,
            )
            if way.period > 1:
                # As in a training that goes on: in its first steps, ranks do not train alone.
                attachment.load_state_dict(attachment.state_dict() | {"step": STEPS_TOGETHER})
        elif way.kind == "joint":
            attachment = cgx_ray.attach(model, plan=self._joint_plan(way), shared_memory=False, weight_check_steps=0)
        elif way.kind != "ddp":
            register_hook(model, way.kind)
        if attachment is not None and attachment.plan is not None:
            self.plans[way.name] = attachment.plan
        try:
            # Ranks talk six times, one after the other, before they agree on a start.
            yield _Runner(way, model, attachment, clock, lead_s=0.03 + 8 * self._network.latency_s)
        finally:
            if attachment is not None:
                attachment.close()

    def _joint_plan(self, way: StepWay) -> Plan:
        """Return the planner's plan, the same in every turn and on every rank."""
        if way.name in self.plans:
            return self.plans[way.name]
        assert self._network.link is not None
        measured = self._workload.measured(
            link=self._network.link,
            codec_costs=self.codec_costs,
            compute_s=sum(self._workload.backward_s),
        )
        return joint_plan(measured, self._workload.num_ranks)


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
    for _ in range(_WARM_UP_STEPS):
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
    specs = {str(CodecSpec.parse(codec)) for codec in (*(way.codec for way in ways), *GAINS)} - {"none"}
    found: list[Any] = [{}]
    for spec in sorted(specs):
        dist.barrier()
        found[0][spec] = measure_codec(CodecSpec.parse(spec))
    dist.broadcast_object_list(found, src=0)
    costs: dict[str, CodecCost] = found[0]
    return costs


if __name__ == "__main__":
    run_rank(_measure)
