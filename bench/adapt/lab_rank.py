"""One rank of `python -m bench adapt --lab`: trains one way after the other, as lines on its input say.

`train NAME`  train that way until `stop`. Rank 0 writes when the first step began and when each step ended, in seconds
              of `time.monotonic`; each plan before the end of the first step with it; "done" at the end
`stop`        end the training at the same step on all ranks
`codecs`      time the candidate codecs, and measure their gains on the fixed gradients; rank 0 writes both
"""

from __future__ import annotations

import gc
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from bench.adapt.lab_cases import LAB_WAYS, LabWay, candidate_specs, lab_workload
from bench.network.rank import send
from bench.shared.rank_process import run_rank
from bench.step.sleeping_model import BackwardClock, SleepingModel, fixed_gradients
from bench.step.torch_hooks import register_hook
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.gain import kept_energy
from cgx_ray.lab.schedule import last_step
from cgx_ray.plan import Plan
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.session.attach import attach_with
from cgx_ray.session.calibrate import measure_codec


class _OrderedRank:
    """A rank and its orders."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._rank = job["rank"]
        self._folder, self._fidelity = Path(job["store"]).parent, Fidelity(job["fidelity"])
        self._workload = lab_workload(job["width"], job["num_layers"], job["world_size"])
        self._gradients = fixed_gradients(self._workload.shapes, seed=self._rank)
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._is_stopped = threading.Event()
        self._num_trainings = 0
        threading.Thread(target=self._read, daemon=True).start()

    def work(self) -> None:
        """Obey orders until the input ends."""
        while (order := self._orders.get()) is not None:
            if order == "codecs":
                self._measure_codecs()
                continue
            self._num_trainings += 1
            self._train(LAB_WAYS[order.removeprefix("train ")])
            # Reducer and model hold each other: without this the memory of several ways adds up.
            gc.collect()
            if self._rank == 0:
                send("done")

    def _read(self) -> None:
        for line in map(str.strip, sys.stdin):
            if line == "stop":
                self._is_stopped.set()
            else:
                self._is_stopped.clear()
                self._orders.put(line)
        self._orders.put(None)

    def _train(self, way: LabWay) -> None:
        clock = BackwardClock(self._workload.backward_s)
        names = [layer.name for layer in self._workload.layers]
        model = DistributedDataParallel(
            SleepingModel(names, self._gradients, clock), init_sync=False, gradient_as_bucket_view=True
        )
        # Changes nothing, and ends the steps of rounds.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0) if way.has_rounds else None
        with self._attached(model, way) as attachment:
            step, version = 0, -1
            self._report(time.monotonic())
            while not self._is_last(step):
                model.zero_grad(set_to_none=True)
                loss = model(torch.zeros(()))
                clock.begin()
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
                plan = attachment.plan if attachment is not None else None
                if plan is not None and plan.version != version:
                    version = plan.version
                    self._report(plan)
                self._report(time.monotonic())
                step += 1

    def _report(self, message: float | Plan) -> None:
        if self._rank == 0:
            send(message)

    def _is_last(self, step: int) -> bool:
        """Return whether all ranks stop before `step`.

        Rank 0 names the step in a file when it has averaged the one before the last. The others cannot end the last
        step without it, so they see the file in time.
        """
        file = self._folder / f"stop-{self._num_trainings}"
        if self._rank == 0 and self._is_stopped.is_set() and not file.exists():
            file.write_text(str(step + 1))
        return 0 <= last_step(file) <= step

    @contextmanager
    def _attached(self, model: DistributedDataParallel, way: LabWay) -> Iterator[cgx_ray.Attachment | None]:
        if way.kind == "ddp":
            yield None
        elif way.kind == "noop":
            register_hook(model, "noop")
            yield None
        else:
            # Nobody trains these weights.
            settings = replace(way.settings(), weight_check_steps=0)
            folder = self._folder / f"run-{self._num_trainings}" if way.kind == "adaptive" else None
            with closing(attach_with(model, settings, folder=folder)) as attachment:
                yield attachment

    def _measure_codecs(self) -> None:
        """Time codecs on all ranks at once. The shortest call counts, so it does not show that ranks share cores."""
        large = [gradient.flatten() for gradient in self._gradients if gradient.ndim > 1]
        grad_N = torch.cat(large)
        found = {}
        for spec in candidate_specs(self._fidelity):
            dist.barrier()
            cost = measure_codec(spec)
            gain = kept_energy(make_codec(spec), grad_N, key=0) / float(grad_N.double().square().sum())
            found[str(spec)] = {"cost": asdict(cost), "gain": gain}
        if self._rank == 0:
            send(found)


def _work(job: dict[str, Any]) -> None:
    _OrderedRank(job).work()


if __name__ == "__main__":
    run_rank(_work)
