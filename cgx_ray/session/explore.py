"""Explore from a checkpoint in memory: train with each codec, undo it, and go on with the best."""

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
from cgx_ray.engine.gains.gain_schedule import FIRST_STEP
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.monitors.sample import StepSample
from cgx_ray.plan import CodecSpec, Option, Plan, Scheme, make_plan, preferred_scheme
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES, Trial, front, knee

CANDIDATES = tuple(CodecSpec(name="topk", density=density) for density in CANDIDATE_DENSITIES)
# Measuring the gain takes time, so a step measures either its gain or its times.
GAIN_INTERVAL_STEPS = 2


# Seconds to code and to exchange, and the gain; each None if this rank has none.
_Measured = tuple[tuple[float, float] | None, float | None]


class Stateful(Protocol):
    """A model, an optimizer, a schedule, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """Result of an exploration; the same on all ranks.

    trials  one per candidate, in their order: the longest codec time of all ranks; the shortest exchange time over
            ranks, since the longer ones include waiting; and the mean gain over ranks that had one
    front   trials that no other trial beats in codec time, exchange time and gain
    knee    chosen trial of the front
    plan    of the knee; it is in force
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
    group_bytes: int | None,
    since: Exploration | None,
) -> Exploration:
    """Train `iterations` steps with each candidate from the same state, and put the knee's plan in force.

    With `since` in force, the knee of it is tried first: if its gain and exchange time are as they were, that is all.

    Flexible Communication, section 3-E. Arguments and errors are those of `Attachment.explore`.
    """
    if iterations < GAIN_INTERVAL_STEPS:
        raise ConfigError(f"iterations {iterations!r} is not allowed; give {GAIN_INTERVAL_STEPS} or more, such as 10")
    if engine.plan.period > 1:
        raise ConfigError(f"the plan has period {engine.plan.period}; explore with period 1: steps exchange gradients")
    specs = [codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec) for codec in candidates]
    if not specs:
        raise ConfigError("no candidates to explore; give at least one codec")

    world_size = dist.get_world_size(group)
    plans = [
        make_plan(
            engine.layers, version=version, world_size=world_size, codec=spec, scheme=scheme, group_bytes=group_bytes
        )
        for version, spec in enumerate(specs, _newest(engine, group) + 1)
    ]
    # Check all plans before the first step: a plan in force cannot be undone.
    for plan in plans:
        plan.check(engine.layers, world_size)
    options = [
        Option(codec=spec, scheme=Scheme(scheme) if scheme is not None else preferred_scheme(spec)) for spec in specs
    ]

    def tried(option: Option) -> Trial:
        with _restored(engine, stateful), engine.metered([option.codec], GAIN_INTERVAL_STEPS):
            own = _measure(engine, step, iterations, option)
        return _trial(option, own, group, iterations)

    if since is not None and since.plan == engine.plan:
        now = tried(Option(codec=since.knee.codec, scheme=since.knee.scheme))
        if not since.knee.has_changed(now):
            return since
    trials = []
    for option, plan in zip(options, plans, strict=True):
        with _restored(engine, stateful):
            _enter(engine, plan, step)
        trials.append(tried(option))
    best = knee(trials)
    with _restored(engine, stateful):
        _enter(engine, replace(plans[trials.index(best)], version=engine.plan.version + 1), step)
    return Exploration(trials=tuple(trials), front=front(trials), knee=best, plan=engine.plan)


def _newest(engine: Engine, group: dist.ProcessGroup) -> int:
    """Return the newest version that a rank has; after an exploration that failed, its plan may not be in force."""
    newest = torch.tensor(engine.held.newest(engine.plan), dtype=torch.int64, device="cpu")
    dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    return int(newest)


def _enter(engine: Engine, plan: Plan, step: Callable[[int], object]) -> None:
    """Bring `plan` in force by agreement, as any other plan. The steps that this takes also warm it up."""
    engine.hold(plan)
    while engine.plan.version < plan.version:
        _exchange(engine, step, 0)


def _trial(option: Option, own: _Measured, group: dist.ProcessGroup, iterations: int) -> Trial:
    """Join the measurements of all ranks. Raises CGXError on all of them if none measured a gain, or none a time."""
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    times = [seconds for seconds, _ in everyones if seconds is not None]
    gains = [gain for _, gain in everyones if gain is not None]
    if not times:
        raise CGXError(
            f"no rank could measure its times in {iterations} steps with {option.codec}; see the warnings in the log"
        )
    if not gains:
        raise CGXError(
            f"gradients were 0 or not finite in all {iterations} steps with {option.codec}; explore at a later step"
        )
    return Trial(
        codec=option.codec,
        scheme=option.scheme,
        codec_s=max(codec_s for codec_s, _ in times),
        exchange_s=min(exchange_s for _, exchange_s in times),
        gain=math.fsum(gains) / len(gains),
    )


def _measure(engine: Engine, step: Callable[[int], object], iterations: int, option: Option) -> _Measured:
    """Return this rank's seconds to code and to exchange, and its gain: means over the steps that measured each.

    Missing: steps whose sample was lost, and gains of gradients that were 0 or not finite. If all are missing, that is
    no error yet: other ranks may have measured, and they wait for this rank's answer.
    """
    times, gains = [], []
    for iteration in range(iterations):
        sample = _exchange(engine, step, iteration)
        if sample is None:
            continue
        if sample.step % GAIN_INTERVAL_STEPS != FIRST_STEP:
            times.append((sample.encode_s + sample.decode_s, sample.exchange_s))
        elif (kept := sample.kept.get(str(option), sample.gain.get(str(option.codec)))) is not None:
            gains.append(kept)
    return _means(times), math.fsum(gains) / len(gains) if gains else None


def _means(times: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    if not times:
        return None
    codec_s, exchange_s = zip(*times, strict=True)
    return math.fsum(codec_s) / len(times), math.fsum(exchange_s) / len(times)


def _exchange(engine: Engine, step: Callable[[int], object], iteration: int) -> StepSample | None:
    """Call `step` and return its sample; None if it was lost, since measuring may fail.

    Raises ConfigError unless it exchanged gradients once.
    """
    before, last = engine.step, engine.last_step
    step(iteration)
    if engine.step != before + 1:
        raise ConfigError(
            f"`step` exchanged gradients {engine.step - before} times; it must call a synchronised backward once"
        )
    # Step numbers repeat from candidate to candidate, so an old sample may have the number of this step.
    sample = engine.last_step
    return sample if sample is not None and sample is not last and sample.step == before else None


@contextmanager
def _restored(engine: Engine, stateful: Sequence[Stateful]) -> Iterator[None]:
    """Restore all except the plan at the end: `stateful`, torch's random numbers, codecs' memory and the step."""
    states = [copy.deepcopy(entry.state_dict()) for entry in stateful]
    memories = engine.state()
    devices = [engine.device.index] if engine.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for entry, state in zip(stateful, states, strict=True):
                entry.load_state_dict(state)
            engine.load_state(
                memories["step"], memories, changes=memories["changes"], loss_scale=memories["loss_scale"]
            )
