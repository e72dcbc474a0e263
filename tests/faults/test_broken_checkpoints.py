"""A worker of Ray Train resumes from a checkpoint in which the state of one rank is broken: no rank attaches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.train
import torch
import torch.distributed as dist
from support.branches import Branches, train
from support.ranks import log_lines, run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.ray_train.worker import RaySession
from cgx_ray.session.attachment import process
from cgx_ray.session.settings import Settings

NUM_RANKS = 3
BROKEN = 1


def _file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"cgx_ray-rank{rank:05d}-of-{NUM_RANKS:05d}.pt"


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: Path) -> None:
    """Change a bit in the middle, which is in a tensor."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _of_another_model(file: Path) -> None:
    state = torch.load(file, weights_only=True)
    torch.save({**state, "residuals": {"other.weight": torch.zeros(3)}}, file)


def _not_finite(file: Path) -> None:
    state = torch.load(file, weights_only=True)
    state["residuals"]["left.weight"][3] = float("nan")
    torch.save(state, file)


def _of_another_rank(file: Path) -> None:
    file.write_bytes(_file(file.parent, 0).read_bytes())


# By what is done to the file of one rank, what all ranks say.
BREAKS: dict[Callable[[Path], object], str] = {
    _cut: "is damaged (File is not a zip file); start from another checkpoint",
    _flip: "is damaged (",
    _empty: "is damaged (File is not a zip file); start from another checkpoint",
    _not_finite: f"rank {BROKEN} of {NUM_RANKS} has residuals of layer 'left.weight' with NaN or Inf",
    _of_another_rank: f"got the state of rank 0 of {NUM_RANKS} on rank {BROKEN} of {NUM_RANKS}; memory is each rank's",
    _of_another_model: "layer 'other.weight', the model has no such layer; the state is from another model",
}


class _Resumed(RaySession):
    """The session of a Ray Train worker, without the thread that asks controller and monitors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Settings(policy="static"), None, None, folder)

    def _carry(self, attachment: cgx_ray.Attachment) -> None: ...


def _attach(rank: int, checkpoint: Path | None) -> tuple[DistributedDataParallel, cgx_ray.Attachment]:
    """Attach as a worker of Ray Train does that starts from `checkpoint`."""
    start = ray.train.Checkpoint.from_directory(str(checkpoint)) if checkpoint is not None else None
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: NUM_RANKS)
    ray.train.get_checkpoint, ray.train.get_context = lambda: start, lambda: context
    process.session = _Resumed(Path())
    model = DistributedDataParallel(Branches())
    return model, cgx_ray.attach(model, codec="topk:density=0.05", scheme="allgather")


def _refused(rank: int, folder: Path) -> list[str]:
    """Save, and break the file of one rank. Return the errors of `attach`, after which the process can still attach."""
    model, attachment = _attach(rank, None)
    train(model, rank, range(3))
    for breaks in BREAKS:
        torch.save(attachment.state_dict(), _file(folder / breaks.__name__, rank))
    attachment.close()
    dist.barrier()
    if rank == BROKEN:
        for breaks in BREAKS:
            breaks(_file(folder / breaks.__name__, BROKEN))
    dist.barrier()
    said = []
    for breaks in BREAKS:
        with pytest.raises(cgx_ray.StateError) as caught:
            _attach(rank, folder / breaks.__name__)
        said.append(str(caught.value))
    _attach(rank, None)[1].close()
    return said


@pytest.mark.fault(
    "one state in a checkpoint is cut, empty, not finite or another rank's", "one `StateError` on all ranks"
)
def test_a_broken_state_of_one_rank_is_refused_by_all(tmp_path: Path) -> None:
    for breaks in BREAKS:
        (tmp_path / breaks.__name__).mkdir()
    for said in run_ranks(NUM_RANKS, _refused, tmp_path):
        for text, breaks in zip(said, BREAKS, strict=True):
            assert BREAKS[breaks] in text, (breaks, text)


def _added_by_one(rank: int, folder: Path) -> tuple[list[str], bool]:
    """Save the state of rank 0 alone, then start from it. Return what is said, and whether all is that state."""
    model, attachment = _attach(rank, None)
    train(model, rank, range(3))
    state = attachment.state_dict()
    if rank == 0:
        torch.save(state, _file(folder, rank))
    attachment.close()
    dist.barrier()
    said = log_lines()
    model, attachment = _attach(rank, folder)
    saved, found = torch.load(_file(folder, 0)), attachment.state_dict()
    train(model, rank, range(3, 5))
    attachment.close()
    return said, all(torch.equal(value, found["residuals"][name]) for name, value in saved["residuals"].items())


@pytest.mark.fault("a checkpoint that only some ranks added their state to", "all begin with the mean, with a warning")
def test_a_run_goes_on_from_a_checkpoint_to_which_only_one_rank_added_its_state(tmp_path: Path) -> None:
    (said, is_same), *others = run_ranks(NUM_RANKS, _added_by_one, tmp_path)
    assert is_same
    # After it comes what begins now.
    assert f"lacks the states of ranks 1, 2 of {NUM_RANKS}" in said[0]
    assert len(said) <= 2
    assert others == [([], True)] * (NUM_RANKS - 1)
