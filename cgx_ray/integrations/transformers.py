"""cgx_ray in Hugging Face's Trainer: `trainer.add_callback(CGXCallback(trainer))`."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cgx_ray.control.policies.policy import Policy
from cgx_ray.errors import ConfigError, names_arguments
from cgx_ray.integrations.rank_files import load_rank_files, save_rank_file
from cgx_ray.session.attach import attach
from cgx_ray.session.attachment import Attachment, process


@names_arguments
class CGXCallback(TrainerCallback):
    """Attaches the DistributedDataParallel that the Trainer makes, when training begins.

    The loss and the learning rate are reported with `Attachment.observe` whenever the Trainer logs them. Checkpoints
    get a file per rank with what codecs have kept, `cgx_ray-rank<rank>-of-<ranks>.pt`. Before evaluations and
    checkpoints, and at the end, all ranks have the same parameters, also if a period is more than 1.

    attachment  None before the first training
    """

    def __init__(
        self,
        trainer: Trainer | None = None,
        *,
        policy: Policy | str | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """
        trainer      that the callback is added to
        policy       as of `cgx_ray.attach`, such as "adaptive"
        resume_from  checkpoint that `trainer.train(resume_from_checkpoint=)` gets; by default the one of the same step
                     in the Trainer's own folder
        options      further arguments of `cgx_ray.attach`, such as `codec="qsgd:bits=4"`. `folder`, for the journal of
                     a policy that decides, is the Trainer's `output_dir` by default

        Raises ConfigError without a Trainer.
        """
        if not isinstance(trainer, Trainer):
            raise ConfigError(
                f"CGXCallback got {trainer!r} in place of the Trainer; make the Trainer first, then "
                "trainer.add_callback(CGXCallback(trainer))"
            )
        self.attachment: Attachment | None = None
        # It holds its callbacks.
        self._trainer = weakref.proxy(trainer)
        self._options, self._resume_from = {**options, "policy": policy}, resume_from
        self._attached: weakref.ref[Any] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        model = self._trainer.model_wrapped
        is_attached = self.attachment is not None and not self.attachment.is_closed
        if not is_attached or self._attached is None or self._attached() is not model:
            if self.attachment is not None:
                self.attachment.close()
            self.attachment, self._attached = attach(model, **self._with_folder(args)), weakref.ref(model)
        assert self.attachment is not None
        if state.global_step:
            given = self._resume_from or args.resume_from_checkpoint
            load_rank_files(self.attachment, Path(given) if given else _checkpoint(args, state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        if self.attachment is not None and logs and "loss" in logs:
            self.attachment.observe(loss=logs["loss"], lr=logs.get("learning_rate"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end_round_before(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._end_round_before(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.attachment is not None:
            save_rank_file(self.attachment, _checkpoint(args, state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # The Trainer may train the same wrapped model again, so it stays attached.
        if self.attachment is not None:
            self.attachment.end_round()

    def _with_folder(self, args: TrainingArguments) -> dict[str, Any]:
        """Return the arguments of `attach`, with the Trainer's own folder for the journal of a policy that decides."""
        policy = self._options.get("policy")
        decides = getattr(policy, "decides", policy not in (None, "static"))
        return {"folder": args.output_dir, **self._options} if decides and process.session is None else self._options

    def _end_round_before(self, control: TrainerControl) -> None:
        is_due = control.should_evaluate or control.should_save or control.should_training_stop
        if self.attachment is not None and is_due:
            self.attachment.end_round()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
