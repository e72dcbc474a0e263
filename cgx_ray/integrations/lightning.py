"""cgx_ray in Lightning: `Trainer(..., callbacks=[CGXCallback()])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from cgx_ray.control.policies.policy import Policy
from cgx_ray.errors import names_arguments
from cgx_ray.session.attach import attach
from cgx_ray.session.attachment import Attachment

_KEY = "cgx_ray"


@names_arguments
class CGXCallback(Callback):
    """Attaches the DistributedDataParallel that Lightning makes, just before training starts.

    The loss and the learning rate of the first optimizer are reported with `Attachment.observe`. Checkpoints hold what
    codecs have kept on each rank. Before validation and at the end of an epoch all ranks have the same parameters, also
    if a period is more than 1.

    attachment  None before training and after it
    """

    def __init__(self, *, policy: Policy | str | None = None, **options: Any) -> None:
        """
        policy   as of `cgx_ray.attach`, such as "adaptive"
        options  further arguments of `cgx_ray.attach`, such as `codec="qsgd:bits=4"`
        """
        self.attachment: Attachment | None = None
        self._options = {**options, "policy": policy}
        self._states: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = trainer.strategy.model
        assert model is not None
        self.attachment = attach(model, **self._options)
        if self._states is not None:
            self.attachment.load_state_dict(self._states)
            self._states = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not in `on_before_backward`, where a GradScaler has scaled it.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.attachment is not None and isinstance(loss, Tensor) and loss.numel() == 1:
            lr = trainer.optimizers[0].param_groups[0]["lr"]
            self.attachment.observe(loss=loss.detach() * trainer.accumulate_grad_batches, lr=lr)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_round()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_round()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the states of all ranks to the checkpoint. Lightning calls it on all of them, and rank 0 writes."""
        if self.attachment is None:
            return
        own, group = self.attachment.state_dict(), self.attachment.host_group
        states: list[Any] | None = [own]
        if group is not None:
            states = [None] * own["world_size"] if own["rank"] == 0 else None
            dist.gather_object(own, states, group=group)
        if states is not None:
            checkpoint[_KEY] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the states until training starts. A checkpoint from a run without cgx_ray has none."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._states = checkpoint.get(_KEY)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Lightning calls no `teardown` then.
        self._close()

    def _close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None

    def _end_round(self) -> None:
        # Lightning also validates before training starts.
        if self.attachment is not None:
            self.attachment.end_round()
