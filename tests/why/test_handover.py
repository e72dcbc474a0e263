"""Two ranks are observed, and their records come to rank 0's folder, also if the ranks are on different nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.why import observer
from cgx_ray.why.paths import paths_of
from cgx_ray.why.records import GATHERED_FILE, OPTIONS_FILE, RankRecord, from_json, rank_file
from cgx_ray.why.step_observer import NUM_WARM_STEPS
from cgx_ray_autoload.observing import arm

NUM_STEPS = 4


def train(rank: int, folder: Path, ranks_per_node: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    arm(str(folder / str(rank // ranks_per_node)))
    model = DistributedDataParallel(nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_WARM_STEPS + NUM_STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 256)).mean().backward()
        optimizer.step()
    # The processes of this test end without what Python does at its end.
    assert observer._observer is not None
    observer._observer.finish()


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_records_of_all_ranks_come_to_rank_0(tmp_path: Path, ranks_per_node: int) -> None:
    for node in range(2 // ranks_per_node):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / OPTIONS_FILE).write_text(json.dumps({"num_steps": NUM_STEPS}))
    run_ranks(2, train, tmp_path, ranks_per_node)
    folder = tmp_path / "0"
    assert not list(tmp_path.rglob("error-*"))
    assert json.loads((folder / GATHERED_FILE).read_text()) == {"missing": []}
    records = [from_json(RankRecord, json.loads((folder / rank_file(rank)).read_text())) for rank in range(2)]
    assert [(one.rank, one.is_whole, len(one.steps), one.num_warm) for one in records] == [
        (rank, True, NUM_STEPS, NUM_WARM_STEPS) for rank in range(2)
    ]
    assert [len(one.layers) for one in records] == [2, 0]
    # Both ranks are on this node. Each sends the half of the gradients to the other, and the other's sum back.
    (path,) = paths_of(records)
    assert path.sent_bytes >= 2 * NUM_STEPS * 4 * 256 * 256
    if ranks_per_node == 1:
        assert (tmp_path / "1" / GATHERED_FILE).exists()
