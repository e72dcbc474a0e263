"""Averages the gradients, or parameters, of one way's model in `bench step`, `bench peers` and `bench accuracy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from bench.step.cases import StepWay
from bench.step.torch_hooks import register_hook
from cgx_ray.engine.step_sample import Span
from cgx_ray.plan import STEPS_TOGETHER, Plan


class Averaging:
    """DDP itself, or a hook of torch: all is done when backward ends.

    plan  in force; None without an engine
    """

    plan: Plan | None = None

    def __init__(self, model: DistributedDataParallel, way: StepWay, *, first_alone: int = 0) -> None:
        """`first_alone`: first step whose gradients local SGD leaves to each rank."""
        if way.kind != "ddp":
            register_hook(model, way.kind, way.codec, share_sent=way.share_sent, first_alone=first_alone)

    def end_step(self) -> None:
        """Finish a step after its backward, and that of the optimizer if there is one."""

    def end_round(self) -> None:
        """Finish a round after the last of its steps."""

    def average_now(self) -> None:
        """Make all ranks have the same parameters, also within a round."""

    @property
    def last_spans(self) -> Sequence[Span]:
        """Phases of the engine's groups in the last step."""
        return ()

    def close(self) -> None:
        """Take the averaging from the model."""


class TorchRounds(Averaging):
    """Torch's hook, which leaves gradients to each rank, and its averager of parameters, once in every round."""

    def __init__(self, model: DistributedDataParallel, way: StepWay, *, first_alone: int = 0) -> None:
        super().__init__(model, way, first_alone=first_alone)
        self._model, self._averager = model, PeriodicModelAverager(period=way.period, warmup_steps=first_alone)

    def end_step(self) -> None:
        self._averager.average_parameters(self._model.parameters())

    def average_now(self) -> None:
        average_parameters(self._model.parameters(), self._averager.process_group)


class EngineAveraging(Averaging):
    """cgx_ray's engine, with a plan or with one codec.

    plan         in force; None: the codec, scheme and period of the way
    group_bytes  without a plan; None: the default
    """

    def __init__(
        self, model: DistributedDataParallel, way: StepWay, plan: Plan | None, group_bytes: int | None
    ) -> None:
        given: dict[str, Any] = {"codec": way.codec, "scheme": way.scheme, "period": way.period}
        given = {"plan": plan} if plan is not None else {**given, "group_bytes": group_bytes}
        # Without shared memory between ranks, which would go around the links of a lab. Nobody trains these weights.
        self._attachment = cgx_ray.attach(model, **given, shared_memory=False, weight_check_steps=0)
        if way.period > 1:
            # As in a training that goes on: in its first steps, ranks do not train alone.
            self._attachment.load_state_dict(self._attachment.state_dict() | {"step": STEPS_TOGETHER})
        self.plan = self._attachment.plan

    def end_round(self) -> None:
        self._attachment.end_round()

    @property
    def last_spans(self) -> Sequence[Span]:
        return self._attachment.last_spans

    def close(self) -> None:
        self._attachment.close()
