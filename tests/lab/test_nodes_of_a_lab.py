"""Nodes as ranks in a lab see them: shared memory inside a host, and what its network card sends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.emulated import needs_lab

from cgx_ray.lab.namespaces import Lab
from cgx_ray.runtime_ext.shm import host_key

_RANK_IN_LAB = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import cgx_ray
from cgx_ray.monitors.host import read_nics

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(512, 512, bias=False))
attachment = cgx_ray.attach(model, codec="none", scheme="sra", intra="flat")
layers = cgx_ray.layers_of(model)

def sent_by_host():
    dist.barrier()
    sent = sum(card.sent for card in read_nics().values())
    dist.barrier()
    return sent

found = []
for version, plan in enumerate(json.loads(sys.argv[3])):
    attachment.hold(cgx_ray.make_plan(layers, version=version + 1, world_size=4, **plan))
    card_bytes = 0
    for step in range(6):
        # Ranks take one step to agree on a plan, which is in force from the next step on.
        if step == 2:
            before = sent_by_host()
        model.zero_grad()
        model(torch.ones(1, 512)).sum().mul(rank + 1).backward()
        if step >= 2:
            card_bytes += attachment.last_step.card_bytes
    assert attachment.last_step.plan_version == version + 1
    found.append([attachment.last_step.wire_bytes, card_bytes, sent_by_host() - before])
print(json.dumps([found, model.module.weight.grad.unique().tolist()]))
dist.barrier()
attachment.close()
dist.destroy_process_group()
"""
# Plans, and the bytes of 1 MiB that each rank sends: a quarter to each of three others, twice; around the ring; None
# for AR-Topk, where ranks send different numbers of indices; half of a half to one other rank, twice.
IN_LAB = [
    ({"codec": "none", "scheme": "sra"}, 2 * 3 * (262144 + 32)),
    ({"codec": "none", "scheme": "dense"}, 2 * 3 * 262144),
    ({"codec": "topk:density=0.5", "scheme": "artopk_ring"}, None),
    ({"codec": "none", "scheme": "sra", "intra": "dense"}, 2 * (262144 + 32)),
]


@needs_lab()
def test_ranks_of_a_host_find_each_other_and_count_what_its_card_sends(tmp_path: Path) -> None:
    hosts = (0, 1, 1, 0)
    with Lab(2, rate_bit_per_s=1e9) as lab:
        argv = [sys.executable, "-c", _RANK_IN_LAB]
        plans = json.dumps([plan for plan, _ in IN_LAB])
        ranks = [
            lab.popen(host, [*argv, str(rank), str(tmp_path / "store"), plans], stdout=subprocess.PIPE, text=True)
            for rank, host in enumerate(hosts)
        ]
        outputs = [json.loads(process.communicate()[0]) for process in ranks]
    for host in (0, 1):
        here = [found for (found, _), its_host in zip(outputs, hosts, strict=True) if its_host == host]
        for (plan, sent_bytes), first, second in zip(IN_LAB, *here, strict=True):
            assert sent_bytes in (None, first[0]), (plan, first)
            # The rest is headers, acknowledgements and the agreement; bytes counted twice or never would make it 1.5.
            ratio = first[2] / (first[1] + second[1])
            assert 1 < ratio < 1.1, (plan, host, ratio, first, second)


@needs_lab()
def test_hosts_of_a_lab_do_not_share_although_they_are_one_machine() -> None:
    script = "from cgx_ray.runtime_ext.shm import host_key; print(host_key())"
    with Lab(2, rate_bit_per_s=1e9) as lab:
        asked = [
            lab.popen(host, [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for host in (0, 0, 1)
        ]
        keys = [process.communicate()[0].strip() for process in asked]
    assert keys[0] == keys[1], "one host sees two folders"
    assert len({*keys, host_key()}) == 3, f"keys of host 0, 0, 1: {keys}, of this one: {host_key()}"
