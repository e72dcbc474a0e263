"""`python -m bench peers`: seconds of a training step with what a user could take instead, on emulated networks.

Steps have the gradients of a real model, and backward sleeps, as in `bench step`, whose ranks these are. A cell is one
model on one network. All ways take turns in every round, so ratios within a cell compare like with like.

**Ways.** Plain DDP, torch's hooks and its local SGD; GRACE's pattern (`step.grace`); codecs of ours fused and chosen by
the rules of published systems (`shared.paper_plans`); each static option of ours; and "joint", the first plan that
policy "adaptive" decides on, with codecs that keep dense's loss within 1 % on the network as it was set. Real adaptive
trainings are what `bench adapt --lab` measures. Limits are a step that exchanges nothing, and for each way a link that
is always busy with its bytes.

**Divisor.** Some cells exchange dense gradients for minutes. There, layers have f times fewer elements, buckets and
groups are f times smaller, and backward and latency f times shorter, so that DDP's exchange takes 1.5 s at most. At the
same rate each part of the step then takes 1/f of its time, except what messages cost the processor: that is as in the
real step, so it weighs f times as much. It slows down ways with many messages, as ours. A latency below 0.05 ms cannot
be emulated and is that. Layers of fewer than 1,024 f elements count as small, and are sent uncompressed by most of our
plans, and plans by hand, with which "joint" is compared, have four groups. Seconds are printed as measured, f beside
them: times f, they would pretend that messages had been paid for too.

Bounds and plans take the network as it was set. Two cores carry half of four links of 2.5 Gbit/s, see docs/lab.md, so
such cells say more on a machine with more cores.

Torch's PowerSGD gets one bucket, since with several it deadlocks on Gloo. Its factors shrink with the root of f, so it
is left out where f is more than 5. Optimizers do not run, also not in local SGD.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import click

from bench.peers.cases import ALL_CELLS, DDP, JOINT, NOOP, QUICK, PeerCell, PeersOptions, ways_for
from bench.peers.record import CellTimes, WayTime, judged, read_cells, write_cells
from bench.shared.runner import BenchRun, OnPart, bench_command
from bench.step.measure import measure_step
from cgx_ray.commands.options import FILE
from cgx_ray.errors import ConfigError
from cgx_ray.report.result import Row, commit, machine


@bench_command(quick="Two cells, few ways, three rounds: some minutes.")
@click.option("--cells", metavar="NAME,...", help="Measure these, such as resnet50/100mbit/1ms.  [default: 12 of 64]")
@click.option("--all", "every", is_flag=True, help="Measure all 64 cells.")
@click.option(
    "--ways", metavar="NAME,...", help="Time these beside noop, ddp and joint, such as qsgd_sra.  [default: all]"
)
@click.option("--save", type=FILE, metavar="FILE", help="Keep each cell there as soon as it is measured; see below.")
def peers(run: BenchRun, cells: str | None, every: bool, ways: str | None, save: Path | None) -> Iterable[Row]:
    """Time a step with the ways that others offer, and with ours.

    Four ranks, real sizes of gradients, emulated networks. A whole run takes hours. With --save, cells that the file
    has from an earlier run with as many ways and rounds are not measured again, unless --cells names them. With --ways
    as well, the file keeps the others of an earlier run.
    """
    if cells and (every or run.quick):
        raise ConfigError("--cells and --all or --quick are both given, and both say what to measure; give one of them")
    options = QUICK if run.quick else PeersOptions()
    if every:
        options = PeersOptions(cells=ALL_CELLS)
    elif cells:
        options = PeersOptions(cells=tuple(map(PeerCell.parse, cells.split(","))))
    if ways:
        options = replace(options, ways=(NOOP.name, DDP.name, JOINT.name, *ways.split(",")))
    run.title += f", {options.num_ranks} ranks"
    known = read_cells(save) if save is not None else {}
    found = []
    for index, cell in enumerate(options.cells):
        times = known.get(cell.name)
        if cells or times is None or not times.answers(options, cell.divisor(options.num_ranks)):
            earlier = times
            times = measure_cell(cell, options, partial(_report, run.on_part, index, len(options.cells)))
            if ways and earlier is not None:
                times = times.beside(earlier)
            if save is not None:
                known[cell.name] = times
                write_cells(save, known)
        for way, reason in times.left_out.items():
            run.print_text(f"Left out: {way} in {cell.name}; {reason}.")
        found.append(times)
    return judged(found)


def _report(on_part: OnPart, index: int, num_cells: int, part: str, share: float) -> None:
    on_part(f"cell {index + 1} of {num_cells}, {part}", (index + share) / num_cells)


def measure_cell(cell: PeerCell, options: PeersOptions, on_part: OnPart) -> CellTimes:
    """Time the ways of one cell. `on_part` and errors as of `measure_step`."""
    divisor = cell.divisor(options.num_ranks)
    ways, left_out = ways_for(options.ways, divisor)
    step_options = cell.options(divisor, num_ranks=options.num_ranks, num_rounds=options.num_rounds)
    timings, record = measure_step(step_options, step_options.network, ways, on_part)
    times = {}
    for timing in timings:
        low_s, _, high_s = quantiles(record.seconds[timing.way.name], n=4, method="inclusive")
        times[timing.way.name] = WayTime(
            median_s=median(record.seconds[timing.way.name]),
            quartiles_s=(low_s, high_s),
            limit_s=timing.limit_s,
            plan=timing.plan.describe() if timing.plan is not None else None,
        )
    return CellTimes(
        cell=cell.name,
        divisor=divisor,
        num_ranks=options.num_ranks,
        num_rounds=options.num_rounds,
        date=time.strftime("%Y-%m-%d"),
        commit=commit(),
        machine=machine(),
        ways=times,
        left_out=left_out,
    )
