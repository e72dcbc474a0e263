"""The trace of some steps, collected from made-up spans."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch.profiler
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import _ExperimentalConfig

import cgx_ray
from cgx_ray.engine.step_sample import Span
from cgx_ray.engine.step_trace import StepTrace
from cgx_ray.errors import ConfigError
from cgx_ray.session.settings import Settings


def add_steps(trace: StepTrace, first: int, last: int) -> None:
    for step in range(first, last + 1):
        began_s = 100.0 + step
        spans = [
            Span(0, "ready", began_s - 0.1, began_s + 0.2),
            Span(0, "encode", began_s + 0.2, began_s + 0.3),
            Span(1, "exchange", began_s + 0.25, began_s + 0.9),
        ]
        trace.add_step(step, spans, began_s, began_s + 1.0)


def test_the_steps_asked_for_are_written_once_on_one_axis_of_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    trace = StepTrace(path, 3, first=2, last=4)
    add_steps(trace, 0, 3)
    assert not path.exists()
    add_steps(trace, 4, 4)
    events = json.loads(path.read_text())["traceEvents"]
    steps = [(event["name"], event["ts"]) for event in events if event.get("cat") == "step"]
    assert steps == [("step 2", 0.0), ("step 3", 1e6), ("step 4", 2e6)]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["training, rank 3"]
    ready = [event for event in events if event.get("cat") == "ready"]
    assert ready[0]["ts"] == 0, "what came before the step counts from its begin"
    written = path.read_text()
    add_steps(trace, 5, 9)
    assert path.read_text() == written


def test_an_unwritable_trace_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    trace = StepTrace(tmp_path / "file" / "trace.json", 0, first=0, last=1)
    with caplog.at_level(logging.WARNING):
        add_steps(trace, 0, 5)
    assert len(caplog.records) == 1
    assert "the trace of rank 0 could not be written" in caplog.text


@pytest.mark.parametrize("steps", [5, (3, 1), (-1, 2), (1.0, 2), (1, 2, 3), "ab"])
def test_steps_that_make_no_sense_are_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match="give first and last step"):
        Settings(trace_steps=steps)  # type: ignore[arg-type]
    assert Settings(trace_steps=(0, 0)).trace_steps == (0, 0)


def _profiled_groups(rank: int) -> list[str]:
    """Return the ranges of groups that torch.profiler shows for one step."""
    model = DistributedDataParallel(Branches())
    attachment = cgx_ray.attach(model, codec="qsgd")
    train(model, rank, range(2))
    config = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config
    ) as profile:
        train(model, rank, range(2, 3))
    attachment.close()
    return sorted({event.name for event in profile.events() if event.name.startswith("group ")})


def test_a_profiler_of_all_threads_shows_the_groups_by_the_names_of_the_trace() -> None:
    for names in run_ranks(2, _profiled_groups):
        assert names == ["group 0", "group 1"]


@pytest.mark.parametrize(("first", "last"), [(3, 1), (-1, 1)])
def test_steps_that_are_none_are_refused(first: int, last: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no steps from {first} to {last} to trace"):
        StepTrace(tmp_path / "trace.json", 0, first=first, last=last)
