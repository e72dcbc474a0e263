"""Sums of the training thread: how they end, without processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.collectives.transport.training_sums import TrainingSums


class FakeWork:
    """A sum that ends after so many looks have timed out: while nobody looks, or with an error."""

    def __init__(self, num_looks: int, error: str | None = None) -> None:
        self._num_left, self._error = num_looks, error
        self.num_waits = 0

    def is_completed(self) -> bool:
        return self._num_left == 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.num_waits += 1
        if self.is_completed():
            if self._error is not None:
                raise RuntimeError(self._error)
            return
        assert timeout is not None, "it would wait for ever for a rank that is gone"
        self._num_left -= 1
        raise RuntimeError("Operation timed out!")


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def end(work: FakeWork, *, has_lost_ranks: bool = False) -> None:
        def all_reduce(values: Tensor, **rest: object) -> FakeWork:
            return work

        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        sums = TrainingSums([0, 1], (None, None), 10.0, lambda: has_lost_ranks, lambda what, error: OSError(what))  # type: ignore[arg-type]
        sums.begin("a sum", torch.zeros(3))()

    return end


@pytest.mark.parametrize("num_looks", [0, 1, 5])
def test_a_sum_that_ends_while_nobody_looks_has_not_failed(summed: Callable[..., None], num_looks: int) -> None:
    work = FakeWork(num_looks)
    summed(work)
    assert work.num_waits == num_looks + 1


@pytest.mark.parametrize("num_looks", [0, 1, 5])
def test_a_sum_that_fails_and_one_whose_ranks_are_gone_raise(summed: Callable[..., None], num_looks: int) -> None:
    with pytest.raises(OSError, match="a sum"):
        summed(FakeWork(num_looks, "Connection closed by peer"))
    with pytest.raises(OSError, match="a sum"):
        summed(FakeWork(num_looks + 1), has_lost_ranks=True)
