"""What the controller knows of a run: samples of all ranks, joined by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from cgx_ray.monitors.sample import StepSample, Transfer
from cgx_ray.plan import Scheme
from cgx_ray.planner.cost import terms

# Before a rank's report is given up and its step forgotten.
MAX_OPEN_STEPS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """One step as the whole group saw it. Seconds.

    compute_s  of the slowest rank: the others wait for it
    ready_s    for each group, when the last rank had it
    transfers  for each group, the shortest any rank saw: what is left is the wait for late ranks
    gain       mean over ranks, on steps that measured it
    """

    step: int
    plan_version: int
    step_s: float
    compute_s: float
    codec_s: float
    ready_s: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    gain: Mapping[str, float]


class StepBook:
    """Collects samples and gives out steps once every rank has reported them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # By step and plan: after a restart, steps come again, and late samples of the old workers may still arrive.
        self._open: dict[tuple[int, int], dict[int, StepSample]] = defaultdict(dict)

    def add(self, samples: Iterable[StepSample]) -> list[JoinedStep]:
        """Take samples in any order; returns the steps that became complete, oldest first."""
        for sample in samples:
            self._open[sample.step, sample.plan_version][sample.rank] = sample
        complete = sorted(step for step, ranks in self._open.items() if len(ranks) == self._world_size)
        joined = [join(list(self._open.pop(step).values())) for step in complete]
        for step in sorted(self._open)[:-MAX_OPEN_STEPS]:
            del self._open[step]
        return joined


def join(samples: list[StepSample]) -> JoinedStep:
    """Combine what the ranks saw of one step."""
    measured = [sample.gain for sample in samples if sample.gain]
    codecs = {codec for gain in measured for codec in gain}
    return JoinedStep(
        step=samples[0].step,
        plan_version=samples[0].plan_version,
        step_s=median(sample.step_s for sample in samples),
        compute_s=max(sample.compute_s for sample in samples),
        codec_s=median(sample.encode_s + sample.decode_s for sample in samples),
        ready_s=tuple(max(times) for times in zip(*(sample.ready_s for sample in samples), strict=True)),
        transfers=tuple(
            min(transfers, key=lambda transfer: transfer.seconds)
            for transfers in zip(*(sample.transfers for sample in samples), strict=True)
        ),
        gain={codec: fmean(gain[codec] for gain in measured if codec in gain) for codec in codecs},
    )


def estimate_beta(steps: Iterable[JoinedStep], world_size: int, alpha_s: float) -> float | None:
    """Seconds per byte of the link, from the engine's own transfers: median over steps; None if nothing tells.

    A step's transfers count together, so small groups, whose time is mostly latency, weigh little. Hierarchical ones
    tell nothing: their time is that of two kinds of links.
    """
    betas = []
    for step in steps:
        hops = num_bytes = seconds = 0.0
        for transfer in (transfer for transfer in step.transfers if transfer.intra == "flat"):
            group_hops, group_bytes = terms(
                Scheme(transfer.scheme), world_size, transfer.wire_bytes, transfer.wire_bytes, transfer.index_bytes
            )
            hops, num_bytes, seconds = hops + group_hops, num_bytes + group_bytes, seconds + transfer.seconds
        # Never less than a tenth of what was measured: latency is a guess when ranks wait for the processor.
        if num_bytes > 0 and seconds > 0:
            betas.append(max(seconds - hops * alpha_s, 0.1 * seconds) / num_bytes)
    return median(betas) if betas else None
