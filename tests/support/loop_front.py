"""`python -m support.loop_front FOLDER`: start a control loop's process, say its id, and wait to be killed.

Its policy waits in a decision, see `SlowPolicy`.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import time
from pathlib import Path

from cgx_ray.control.loop_process import LoopProcess, LoopStart
from support.control_runs import registration
from support.loop_policies import SlowPolicy
from support.loop_reports import FIRST, reports


def main() -> None:
    folder = Path(sys.argv[1])
    policy = SlowPolicy(folder)
    start = LoopStart(
        policy=policy, journal_path=folder / "decisions.jsonl", snapshot_path=folder / "snapshot", run_name="run"
    )
    loop = LoopProcess(start, lambda news: None, lambda: None)
    loop.ask("register", registration(first_plan=FIRST), 0.0, 0.0)
    for number, report in enumerate(itertools.islice(reports(), 20), 1):
        loop.ask("add_report", report.node_id, pickle.dumps(report), float(number))
    while not policy.begun.exists():
        time.sleep(0.01)
    print(loop.pid, flush=True)
    time.sleep(600)


main()
