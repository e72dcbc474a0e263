"""The link as real ranks and real sockets show it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile

import pytest
import torch
from support.ranks import run_ranks

from cgx_ray.collectives.transport import tcp
from cgx_ray.control.joined_steps import StepJoiner
from cgx_ray.control.network.link_estimate import PassiveLink
from cgx_ray.control.network.traffic import StepTraffic
from cgx_ray.lab.namespaces import Lab
from cgx_ray.monitors.sample import Burst, StepSample, node_steps
from cgx_ray.session.attach import attach


def train(rank: int, transport: str) -> list[StepSample]:
    # Each rank gets a host of its own, since messages through shared memory show no network.
    tcp.host_key = lambda: f"host {rank}"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    attachment = attach(ddp, codec="bf16", scheme="sra", transport=transport)
    for _ in range(6):
        ddp(torch.ones(1, 1024)).sum().backward()
    samples = attachment.take_samples()
    attachment.close()
    return samples


def test_round_trips_of_real_ranks_add_up_and_long_messages_have_a_rate() -> None:
    by_rank = run_ranks(3, train, "tcp")
    steps = StepJoiner(3).add_node_steps(node_steps(sample for samples in by_rank for sample in samples), 0.0)
    assert len(steps) == 6
    # The first greeting follows step 0, and is heard at the end of step 1.
    assert steps[0].traffic.round_trip_s == {}
    for step in steps[1:]:
        trips = step.traffic.round_trip_s
        assert trips.keys() == {(0, 1), (0, 2), (1, 2)}
        # Loopback: more than 0 s, and less than all steps together.
        assert all(0 < seconds < sum(one.step_s for one in steps) for seconds in trips.values()), trips
    bursts = [burst for step in steps for bursts in step.traffic.bursts.values() for burst in bursts]
    sent = sum(sample.wire_bytes for samples in by_rank for sample in samples)
    assert all(burst.seconds > 0 and burst.num_bytes > 0 for burst in bursts)
    assert sum(burst.num_bytes for burst in bursts) <= sent
    assert all(sender != receiver for step in steps for sender, receiver in step.traffic.pair_rate)


def test_over_torch_distributed_only_exchanges_tell() -> None:
    by_rank = run_ranks(2, train, "gloo")
    steps = StepJoiner(2).add_node_steps(node_steps(sample for samples in by_rank for sample in samples), 0.0)
    link = PassiveLink()
    for step in steps:
        assert not step.traffic.round_trip_s
        assert not any(step.traffic.bursts.values())
        link.add_traffic(step.traffic, 1e-5)
    assert link.latency_s is None
    assert link.bandwidth is not None
    assert link.bandwidth.source in {"fit", "exchanges"}


@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
def test_a_real_exchange_shows_the_rate_of_the_lab_within_10_percent() -> None:
    with Lab(3, rate_bit_per_s=1e8) as lab, tempfile.TemporaryDirectory() as folder:
        ranks = [
            lab.popen(rank, [sys.executable, "-c", _EXCHANGE, str(rank), folder, "1500000"], stdout=subprocess.PIPE)
            for rank in range(3)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    link = PassiveLink()
    for step in zip(*(json.loads(output) for output in outputs), strict=True):
        bursts = {rank: [Burst(*burst) for burst in seen["bursts"]] for rank, seen in enumerate(step)}
        trips = {(a, b): step[a]["lag_s"][b] + step[b]["lag_s"][a] for a, b in itertools.combinations(range(3), 2)}
        link.add_traffic(StepTraffic(seconds=1.0, bursts=bursts, round_trip_s=trips), 1e-3)
    assert link.bandwidth is not None
    assert link.latency_s is not None
    # 1448 of 1514 bytes are payload.
    assert 8 * link.bandwidth.value == pytest.approx(0.956e8, rel=0.1), link.bandwidth
    assert 0 < link.latency_s.value < 5e-3, link.latency_s


_EXCHANGE = """
import json, sys, torch, torch.distributed as dist
from cgx_ray.collectives.transport.tcp import connect_mesh
rank, folder, numel = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
mesh = connect_mesh(dist.group.WORLD, 60.0)
peers = [peer for peer in range(3) if peer != rank]
steps = []
for _ in range(8):
    flags = {peer: torch.zeros(5, dtype=torch.int64) for peer in peers}
    lag_s = mesh.wait(mesh.post({peer: torch.zeros(5, dtype=torch.int64) for peer in peers}, flags), 60.0)
    sent, received = torch.zeros(numel), {peer: torch.zeros(numel) for peer in peers}
    mesh.wait(mesh.post(dict.fromkeys(peers, sent), received), 60.0)
    dist.barrier()
    steps.append({"lag_s": lag_s, "bursts": [burst[1:] for burst in mesh.take_bursts() if burst[0] < 0]})
print(json.dumps(steps), flush=True)
dist.barrier()
mesh.close()
"""
