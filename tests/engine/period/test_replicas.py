"""Replicas of several ranks: nodes that average their gradients in each step, and exchange with others in rounds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.ranks import run_cases, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.collectives.transport import tcp
from cgx_ray.plan import STEPS_TOGETHER

PERIOD = 4
NUM_STEPS = STEPS_TOGETHER + 2 * PERIOD
NODES = (0, 0, 1, 1)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 1))


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    x_BI = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: Tensor = (model(x_BI) - x_BI[:, :3].sum(1, keepdim=True)).square().mean()
    return loss


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().double().flatten() for one in model.parameters()])


def _train(rank: int, nodes: tuple[int, ...], codec: str, optimizer: str) -> tuple[list[Tensor], float]:
    """Return the parameters after each step, and the bytes that the last round has sent to other nodes."""
    tcp.host_key = lambda: f"node {nodes[rank]}"
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    attachment = cgx_ray.attach(model, codec=codec, scheme="sra", intra="dense", period=PERIOD)
    make = {"sgd": partial(torch.optim.SGD, lr=0.05), "adamw": partial(torch.optim.AdamW, lr=0.01)}[optimizer]
    stepping = make(model.parameters())
    parameters = []
    for step in range(NUM_STEPS):
        stepping.zero_grad()
        _loss(model, rank, step).backward()
        stepping.step()
        parameters.append(_flat(model))
    assert attachment.last_step is not None
    card_bytes = attachment.last_step.card_bytes
    attachment.close()
    return parameters, card_bytes


def _expected(nodes: tuple[int, ...]) -> Tensor:
    """Return the parameters in the end, in float64: SGD by the mean gradient of all ranks, then of each node."""
    models = {node: _model().double() for node in nodes}
    for step in range(NUM_STEPS):
        own = []
        for rank, node in enumerate(nodes):
            x_BI = torch.randn(16, 24, generator=torch.Generator().manual_seed(1000 * step + rank)).double()
            loss = (models[node](x_BI) - x_BI[:, :3].sum(1, keepdim=True)).square().mean()
            gradients = torch.autograd.grad(loss, list(models[node].parameters()))
            own.append(torch.cat([one.flatten() for one in gradients]))
        for node, model in models.items():
            here = [one for one, other in zip(own, nodes, strict=True) if step < STEPS_TOGETHER or other == node]
            parameters_N = _flat(model) - 0.05 * torch.stack(here).mean(0)
            nn.utils.vector_to_parameters(parameters_N, model.parameters())
        if step >= STEPS_TOGETHER and (step - STEPS_TOGETHER) % PERIOD == PERIOD - 1:
            mean_N = torch.stack([_flat(models[node]) for node in nodes]).mean(0)
            for model in models.values():
                nn.utils.vector_to_parameters(mean_N, model.parameters())
    return _flat(models[0])


@pytest.mark.parametrize("nodes", [NODES, (0, 1, 0)], ids=str)
def test_nodes_train_as_one_replica_each(nodes: tuple[int, ...]) -> None:
    cases = [(codec, optimizer) for codec in ("none", "qsgd:bits=4") for optimizer in ("sgd", "adamw")]
    trainings = [partial(_train, nodes=nodes, codec=codec, optimizer=optimizer) for codec, optimizer in cases]
    for case, results in zip(cases, run_cases(len(nodes), trainings), strict=True):
        for result in results:
            assert not isinstance(result, Exception), (case, result)
        for step, of_ranks in enumerate(zip(*(parameters for parameters, _ in results), strict=True)):
            by_node = {node: one for node, one in zip(nodes, of_ranks, strict=True)}
            for node, one in zip(nodes, of_ranks, strict=True):
                assert torch.equal(one, by_node[node]), (case, step)
            is_together = step < STEPS_TOGETHER or (step - STEPS_TOGETHER) % PERIOD == PERIOD - 1
            assert torch.equal(by_node[0], by_node[1]) == is_together, (case, step)
        if case == ("none", "sgd"):
            torch.testing.assert_close(results[0][0][-1], _expected(nodes), rtol=0, atol=2e-5)


def _switched(rank: int) -> tuple[list[Tensor], list[int]]:
    """Train together, in rounds of nodes, in rounds of ranks, in rounds of nodes. Return parameters and versions."""
    tcp.host_key = lambda: f"node {NODES[rank]}"
    model = DistributedDataParallel(_model())
    layers = cgx_ray.layers_of(model)
    attachment = cgx_ray.attach(model, codec="none", scheme="sra")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plans = {STEPS_TOGETHER: "dense", STEPS_TOGETHER + 12: "flat", STEPS_TOGETHER + 32: "dense"}
    parameters, versions = [], []
    for step in range(STEPS_TOGETHER + 52):
        if step in plans:
            version = 1 + list(plans).index(step)
            plan = cgx_ray.make_plan(
                layers, version=version, world_size=4, codec="none", scheme="sra", intra=plans[step], period=PERIOD
            )
            attachment.hold(plan)
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()
        parameters.append(_flat(model))
        assert attachment.plan is not None
        versions.append(attachment.plan.version)
    attachment.close()
    return parameters, versions


def test_replicas_may_change_at_the_end_of_a_round() -> None:
    (first, versions), (second, _), (third, _), _ = run_ranks(4, _switched)
    assert sorted(set(versions)) == [0, 1, 2, 3]
    begin = next(step for step in range(len(first)) if not torch.equal(first[step], third[step]))
    for step in range(begin, len(first)):
        place = (step - begin) % PERIOD
        is_round_end = place == PERIOD - 1
        assert torch.equal(first[step], third[step]) == is_round_end
        # The plan in force when a round begins says who trains alone in it.
        is_of_ranks = step - place > begin and versions[step - place - 1] == 2
        assert torch.equal(first[step], second[step]) == (is_round_end or not is_of_ranks), step
