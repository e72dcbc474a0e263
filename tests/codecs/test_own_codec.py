"""A codec that a separate package brings: encoded by ranks, chosen by the planner, and errors that name the package."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support.control_runs import COST, COSTS, GAIN, LAYERS, WORLD, FakeTraining, journal, registration
from support.installed_package import install_codecs
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.cli import main
from cgx_ray.codecs import make_codec
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.learned.measured import bits_by_layer
from cgx_ray.control.loop import ControlLoop
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Plan, codec_registry, known_codecs, make_plan, one_of, whole
from cgx_ray.planner.candidates import codec_cost_of
from cgx_ray.planner.scenario import TYPICAL_GAINS
from cgx_ray.session.local_control import LocalControl
from cgx_ray.session.settings import Settings

NUM_STEPS = 40


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Forget what a test brought."""
    yield
    codec_registry._brought.clear()
    codec_registry._offered.cache_clear()
    for module in ("fp8", "fp8_kernels", "broken_codec", "other_codec"):
        sys.modules.pop(module, None)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed package that brings codec "fp8", and of some that bring none."""
    folder = install_codecs(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    codec_registry._offered.cache_clear()
    return folder


def record(**changes: Any) -> cgx_ray.CodecRecord:
    fields = {"name": "half", "codec": "cgx_ray.codecs.cast:Fp16", "payload_bytes": lambda spec, numel: 2 * numel}
    return cgx_ray.CodecRecord(**{**fields, **changes})


@pytest.mark.usefixtures("packages")
def test_the_name_of_an_installed_codec_is_a_codec() -> None:
    assert {"fp8", "broken", "other"} <= set(known_codecs())
    spec = CodecSpec.parse("fp8:format=e5m2")
    assert str(spec) == "fp8:format=e5m2"
    assert str(CodecSpec(name="fp8", format="e4m3")) == "fp8"
    plan = make_plan(LAYERS, version=1, world_size=WORLD, codec=spec)
    assert Plan.from_json(plan.to_json()) == plan
    assert spec.record.wire_id >= 128
    with pytest.raises(ConfigError, match="format 'e3m4' is not allowed; give e4m3 or e5m2"):
        CodecSpec.parse("fp8:format=e3m4")
    with pytest.raises(ConfigError, match=r"scheme allreduce cannot carry codec fp8; .*; fp8 goes with .*sra"):
        cgx_ray.Option(codec=spec, scheme=cgx_ray.Scheme.ALLREDUCE)


def test_a_process_that_plans_with_an_installed_codec_imports_no_torch(packages: Path) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from cgx_ray import CodecSpec
print("fp8" in sys.modules, CodecSpec.parse("fp8").payload_bytes(1000), "torch" in sys.modules)
"""
    argv = [sys.executable, "-c", code, str(packages)]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip() == "False 1004 False"


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("text", ["fp8", "fp8:format=e5m2"])
def test_the_example_sends_all_but_its_residual_and_shows_nan_and_inf(text: str) -> None:
    codec = make_codec(CodecSpec.parse(text))
    for numel in (0, 1, 1000):
        memory = codec.new_memory(numel)
        assert memory is not None
        payload, sent_N = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8), torch.zeros(numel)
        grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        codec.encode(grad_N, payload, 0, memory)
        codec.decode(payload, sent_N, add=True)
        torch.testing.assert_close(sent_N + memory.next_N, grad_N)
        # e5m2 has 2 bits of mantissa, so its relative error is 1/8 at most.
        assert bool((memory.next_N.abs() <= grad_N.abs() / 8 + 1e-6).all())
    for wrong in (torch.nan, torch.inf, -torch.inf):
        codec.encode(torch.tensor([1.0, wrong, 2.0]), payload[:7], 0)
        codec.decode(payload[:7], sent_N[:3], add=False)
        assert sent_N[:3].isfinite().tolist() == [True, False, True]


def _train(rank: int, folder: str, scheme: str) -> tuple[list[float], float]:
    """Return the sum of the averages of some steps with the same gradients, and its largest error."""
    sys.path.insert(0, folder)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 32, bias=False))
    attachment = cgx_ray.attach(model, codec="fp8", scheme=scheme)
    grads_RN = [torch.randn(32, 64, generator=torch.Generator().manual_seed(one)) for one in (0, 1)]
    sum_N = torch.zeros(32, 64)
    for _ in range(NUM_STEPS):
        model.zero_grad()
        (model(torch.eye(64)).T * grads_RN[rank]).sum().backward()
        sum_N += model.module.weight.grad
    attachment.close()
    return sum_N.flatten().tolist(), float((sum_N - NUM_STEPS * (grads_RN[0] + grads_RN[1]) / 2).abs().max())


@pytest.mark.parametrize("scheme", ["sra", "allgather"])
def test_two_ranks_average_with_an_installed_codec_and_remember_what_it_lost(packages: Path, scheme: str) -> None:
    (ours, error), (theirs, _) = run_ranks(2, _train, str(packages), scheme)
    assert ours == theirs
    # What a step lost, at most 1/16 of gradients up to 4, is sent later. Without memory it adds up.
    assert error < 0.5


@pytest.mark.usefixtures("packages")
def test_the_adaptive_policy_chooses_an_installed_candidate(tmp_path: Path) -> None:
    loop = ControlLoop(cgx_ray.Adaptive(candidates=("fp8",)), Journal(tmp_path / "decisions.jsonl"))
    loop.register(registration(codec_costs={**COSTS, "fp8": COST}))
    run = FakeTraining(loop, gbps=0.1, gain={**GAIN, "fp8": 0.99})
    run.step = 1
    run.run(30)
    assert "fp8" in {group.option.codec.name for group in loop.plans[-1].groups}
    assert "fp8" in json.dumps(journal(tmp_path, "decision"))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zzz", "unknown codec 'zzz'; known: none, fp16, "),
        ("broken", "codec 'broken' of package 'broken-package' cannot be imported from 'broken_codec:RECORD'"),
        ("other", "its entry point must name a cgx_ray.CodecRecord whose name is 'other'"),
    ],
)
def test_a_name_that_leads_to_no_codec_is_one_clear_error_and_breaks_no_other(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CodecSpec.parse(name)
    assert says in str(caught.value)
    assert CodecSpec.parse("qsgd").payload_bytes(0) == 0
    assert CodecSpec.parse("fp8").payload_bytes(0) == 4
    assert {one.name for one in codec_registry.usable_records()} >= {"qsgd", "fp8"}


@pytest.mark.usefixtures("packages")
def test_a_registered_codec_is_known_and_no_name_is_taken_twice() -> None:
    times = {name: seconds for name, seconds in asdict(COST).items() if seconds is not None}
    half = record(is_reencoded=True, typical_times=times)
    cgx_ray.register_codec(half)
    cgx_ray.register_codec(half)
    assert make_codec(CodecSpec.parse("half")).payload_bytes(3) == 6
    assert codec_cost_of({}, CodecSpec.parse("half")) == COST
    network = ["--workers", "8", "--bandwidth", "1gbps", "--latency", "0.1ms"]
    others = [f"--gain={codec}=0.1" for codec in TYPICAL_GAINS]
    command = [
        "plan",
        "--model",
        "resnet50",
        "--step-time",
        "0.2s",
        *network,
        *others,
        "--gain=half=1",
        "--min-gain=0.97",
    ]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "half over sra" in done.output
    for name, owner in (("half", "another record"), ("qsgd", "cgx_ray"), ("fp8", "package fp8-package")):
        with pytest.raises(ConfigError, match=f"codec name '{name}' is taken by {owner}; give another one"):
            cgx_ray.register_codec(record(name=name))
    # A script that began with `register_codec` may stay as it is when a package brings its record.
    cgx_ray.register_codec(importlib.import_module("fp8").RECORD)
    with pytest.raises(ConfigError, match=r"codec record 7 is not allowed; give a cgx_ray.CodecRecord"):
        cgx_ray.register_codec(7)  # type: ignore[arg-type]


def test_bits_of_an_own_codec_are_none_of_bits_by_layer() -> None:
    cgx_ray.register_codec(record(parameters={"bits": whole(8, 5, 8)}, is_reencoded=True))
    plan = make_plan(LAYERS, version=1, world_size=WORLD, codec="half", scheme="sra")
    assert bits_by_layer(plan) == {}


@pytest.mark.usefixtures("packages")
def test_a_policy_that_decides_takes_no_codec_that_its_process_does_not_know() -> None:
    cgx_ray.register_codec(record(is_reencoded=True))
    Settings(policy=cgx_ray.Static("half", "sra"))
    Settings(policy=cgx_ray.Adaptive(candidates=("fp8", "bf16")))
    with pytest.raises(ConfigError, match="codec 'half', which was registered in this process only"):
        Settings(policy=cgx_ray.Adaptive(candidates=("half", "bf16")))


def test_a_journal_takes_no_codec_that_its_process_does_not_know(tmp_path: Path) -> None:
    cgx_ray.register_codec(record(is_reencoded=True))
    with pytest.raises(ConfigError, match="codec 'half' was registered in this process only, and another one writes"):
        LocalControl(Settings(policy=cgx_ray.Static("half", "sra")), tmp_path, nn.Linear(1, 1), lambda value: [value])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"wire_id": 300}, "wire_id or parameters are not allowed"),
        ({"parameters": None}, "wire_id or parameters are not allowed"),
        ({"name": "No Name"}, "the name is not allowed; give small letters"),
        ({"codec": "nowhere"}, "codec 'nowhere' is not allowed; give a subclass of cgx_ray.codecs.Codec"),
        ({"payload_bytes": 4}, "payload_bytes 4 is not allowed; give a function"),
        ({"parameters": {"bits": 4}}, "parameter 'bits': 4 is not allowed; give names with a Parameter"),
        ({"parameters": {"bits": whole(9, 1, 8)}}, "bits 9 is not allowed; give a whole number from 1 to 8"),
        ({"parameters": {"name": one_of("a")}}, "parameter 'name': "),
        ({"selects": "yes"}, "selects 'yes' is not allowed; give True or False"),
        ({"typical_times": {"encode": 1.0}}, "are not allowed; give encode_a_s, "),
    ],
)
def test_a_record_that_cannot_be_right_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        record(**changes)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"codec": "cgx_ray.codecs:Nothing"}, "codec half cannot be used: importing cgx_ray.codecs:Nothing raised"),
        ({"codec": dict}, "is not a subclass of cgx_ray.codecs.Codec"),
        ({"selects": True}, "so its class must be a cgx_ray.codecs.sparse.Sparse"),
    ],
)
def test_a_class_that_cannot_do_what_the_record_says_is_refused(changes: dict[str, Any], says: str) -> None:
    cgx_ray.register_codec(record(**changes))
    with pytest.raises(ConfigError) as caught:
        make_codec(CodecSpec(name="half"))
    assert says in str(caught.value)
