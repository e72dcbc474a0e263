"""When an engine builds the kernels of its plans: before they can be in force, so never in a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine import agreement
from cgx_ray.engine import engine as module
from cgx_ray.plan import CodecSpec, Lease


class _Builds:
    """Takes the place of `build_kernels`, as on a GPU: notes the codecs, and which plans are held or in force then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.codecs: list[list[str]] = []
        self.known: list[list[int]] = []
        self.attachment: cgx_ray.Attachment | None = None
        self.error: Exception | None = None
        for one in (module, agreement):
            patch.setattr(one, "build_kernels", self._build)

    def _build(self, specs: Iterable[CodecSpec], device: torch.device) -> None:
        self.codecs.append(sorted({spec.name for spec in specs}))
        if self.attachment is not None:
            engine = self.attachment._engine
            assert isinstance(engine, module.Engine)
            self.known.append([engine.plan.version, *engine.held.at(0, engine.plan)[0]])
        if self.error is not None:
            raise self.error


def _built(rank: int) -> tuple[list[list[str]], list[list[int]], str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        builds = _Builds(patch)
        model = DistributedDataParallel(Branches())
        layers = cgx_ray.layers_of(model)

        def plan(version: int, codec: str, scheme: str, **options: str) -> cgx_ray.Plan:
            return cgx_ray.make_plan(layers, version=version, world_size=2, codec=codec, scheme=scheme, **options)

        builds.attachment = attachment = cgx_ray.attach(model, plan=plan(0, "qsgd", "sra"))
        versions = [_in_force(attachment, model, rank)]
        attachment.hold(plan(1, "topk:density=0.1", "allgather"))
        versions.append(_in_force(attachment, model, rank))
        builds.error = RuntimeError("select.cu does not compile for sm_90")
        with pytest.raises(cgx_ray.PlanError) as refused:
            attachment.hold(plan(2, "sidco:density=0.1", "allgather"))
        builds.error = None
        versions.append(_in_force(attachment, model, rank))
        fallback = plan(4, "onebit", "sra")
        trial = plan(3, "fp16", "sra", device="cpu")
        attachment.hold(replace(trial, lease=Lease(last_step=40, fallback=fallback)))
        versions.append(_in_force(attachment, model, rank))
        attachment.close()
    return builds.codecs, builds.known, str(refused.value), versions


def _in_force(attachment: cgx_ray.Attachment, model: DistributedDataParallel, rank: int) -> int:
    """Train until all ranks may have changed to what they hold; return the version of the plan."""
    train(model, rank, range(4))
    assert attachment.plan is not None
    return attachment.plan.version


def test_kernels_are_built_before_a_plan_is_held_and_those_of_a_plan_on_the_host_are_not() -> None:
    for codecs, known, refused, versions in run_ranks(2, _built):
        assert codecs == [["none", "qsgd"], ["none", "topk"], ["none", "sidco"], ["none", "onebit"]]
        assert known == [[0], [1], [1]]
        assert refused == "the kernels of plan 2 cannot be built: select.cu does not compile for sm_90"
        assert versions == [0, 1, 1, 3]


def _measured(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        builds = _Builds(patch)
        model = DistributedDataParallel(Branches())
        attachment = cgx_ray.attach(model, policy=cgx_ray.Adaptive())
        attachment.close()
    return builds.codecs[0]


def test_an_adaptive_engine_also_builds_the_codecs_whose_gains_it_measures(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    for built in run_ranks(2, _measured):
        # The first plan is dense.
        assert {"none", "qsgd"} <= set(built)
