"""Words of `attach` to its user: the same as those of CGXConfig, and what it does where it does nothing."""

from __future__ import annotations

import enum
import inspect
import logging
from collections.abc import Callable

import pytest
from torch import nn

import cgx_ray
import cgx_ray.policies
from cgx_ray.logs import NAME


def test_attach_and_config_refuse_an_argument_beside_a_codec_in_the_same_words() -> None:
    said = []
    for take in (cgx_ray.CGXConfig, lambda **given: cgx_ray.attach(nn.Linear(1, 1), **given)):
        with pytest.raises(cgx_ray.ConfigError) as caught:
            take(codec="qsgd", fidelity="fast")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].startswith("codec means policy 'static', which has no fidelity; leave one of them out")
    with pytest.raises(cgx_ray.ConfigError, match=r"takes fidelity, .*; did you mean 'periods'\? Else leave it out"):
        cgx_ray.CGXConfig(policy="adaptive", period=4)
    for codec, meant in (("qsgd", "qsgd:bits=4"), ("qsgd:bucket_size=64", "qsgd:bucket_size=64,bits=4")):
        with pytest.raises(cgx_ray.ConfigError, match=f"which has no bits; did you mean codec='{meant}'"):
            cgx_ray.CGXConfig(codec=codec, bits=4)
    for scheme in ("sar", "srq"):
        with pytest.raises(cgx_ray.ConfigError, match="did you mean 'sra'"):
            cgx_ray.CGXConfig(scheme=scheme)


@pytest.mark.parametrize(
    ("take", "given", "near"),
    [
        (cgx_ray.CGXConfig, "fidelty", "fidelity"),
        (cgx_ray.CGXConfig, "bakend", "backend"),
        (lambda **given: cgx_ray.attach(nn.Linear(1, 1), **given), "fidelty", "fidelity"),
        (cgx_ray.Adaptive, "fidelty", "fidelity"),
        (cgx_ray.Static, "sceme", "scheme"),
        (cgx_ray.Cgx, "methd", "method"),
        (cgx_ray.Flexible, "densites", "densities"),
    ],
)
def test_an_argument_that_is_written_wrong_is_named(take: Callable[..., object], given: str, near: str) -> None:
    with pytest.raises(cgx_ray.ConfigError, match=f"got unknown (argument|setting) '{given}'; did you mean '{near}'"):
        take(**{given: "fast"})


@pytest.mark.parametrize(
    ("take", "says"),
    [
        (
            lambda: cgx_ray.SimulatedLink(0.01, ((0, 1e8),)),
            "SimulatedLink(latency_s=0.01, schedule=((0, 100000000.0),))",
        ),
        (lambda: cgx_ray.attach(nn.Linear(1, 1), "adaptive"), "attach(model, policy='adaptive')"),
        (
            lambda: cgx_ray.attach(nn.Linear(1, 1), "static", codec="bf16"),
            "attach(model, policy='static', codec='bf16')",
        ),
        (lambda: cgx_ray.Adaptive("fast"), "Adaptive(fidelity='fast')"),
        (lambda: cgx_ray.CodecSpec("qsgd", bits=4), "CodecSpec(name='qsgd', bits=4)"),
        (lambda: cgx_ray.make_plan([], 0, 4), "make_plan(layers, version=0, world_size=4)"),
        (lambda: cgx_ray.Layer("w", 100, 1), "Layer(name='w', numel=100, ndim=1)"),
    ],
)
def test_an_argument_without_its_name_is_told_what_to_write(take: Callable[[], object], says: str) -> None:
    with pytest.raises(cgx_ray.ConfigError) as caught:
        take()
    assert f" by name; did you mean {says}?" in str(caught.value)


def test_a_folder_is_told_its_place_in_ray_train() -> None:
    with pytest.raises(cgx_ray.ConfigError, match=r"CGXConfig takes no folder; .* of RunConfig\(storage_path=, "):
        cgx_ray.CGXConfig(folder="runs/one")  # type: ignore[call-arg]


def test_every_public_name_whose_arguments_have_names_says_so() -> None:
    makers = {name: getattr(module, name) for module in (cgx_ray, cgx_ray.policies) for name in module.__all__}
    makers["Attachment.observe"] = cgx_ray.Attachment.observe
    tried = []
    for name, made in makers.items():
        if (isinstance(made, type) and issubclass(made, enum.Enum | Exception)) or not callable(made):
            continue
        kinds = [one.kind for one in inspect.signature(made).parameters.values()]
        if inspect.Parameter.KEYWORD_ONLY in kinds:
            tried.append(name)
            with pytest.raises(cgx_ray.ConfigError, match=" by name; did you mean "):
                made(*[1] * (kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) + 1))
    assert {"attach", "SimulatedLink", "Adaptive", "Option", "Attachment.observe"} <= {*tried}


def test_an_error_within_a_call_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="schedule"):
        cgx_ray.SimulatedLink(latency_s=0.1)  # type: ignore[call-arg]


def test_a_codec_in_the_place_of_a_backend_is_told_its_name() -> None:
    with pytest.raises(cgx_ray.ConfigError, match=r"backend 'qsgd:bits=4' is a codec; .*codec="):
        cgx_ray.CGXConfig("qsgd:bits=4")
    with pytest.raises(cgx_ray.ConfigError, match=r"backend 'adaptive' is a policy; .*policy="):
        cgx_ray.CGXConfig("adaptive")
    assert cgx_ray.CGXConfig("gloo").backend == "gloo"


def test_a_folder_that_is_no_path_is_refused() -> None:
    with pytest.raises(cgx_ray.ConfigError, match="folder 3 is not allowed; give a path"):
        cgx_ray.attach(nn.Linear(1, 1), policy="adaptive", folder=3)  # type: ignore[arg-type]


def test_arguments_are_still_seen_by_tools() -> None:
    assert list(inspect.signature(cgx_ray.Static).parameters) == ["codec", "scheme", "intra", "period"]
    assert {"backend", "policy", "fidelity"} <= inspect.signature(cgx_ray.CGXConfig).parameters.keys()


def test_a_plan_that_is_none_is_refused() -> None:
    with pytest.raises(cgx_ray.ConfigError, match="plan 'qsgd' is not allowed; give a Plan"):
        cgx_ray.attach(nn.Linear(1, 1), plan="qsgd")  # type: ignore[arg-type]


def test_one_process_is_told_what_more_would_need(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, NAME)
    cgx_ray.attach(nn.Linear(1, 1))
    (line,) = [one.getMessage() for one in caplog.records if one.name.startswith(NAME)]
    assert "one process: no gradients to exchange, nothing is compressed; with more, attach needs a Dist" in line
    assert line.endswith("this is a Linear")
