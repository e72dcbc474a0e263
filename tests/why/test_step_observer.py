"""Hooks of `cgx-ray why` on DDP models of this process: which steps they see, and that training does not notice."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

from cgx_ray.torch_compat import bucket_parameters
from cgx_ray.why.step_observer import NUM_WARM_STEPS, StepObserver
from cgx_ray_autoload.observing import Guard

NUM_STEPS = 6
PAUSE_S = 0.02


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Watched:
    """An observer, how often it has said that steps begin and end, and a guard for its hooks."""

    def __init__(self, folder: Path, num_steps: int = NUM_STEPS) -> None:
        self.calls: list[str] = []
        self.guard = Guard(folder)
        on_begin, on_end = (partial(self.calls.append, name) for name in ("begin", "end"))
        self.observer = StepObserver(num_steps, on_begin, on_end, self.guard.wrapped)

    def add(self, model: DistributedDataParallel) -> None:
        self.observer.add_model(model)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    watched.observer.close()


def make_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))


def train(
    model: nn.Module, num_steps: int, before: Callable[[int], Any] = lambda step: None, num_parts: int = 1
) -> list[Tensor]:
    """Train; `num_parts` backward passes per step. Return the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        before(step)
        optimizer.zero_grad()
        for part in range(num_parts):
            model(torch.full((4, 8), float(step + part))).mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_step_has_its_parts_and_training_gets_the_same_weights(watched: Watched) -> None:
    model = make_model()
    watched.add(model)
    observed = train(model, NUM_WARM_STEPS + NUM_STEPS + 2, lambda step: time.sleep(PAUSE_S))
    unseen = train(make_model(), NUM_WARM_STEPS + NUM_STEPS + 2)
    assert all(torch.equal(one, other) for one, other in zip(observed, unseen, strict=True))
    assert watched.calls == ["begin", "end"]
    steps = watched.observer.steps
    assert len(steps) == NUM_STEPS
    # The first one has begun before the meters were read.
    assert min(step.input_s for step in steps[1:]) >= PAUSE_S
    for step in steps:
        assert min(step.forward_s, step.backward_s, step.exposed_s, step.rest_s, step.processor_s) > 0
        assert step.hidden_s <= step.backward_s
    assert [layer.name for layer in watched.observer.layers()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    last, first = (watched.observer.layers()[place].ready_s for place in (0, 3))
    assert last > first > 0
    assert watched.observer.bucket_bytes == (4 * (8 * 16 + 16 + 16 + 1),)


def test_after_the_warm_steps_one_gradient_has_a_hook_that_ends_the_first_bucket(watched: Watched) -> None:
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02)
    watched.add(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_WARM_STEPS + 2):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).mean().backward()
        optimizer.step()
    hooked = [one for one in model.parameters() if one._post_accumulate_grad_hooks]
    # DDP has made its buckets in the order in which gradients come.
    first, *others = bucket_parameters(model)
    assert [id(one) for one in hooked] == [id(first[-1])]
    assert others
    (step,) = watched.observer.steps
    assert 0 < step.hidden_s < step.backward_s


def test_without_all_parameters_all_gradients_keep_a_hook(watched: Watched) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), find_unused_parameters=True)
    watched.add(model)
    train(model, NUM_WARM_STEPS + 2)
    assert all(one._post_accumulate_grad_hooks for one in model.parameters())
    assert len(watched.observer.steps) == 1


def test_after_the_last_step_no_hook_is_left(watched: Watched) -> None:
    model = make_model()
    watched.add(model)
    train(model, NUM_WARM_STEPS + NUM_STEPS + 1)
    parameters = list(model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in parameters)
    assert not _global_optimizer_post_hooks


def test_a_step_with_several_backward_passes_is_one(watched: Watched) -> None:
    model = make_model()
    watched.add(model)
    train(model, NUM_WARM_STEPS + NUM_STEPS + 1, num_parts=3)
    assert len(watched.observer.steps) == NUM_STEPS
    assert watched.observer.mean_exchanges == 3


def test_passes_without_an_exchange_belong_to_the_step_that_has_one(watched: Watched) -> None:
    model = make_model()
    watched.add(model)

    def accumulate(step: int) -> None:
        with model.no_sync():
            model(torch.ones(4, 8)).mean().backward()

    train(model, NUM_WARM_STEPS + NUM_STEPS + 1, accumulate)
    assert len(watched.observer.steps) == NUM_STEPS
    assert watched.observer.mean_exchanges == 1


def test_an_evaluation_is_in_no_step(watched: Watched) -> None:
    model = make_model()
    watched.add(model)

    def evaluate(step: int) -> None:
        with torch.no_grad():
            model(torch.ones(4, 8))
        time.sleep(PAUSE_S)

    train(model, NUM_WARM_STEPS + NUM_STEPS + 1, evaluate)
    assert len(watched.observer.steps) == NUM_STEPS
    assert {step.input_s for step in watched.observer.steps} == {0.0}


def test_without_an_optimizer_a_step_ends_before_the_next_forward_pass(watched: Watched) -> None:
    model = make_model()
    watched.add(model)
    for _ in range(NUM_WARM_STEPS + NUM_STEPS + 1):
        model(torch.ones(4, 8)).mean().backward()
    assert len(watched.observer.steps) == NUM_STEPS


def test_a_model_that_is_built_again_takes_the_place_of_the_first(watched: Watched) -> None:
    first = make_model()
    watched.add(first)
    train(first, 2)
    del first
    gc.collect()
    second = make_model()
    watched.add(second)
    train(second, NUM_WARM_STEPS + NUM_STEPS)
    assert watched.observer.num_models == 2
    assert watched.observer.lead is not None
    assert watched.observer.lead.model() is second
    assert len(watched.observer.steps) == NUM_STEPS


# Dynamo looks at all arguments of a hook, and hides this warning from all but a filter that makes it an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_are_observed(watched: Watched, whole: bool) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1))
    model = DistributedDataParallel(net if whole else torch.compile(net, backend="eager"))
    watched.add(model)
    train(torch.compile(model, backend="eager") if whole else model, NUM_WARM_STEPS + NUM_STEPS + 1)
    assert len(watched.observer.steps) == NUM_STEPS
    assert not list(watched.guard.folder.iterdir())


def test_the_last_step_counts_at_the_end(watched: Watched) -> None:
    model = make_model()
    watched.add(model)
    train(model, NUM_WARM_STEPS + 1)
    assert watched.observer.steps == []
    watched.observer.finish()
    assert len(watched.observer.steps) == 1


def test_a_copy_of_an_observed_model_is_not_observed(watched: Watched) -> None:
    model = make_model()
    watched.add(model)
    train(copy.deepcopy(model), NUM_WARM_STEPS + 2)
    assert watched.observer.num_warm == 0


class LateClock:
    """A device that is two steps behind its host: marks are numbers, done once `reached` is not below them."""

    def __init__(self) -> None:
        self.num_marks = self.reached = 0
        self.captures = False

    def mark(self) -> int:
        self.num_marks += 1
        return self.num_marks

    def is_done(self, mark: int) -> bool:
        return mark <= self.reached

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)

    def is_capturing(self) -> bool:
        return self.captures


def test_steps_that_a_device_has_not_done_yet_are_counted_later(watched: Watched) -> None:
    model, clock = make_model(), LateClock()
    watched.add(model)
    watched.observer._clock = clock
    train(model, NUM_WARM_STEPS + 4)
    assert watched.observer.num_warm == 0
    clock.reached = clock.num_marks
    train(model, 1)
    assert watched.observer.num_warm == NUM_WARM_STEPS
    # Between the marks at both ends of a part lie those of what is in it.
    assert {(step.forward_s, step.exposed_s, step.rest_s) for step in watched.observer.steps} == {(1.0, 1.0, 1.0)}


def test_nothing_is_marked_while_a_graph_is_captured(watched: Watched) -> None:
    model, clock = make_model(), LateClock()
    watched.add(model)
    watched.observer._clock = clock
    clock.captures = True
    train(model, 2)
    assert clock.num_marks == 0
    clock.captures, clock.reached = False, 1000
    train(model, NUM_WARM_STEPS + NUM_STEPS + 1)
    assert len(watched.observer.steps) == NUM_STEPS
    assert clock.num_marks < clock.reached


@pytest.mark.gpu
def test_a_gpu_s_steps_have_their_parts(watched: Watched) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).cuda())
    watched.add(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_WARM_STEPS + NUM_STEPS + 20):
        optimizer.zero_grad()
        model(torch.ones(64, 512, device="cuda")).mean().backward()
        optimizer.step()
    watched.observer.finish()
    assert len(watched.observer.steps) == NUM_STEPS
    assert min(step.forward_s + step.backward_s for step in watched.observer.steps) > 0


def test_an_error_of_the_observer_is_written_down_and_training_goes_on(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    watched.add(model)
    monkeypatch.setattr(StepObserver, "_choose_lead", lambda self: 1 // 0)
    trained, unseen = (train(one, NUM_WARM_STEPS + NUM_STEPS) for one in (model, make_model()))
    assert all(torch.equal(one, other) for one, other in zip(trained, unseen, strict=True))
    (file,) = tmp_path.iterdir()
    assert "ZeroDivisionError" in file.read_text()
    assert watched.guard.is_over
    assert watched.observer.steps == []
    assert not model._forward_hooks
    assert not _global_optimizer_post_hooks
