"""Ranks on several nodes hand their records to rank 0 through the store of torch.distributed."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from support.why.made_records import training

from cgx_ray.untrusted import parse_json
from cgx_ray.why import watch
from cgx_ray.why.records import GATHERED_FILE, RankRecord, from_json, rank_file


def read(folder: Path, rank: int) -> RankRecord:
    return from_json(RankRecord, parse_json((folder / rank_file(rank)).read_bytes()))


@pytest.mark.parametrize("is_measured", [True, False])
def test_rank_0_has_what_others_see_before_the_end_and_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    """Where scripts end before all is measured, `--stop` has nothing to end: their status counts."""
    monkeypatch.setattr(watch, "_SOON_S", 0.0)
    monkeypatch.setattr(watch, "_LINGER_S", 0.0)
    store, records = dist.HashStore(), [replace(one, is_whole=False) for one in training(2)]
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    watches = []
    for rank, node in enumerate(nodes):
        node.mkdir()
        record = records[rank]
        watches.append(watch.Watch(node, rank, 2, store, lambda _, record=record: record, lambda act: act))
        watches[-1].start()
    deadline_s = time.monotonic() + 60
    while not (nodes[0] / rank_file(1)).exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert read(nodes[0], 1) == records[1]
    for one in watches if is_measured else []:
        one.end()
    ends = [threading.Thread(target=one.finish) for one in watches]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    assert read(nodes[0], 1) == replace(records[1], is_whole=True)
    assert [(node / GATHERED_FILE).exists() for node in nodes] == [is_measured] * 2
    assert [one._store for one in watches] == [None] * 2, "the training may end its process group"
