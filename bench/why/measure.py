"""`python -m bench why`: what observing a training costs its steps and its memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from statistics import median

from bench.shared.ranks import run_ranks
from bench.shared.runner import BenchRun, bench_command
from cgx_ray.report.result import Row

_NUM_RANKS = 2


@bench_command(quick="Few steps.")
def why(run: BenchRun) -> Iterable[Row]:
    """Time steps that `cgx-ray why` observes beside others.

    Two ranks on loopback train a model that is observed and two that are not, a step of each in turn. How the two
    differ is noise. The observer's thread runs beside all of them; its share of a core is a row of its own.
    """
    job = {"num_steps": 9 if run.quick else 900}
    (line,) = run_ranks("bench.why.rank", job, name="bench why", num_ranks=_NUM_RANKS)
    found = json.loads(line)
    bare_ms = 1e3 * median(step["bare"] for step in found["steps"])
    rows = [
        Row(
            name=f"{name}_step",
            value=1e3 * median(step[name] for step in found["steps"]),
            unit="ms",
            baseline=bare_ms,
            ratio=median(step[name] / step["bare"] for step in found["steps"]),
            goal=goal,
        )
        for name, goal in (("observed", "<= 1.02"), ("bare_again", None))
    ]
    return [
        *rows,
        Row(name="observer_thread", value=found["cores"], unit="cores", goal="<= 0.01"),
        Row(name="observer_memory", value=found["extra_mib"], unit="MiB", goal="<= 64"),
    ]
