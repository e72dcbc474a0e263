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

    Two ranks on loopback train a model that is observed and one that is not, in turns.
    """
    job = {"num_steps": 5, "num_turns": 1} if run.quick else {"num_steps": 50, "num_turns": 7}
    (line,) = run_ranks("bench.why.rank", job, name="bench why", num_ranks=_NUM_RANKS)
    found = json.loads(line)
    observed_s, bare_s = ([turn[place] for turn in found["turns"]] for place in (0, 1))
    ratio = median(one / other for one, other in zip(observed_s, bare_s, strict=True))
    return [
        Row(
            name="observed_step",
            value=1e3 * median(observed_s),
            unit="ms",
            baseline=1e3 * median(bare_s),
            ratio=ratio,
            goal="<= 1.02",
        ),
        Row(name="observer_memory", value=found["extra_mib"], unit="MiB", goal="<= 64"),
    ]
