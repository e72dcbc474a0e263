"""Torch's hooks and its averager of parameters, in the place of an attachment."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from bench.step.cases import StepWay
from bench.step.torch_hooks import register_hook
from cgx_ray.plan import STEPS_TOGETHER


class TorchPeer:
    """Averages gradients by a hook; local SGD averages gradients first, and then the parameters every few steps."""

    def __init__(self, model: DistributedDataParallel, way: StepWay) -> None:
        self._module: nn.Module = model.module
        self._averager = None
        if way.kind == "local_sgd":
            self._averager = PeriodicModelAverager(period=way.period, warmup_steps=STEPS_TOGETHER)
        register_hook(model, way.kind, way.codec, first_alone=STEPS_TOGETHER)

    def end_step(self) -> None:
        """Call after each step of the optimizer."""
        if self._averager is not None:
            self._averager.average_parameters(self._module.parameters())

    def end_round(self) -> None:
        """Make all ranks have the same parameters."""
        if self._averager is not None:
            average_parameters(self._module.parameters(), self._averager.process_group)

    def close(self) -> None:
        """Do nothing: the hook ends with its model."""
