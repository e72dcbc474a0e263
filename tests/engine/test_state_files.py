"""Files of codecs' memory in a checkpoint: other world sizes in bounded memory, and folders that are refused."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.train import Checkpoint
from support.branches import Branches
from support.ranks import log_lines, run_cases
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.session.state_files import read_state, state_file, write_state
from cgx_ray.session.states import STATE_FORMAT, no_memory

# Elements of the one layer: 40 MiB, since the C library gives memory back at once from 32 MiB on.
NUMEL = 10 << 20
STATE_MIB = 4 * NUMEL >> 20
NUM_FILES = 6


def _state(rank: int, world_size: int, numel: int = 3, step: int = 7) -> dict[str, Any]:
    memories = no_memory() | {"residuals": {"w": torch.full((numel,), float(rank))}}
    head = {"format": STATE_FORMAT, "rank": rank, "world_size": world_size, "step": step, "loss_scale": 1.0}
    return {**head, **memories}


def _write_all(folder: Path, world_size: int, numel: int = 3) -> None:
    for rank in range(world_size):
        torch.save(_state(rank, world_size, numel), folder / state_file(rank, world_size))


def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    """Also in the directory at the end of the file, where it may look like a method or an encryption."""
    file = tmp_path / state_file(0, 1)
    write_state(_state(0, 1), tmp_path)
    content = file.read_bytes()
    num_refused = 0
    for place in range(len(content) - 400, len(content)):
        for bit in (0, 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            file.write_bytes(flipped)
            try:
                state = read_state(tmp_path, 0, 1)
            except cgx_ray.StateError:
                num_refused += 1
            else:
                assert state is not None
                assert torch.equal(state["residuals"]["w"], torch.zeros(3))
    assert num_refused > 0


_MEASURED = """
import sys
from pathlib import Path
import torch
from cgx_ray.session.state_files import read_state

def mib(field):
    return int(Path("/proc/self/status").read_text().partition(field + ":")[2].split()[0]) / 1024

def measure(read):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset
    before = mib("VmRSS")
    print(read(), mib("VmHWM") - before)

folder, num_files = Path(sys.argv[1]), int(sys.argv[2])
measure(lambda: float(read_state(folder, 1, num_files - 2)["residuals"]["w"][-1]))
measure(lambda: float(read_state(folder, 1, num_files)["residuals"]["w"][-1]))
measure(lambda: len([torch.load(file, weights_only=True) for file in folder.iterdir()]))
"""


@pytest.mark.fault("restart with another number of ranks", "memory for two states, whatever the number of files")
def test_a_changed_world_size_takes_the_memory_of_two_states_for_any_number_of_files(tmp_path: Path) -> None:
    _write_all(tmp_path, NUM_FILES, NUMEL)
    command = [sys.executable, "-c", _MEASURED, str(tmp_path), str(NUM_FILES)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    mean, mean_mib, own, own_mib, _, all_mib = map(float, printed)
    assert (mean, own) == (2.5, 1.0)
    # The sum, and the file that is read. Half a state is far more than what else the process allocates.
    assert STATE_MIB < mean_mib < 2.5 * STATE_MIB, printed
    assert own_mib < 1.5 * STATE_MIB, printed
    # The measurement sees what it is meant to see.
    assert all_mib > (NUM_FILES - 0.5) * STATE_MIB, printed


def test_each_rank_finds_its_own_state_or_the_mean(tmp_path: Path) -> None:
    assert read_state(tmp_path, 0, 2) is None
    _write_all(tmp_path, 2)
    (tmp_path / "model.pt").touch()
    own = read_state(tmp_path, 1, 2)
    assert own is not None
    assert own["residuals"]["w"].tolist() == [1.0] * 3
    merged = read_state(tmp_path, 2, 3)
    assert merged is not None
    assert (merged["rank"], merged["world_size"], merged["step"]) == (2, 3, 7)
    assert merged["residuals"]["w"].tolist() == [0.5] * 3
    alone = cgx_ray.attach(torch.nn.Linear(1, 1))
    alone.load_state_dict(_state(rank, 2) for rank in range(2))
    assert alone.state_dict()["residuals"]["w"].tolist() == [0.5] * 3


@pytest.mark.fault("a checkpoint with files of two world sizes", "one `StateError` that names the folder")
def test_a_folder_with_files_of_two_world_sizes_is_one_clear_error(tmp_path: Path) -> None:
    _write_all(tmp_path, 2)
    _write_all(tmp_path, 4)
    for rank, world_size in ((0, 2), (0, 4), (1, 3), (0, 1)):
        with pytest.raises(cgx_ray.StateError) as caught:
            read_state(tmp_path, rank, world_size)
        assert str(caught.value) == (
            f"checkpoint {tmp_path} has states of several runs: 2 of 2 ranks, 4 of 4 ranks (cgx_ray-rank*-of-*.pt); "
            "keep the files of the run that wrote the checkpoint last, and delete the others"
        )


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_folder_that_lacks_states_gives_every_rank_the_mean_of_the_others_and_says_so(
    world_size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_all(tmp_path, 4)
    for rank in (1, 2):
        (tmp_path / state_file(rank, 4)).unlink()
    for rank in range(world_size):
        state = read_state(tmp_path, rank, world_size)
        assert state is not None
        assert (state["rank"], state["world_size"], state["residuals"]["w"].tolist()) == (rank, world_size, [1.5] * 3)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"checkpoint {tmp_path} lacks the states of ranks 1, 2 of 4" in said
    assert "begins with the mean of the others'; call add_state on every rank" in said


def _add_states(rank: int, calling: tuple[int, ...], folder: Path) -> list[str]:
    """Add the states of the ranks `calling` to three checkpoints; return what is said."""
    attachment = cgx_ray.attach(DistributedDataParallel(Branches()), codec="topk:density=0.1", scheme="allgather")
    said = log_lines()
    for _ in range(3):
        if rank in calling:
            cgx_ray.add_state(Checkpoint.from_directory(folder))
        dist.barrier()
    attachment.close()
    return [line for line in said if "checkpoint" in line]


def test_a_rank_that_adds_its_state_alone_is_warned_once_while_it_trains(tmp_path: Path) -> None:
    (alone, silent), both = run_cases(
        2, [partial(_add_states, calling=ranks, folder=tmp_path) for ranks in ((0,), (0, 1))]
    )
    assert silent == []
    (warning,) = alone
    assert warning.startswith("rank 0: only 1 of 2 ranks add their state to checkpoints; call add_state on every rank")
    assert both == [[], []]


def test_a_folder_that_is_used_again_keeps_the_files_of_the_last_run(tmp_path: Path) -> None:
    _write_all(tmp_path, 4)
    for rank in range(2):
        write_state(_state(rank, 2, step=9), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [state_file(0, 2), state_file(1, 2)]
    merged = read_state(tmp_path, 0, 4)
    assert merged is not None
    assert merged["step"] == 9
