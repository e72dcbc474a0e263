"""The papers' policies on the schedules of `python -m bench adapt`: seconds for the same progress, beside ours."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.adapt.cases import AdaptCase
from bench.adapt.simulate import SimulatedRun
from bench.shared.simulated_cluster import SimulatedCluster
from cgx_ray.control.gains.known_losses import lost_share
from cgx_ray.control.history import Registration
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.paper_policies import ByteComp, Cgx, Cupcake, Flexible, PaperPolicy
from cgx_ray.control.policies.policy import Policy
from cgx_ray.monitors.sample import LayerError
from cgx_ray.plan import Layer, make_plan
from cgx_ray.planner.bits import QSGD, STATIC_BITS, WIDTHS
from cgx_ray.planner.candidates import candidate_options, codec_options
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.scenario import TYPICAL_GAINS
from cgx_ray.report.result import Row

# Cases whose only departure is the schedule: links, compute and gains that change.
PAPER_CASES = ("drop", "sine", "flapping", "latency", "slow_node", "less_compute", "more_compute")
# Bits that all policies may use. One layer's error differs from another's by this deviation of the logarithm.
QSGDS = tuple(QSGD.replace(bits=bits) for bits in WIDTHS)
ERROR_SPREAD = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """One policy on one case.

    score       seconds for the progress of a dense step
    step_s      mean seconds of a step
    efficiency  mean progress of a step, as a share of a dense step's
    """

    policy: str
    score: float
    step_s: float
    efficiency: float


POLICIES: Mapping[str, Callable[[], PaperPolicy]] = {
    "cgx": Cgx,
    "flexible": Flexible,
    "cupcake": Cupcake,
    "bytecomp": ByteComp,
}


def compare_papers(case: AdaptCase, seed: int = 0) -> list[PolicyRun]:
    """Return ours, then each paper's policy, on the same schedule, with the same codecs and errors."""
    lost = {STATIC_BITS: 1 - TYPICAL_GAINS[str(QSGD)]}
    gain = dict(case.gain) | {str(codec): 1 - lost_share(lost, codec.bits or STATIC_BITS) for codec in QSGDS}
    options = tuple(dict.fromkeys([*candidate_options(CANDIDATE_DENSITIES), *codec_options(QSGDS)]))
    case = replace(case, options=options, gain=gain)
    ours: dict[str, Callable[[], Policy]] = {"adaptive": lambda: Adaptive(candidates=options, min_gain=case.min_gain)}
    return [_run(name, make(), case, seed) for name, make in {**ours, **POLICIES}.items()]


def _run(name: str, policy: Policy, case: AdaptCase, seed: int) -> PolicyRun:
    cluster = SimulatedCluster(
        case.model, case.costs, case.gain, case.errors(seed), seed, layer_errors(case.model.layers)
    )
    with tempfile.TemporaryDirectory() as folder:
        loop = ControlLoop(policy, Journal(Path(folder) / "decisions.jsonl"))
        loop.register(
            Registration(
                layers=tuple(case.model.layers),
                first_plan=make_plan(case.model.layers, version=0, world_size=4),
                codec_costs=case.costs,
            )
        )
        run = SimulatedRun(loop=loop, cluster=cluster, schedule=case.schedule)
        run.run(until_s=case.seconds)
    seconds, progress = math.fsum(one.step_s for one in run.steps), math.fsum(one.efficiency for one in run.steps)
    return PolicyRun(
        policy=name, score=seconds / progress, step_s=seconds / len(run.steps), efficiency=progress / len(run.steps)
    )


def layer_errors(layers: tuple[Layer, ...]) -> dict[str, LayerError]:
    """Return made-up energies and errors with 4 bits of all large layers; energy is that of its elements on average."""
    chance = random.Random(0)
    lost = 1 - TYPICAL_GAINS[str(QSGD)]
    found = {}
    for layer in layers:
        if not layer.is_small:
            energy = math.exp(chance.gauss(0, ERROR_SPREAD))
            share = lost * math.exp(chance.gauss(0, ERROR_SPREAD / 3))
            found[layer.name] = LayerError(layer.numel * energy, share, math.sqrt(energy))
    return found


def paper_rows(case: str, runs: list[PolicyRun]) -> list[Row]:
    """Return the seconds of each paper's policy over ours, for the same progress, and the two reasons for it."""
    ours, *others = runs
    rows = []
    for run in others:
        name = f"{case}_{run.policy}_over_ours"
        rows += [
            Row(name=name, value=run.score / ours.score, unit="x", baseline=ours.score, goal=">= 1"),
            Row(name=f"{name}_step", value=run.step_s / ours.step_s, unit="x"),
            Row(name=f"{name}_progress", value=run.efficiency / ours.efficiency, unit="x"),
        ]
    return rows
