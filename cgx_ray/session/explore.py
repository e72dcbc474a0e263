"""Checkpoint-restore exploration: try codecs in training itself, forget the tries, go on with the best."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from cgx_ray.engine.engine import Engine
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.monitors.sample import StepSample
from cgx_ray.plan import CodecSpec, Plan, Scheme, make_plan, preferred_scheme
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES, Trial, front, knee

CANDIDATES = tuple(CodecSpec(name="topk", density=density) for density in CANDIDATE_DENSITIES)
# Measuring the gain takes time, so a step has either its gain or its times measured.
GAIN_INTERVAL_STEPS = 2


class Stateful(Protocol):
    """A model, an optimizer, a schedule, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was found; the same on all ranks.

    trials  of all candidates, in their order: the slowest rank's codec time, the fastest's exchange time (others
            waited), the mean gain over ranks that had one
    front   those that no other beats in codec time, exchange time and gain
    plan    of the knee of the front; it is in force
    """

    trials: tuple[Trial, ...]
    front: tuple[Trial, ...]
    knee: Trial
    plan: Plan


def explore(
    engine: Engine,
    group: dist.ProcessGroup,
    stateful: Sequence[Stateful],
    step: Callable[[int], object],
    *,
    candidates: Sequence[CodecSpec | str],
    scheme: Scheme | str | None,
    iterations: int,
    group_bytes: int,
) -> Exploration:
    """Train `iterations` steps with each candidate from the same state, and put the knee's plan in force.

    Flexible Communication, section 3-E. `Attachment.explore` says the rest.
    """
    if iterations < GAIN_INTERVAL_STEPS:
        raise ConfigError(f"iterations {iterations!r} is not allowed; give {GAIN_INTERVAL_STEPS} or more, such as 10")
    specs = [codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec) for codec in candidates]
    if not specs:
        raise ConfigError("no candidates to explore; give at least one codec")

    world_size = dist.get_world_size(group)
    plans = [
        make_plan(
            engine.layers, version=version, world_size=world_size, codec=spec, scheme=scheme, group_bytes=group_bytes
        )
        for version, spec in enumerate(specs, engine.plan.version + 1)
    ]
    # All of them before the first step: a plan in force is not undone.
    for plan in plans:
        plan.check(engine.layers, world_size)

    def enter(plan: Plan) -> None:
        """Bring a plan in force by agreement, as any other. The steps that takes also warm it up."""
        engine.hold(plan)
        while engine.plan.version < plan.version:
            _exchange(engine, step, 0)

    trials = []
    for spec, plan in zip(specs, plans, strict=True):
        with _restored(engine, stateful):
            enter(plan)
        with _restored(engine, stateful), engine.metered([spec], GAIN_INTERVAL_STEPS):
            own = _measure(engine, step, iterations, str(spec))
        everyones: list[Any] = [None] * world_size
        dist.all_gather_object(everyones, own, group=group)
        codec_s, exchange_s, gain = zip(*everyones, strict=True)
        gains = [one for one in gain if one is not None]
        if not gains:
            raise CGXError(f"gradients were 0 or not finite in all {iterations} steps with {spec}; explore later on")
        trials.append(
            Trial(
                codec=spec,
                scheme=Scheme(scheme) if scheme is not None else preferred_scheme(spec),
                codec_s=max(codec_s),
                exchange_s=min(exchange_s),
                gain=math.fsum(gains) / len(gains),
            )
        )
    best = knee(trials)
    with _restored(engine, stateful):
        enter(replace(plans[trials.index(best)], version=engine.plan.version + 1))
    return Exploration(trials=tuple(trials), front=front(trials), knee=best, plan=engine.plan)


def _measure(
    engine: Engine, step: Callable[[int], object], iterations: int, codec: str
) -> tuple[float, float, float | None]:
    """Seconds to code and to exchange, and the gain: means over the steps that measured it.

    Gain None if this rank's gradients were 0 or not finite in all of them: others may know, and wait for an answer.
    """
    times, gains = [], []
    for iteration in range(iterations):
        sample = _exchange(engine, step, iteration)
        if sample.gain:
            gains.append(sample.gain[codec])
        else:
            times.append((sample.encode_s + sample.decode_s, sample.exchange_s))
    codec_s, exchange_s = (math.fsum(column) / len(times) for column in zip(*times, strict=True))
    return codec_s, exchange_s, math.fsum(gains) / len(gains) if gains else None


def _exchange(engine: Engine, step: Callable[[int], object], iteration: int) -> StepSample:
    before = engine.step
    step(iteration)
    sample = engine.last_step
    if sample is None or engine.step != before + 1:
        raise ConfigError(
            f"`step` exchanged gradients {engine.step - before} times; it must call a synchronised backward once"
        )
    return sample


@contextmanager
def _restored(engine: Engine, stateful: Sequence[Stateful]) -> Iterator[None]:
    """Afterwards everything but the plan is as it was: `stateful`, torch's random numbers, codecs' memory, the step."""
    states = [copy.deepcopy(entry.state_dict()) for entry in stateful]
    memories = engine.state()
    devices = [engine.device.index] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for entry, state in zip(stateful, states, strict=True):
                entry.load_state_dict(state)
            engine.load_state(memories["step"], memories, loss_scale=memories["loss_scale"])
