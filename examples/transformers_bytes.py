"""Train a small GPT-2 of Hugging Face's transformers with compressed gradients, on the bytes of Python's own library.

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/transformers_bytes.py

The line with `CGXCallback` is all that differs from a script without cgx_ray.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from cgx_ray.integrations.transformers import CGXCallback

CONTEXT = 64


class LibraryBytes(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Pieces of CONTEXT bytes of modules of the standard library."""

    def __init__(self, names: tuple[str, ...]) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = b"".join((folder / name).read_bytes() for name in names)
        self._pieces = torch.tensor(list(text)).unfold(0, CONTEXT, CONTEXT)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", default="transformers_bytes", help="folder of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    args = parser.parse_args()
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            learning_rate=3e-3,
            per_device_train_batch_size=8,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=args.steps,
            save_steps=20,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=LibraryBytes(("argparse.py", "inspect.py", "typing.py", "socket.py")),
        eval_dataset=LibraryBytes(("abc.py",)),
    )
    trainer.add_callback(CGXCallback(trainer, codec="qsgd:bits=4"))  # cgx_ray
    trainer.train(resume_from_checkpoint=args.resume or None)
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step}: loss {trainer.state.log_history[-2]['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
