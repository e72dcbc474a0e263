"""Offload: the host encodes what a GPU has computed, where that is cheaper. No GPU is needed to plan for one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from support.groupings import all_plans

from bench.planner.cases import earliest_finish_s
from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, CodecSpec, Device, GroupPlan, Intra, Layer, Option, Plan, Scheme, make_plan
from cgx_ray.planner.candidates import CodecCost, candidate_codecs, codec_options, host_name, offloaded
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.joint import MAX_ERROR, best_plan
from cgx_ray.planner.legs import exchange_stages
from cgx_ray.planner.pipeline import Pipeline, group_cost
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, predict
from cgx_ray.planner.search import search
from cgx_ray.planner.timeline import Resource, simulate

QSGD = CodecSpec(name="qsgd")
SRA = Option(codec=QSGD, scheme=Scheme.SRA)
ON_HOST = SRA.on("cpu")
CODECS = candidate_codecs((0.01,))
OPTIONS = codec_options(CODECS)
GAIN = {str(codec): gain for codec, gain in zip(CODECS, (1.0, 1.0, 0.98, 0.6), strict=True)}
LAYERS = (Layer(name="a", numel=1 << 20, ndim=2), Layer(name="b", numel=3 << 20, ndim=2))
NETWORK = Network.flat(4, Link.from_rates(bandwidth_gbps=1, latency_ms=0.1))
BUS = Link.from_rates(bandwidth_gbps=200, latency_ms=0.02)


def cost(a_s: float, b_s: float) -> CodecCost:
    return CodecCost(encode_a_s=a_s, encode_b_s_per_element=b_s, decode_a_s=a_s, decode_b_s_per_element=b_s / 2)


SLOW, FAST = cost(1e-3, 2e-8), cost(1e-5, 2e-10)


def on_gpu(gpu: CodecCost, host: CodecCost, **changes: object) -> Measured:
    costs = {str(codec): gpu for codec in CODECS[1:]} | {host_name(codec): host for codec in CODECS[1:]}
    given = {"layers": LAYERS, "backward_s": (0.02, 0.02), "network": NETWORK, "codec_costs": costs, "gain": GAIN}
    return Measured(**{**given, "bus": BUS, **changes})


def test_texts_of_offloaded_options_can_be_read_and_others_are_as_before() -> None:
    assert str(ON_HOST) == f"{QSGD} over sra on cpu"
    assert [str(option) for option in (DENSE, SRA)] == ["dense", f"{QSGD} over sra"]
    found = offloaded(OPTIONS)
    assert len(found) == sum(option.intra is Intra.FLAT and option != DENSE for option in OPTIONS)
    for option in found:
        assert Option.parse(str(option)) == option
        assert option.on(Device.AUTO) in OPTIONS
        assert option.is_on_host
        assert option.flat() == option.on("auto")
    assert not any(option.device == "cpu" for option in OPTIONS)


def test_options_that_no_device_can_be_chosen_for_are_refused_or_stay_as_they_are() -> None:
    inside = replace(SRA, intra=Intra.DENSE)
    for option in (DENSE, inside):
        assert option.on("cpu") == option
        with pytest.raises(ConfigError, match="device 'cpu' has no effect with scheme"):
            replace(option, device=Device.CPU)
    assert inside.is_on_host
    for text in ("dense on cpu", f"{inside} on cpu"):
        with pytest.raises(ConfigError, match="device 'cpu' has no effect with scheme"):
            Option.parse(text)
    with pytest.raises(ConfigError, match="device 'gpu' is unknown; known: auto, cpu"):
        make_plan(LAYERS, version=0, world_size=2, device="gpu")


def test_plans_say_the_device_where_they_said_it_before() -> None:
    plan = make_plan(LAYERS, version=0, world_size=2, codec="qsgd", device="cpu", overrides={"a": "none"})
    assert {group.option for group in plan.groups} == {ON_HOST, DENSE}
    by_rule = make_plan(LAYERS, version=0, world_size=2, overrides={"a": ON_HOST})
    assert [group.option for group in by_rule.groups if group.is_fixed] == [ON_HOST]
    assert Plan.from_json(plan.to_json()) == plan
    fields = json.loads(plan.to_json())
    assert [group["device"] for group in fields["groups"]] == [group.option.device for group in plan.groups]
    for group in fields["groups"]:
        # Plain dense was once given a device too, which changed nothing but its sums.
        group["device"] = "cpu"
    assert Plan.from_json(json.dumps(fields)) == plan
    for group in fields["groups"]:
        del group["device"]
    assert {group.option for group in Plan.from_json(json.dumps(fields)).groups} == {SRA, DENSE}


def test_an_offloaded_group_costs_its_copies_and_the_hosts_codec_and_takes_nothing_from_backward() -> None:
    numel = 1 << 20
    copy_s = BUS.alpha_s + 4 * numel * BUS.beta_s_per_byte
    plain, moved = (
        exchange_stages(option, NETWORK, SLOW, numel, encodes_on=where, bus=BUS)
        for option, where in ((SRA, "thread"), (ON_HOST, "backward"))
    )
    assert [stage.name for stage in moved] == ["copy", *(stage.name for stage in plain), "copy"]
    assert all(Resource.COMPUTE not in stage.busy_s for stage in moved)
    seconds = [simulate([0.0], [stages]).finish_s for stages in (plain, moved)]
    assert seconds[1] == pytest.approx(seconds[0] + 2 * copy_s)
    beside, on_host, held = (
        group_cost(option, network=NETWORK, codec_cost=SLOW, encodes_on=where, bus=BUS, numel=numel)
        for option, where in ((SRA, "thread"), (ON_HOST, "backward"), (SRA, "backward"))
    )
    assert on_host.alone_s(numel) == pytest.approx(beside.alone_s(numel) + 2 * copy_s)
    assert on_host.compute_s(numel) == 0 < held.compute_s(numel)
    alone = Network.flat(1, NETWORK.between)
    assert group_cost(ON_HOST, network=alone, codec_cost=SLOW, bus=BUS).alone_s(numel) == 0


def test_messages_of_a_codec_on_a_gpu_cross_the_bus_but_not_the_vendors_sums() -> None:
    run = on_gpu(FAST, SLOW)
    per_element = QSGD.payload_bytes(1 << 20) / (1 << 20) * BUS.beta_s_per_byte
    assert run.cost_of(SRA).encode_s(1, 1000) == pytest.approx(
        FAST.encode_s(1, 1000) + BUS.alpha_s + 1000 * per_element
    )
    bf16 = CodecSpec(name="bf16")
    assert run.cost_of(Option(codec=bf16, scheme=Scheme.ALLREDUCE)) == FAST
    assert run.cost_of(ON_HOST) == run.cost_of(replace(SRA, intra=Intra.DENSE)) == SLOW
    host = replace(run, bus=None)
    assert {host.cost_of(option) for option in (SRA, replace(SRA, intra=Intra.DENSE))} == {FAST}
    with pytest.raises(ConfigError, match=r"no measured time for codec qsgd.* on cpu; known: bf16"):
        on_gpu(FAST, SLOW, codec_costs={str(codec): FAST for codec in CODECS}).cost_of(ON_HOST)


def test_sums_of_the_gpus_of_a_node_need_neither_bus_nor_host_but_all_reduces_between_nodes_do() -> None:
    inside = Link.from_rates(bandwidth_gbps=1000, latency_ms=0.01)
    network = Network(num_nodes=2, ranks_per_node=4, between=NETWORK.between, inside=inside)
    host, gpus = (on_gpu(FAST, SLOW, network=replace(network, device_sums=on_gpus)) for on_gpus in (False, True))
    numel = 1 << 20
    for text, is_left in (
        (f"{QSGD} over sra, dense inside nodes", True),
        ("dense, dense inside nodes", True),
        (f"{QSGD} over sra, compressed inside nodes", False),
        ("bf16 over allreduce, dense inside nodes", False),
    ):
        option = Option.parse(text)
        assert host.network.needs_host(option)
        assert host.network.knows_inside(option)
        assert gpus.network.needs_host(option) == gpus.network.needs_host(option.flat()) + (not is_left)
        assert gpus.network.knows_inside(option) == is_left
        names = [
            [stage.name for stage in exchange_stages(option, run.network, run.cost_of(option), numel, bus=BUS)]
            for run in (host, gpus)
        ]
        assert ("copy" in names[0], "copy" in names[1]) == (True, not is_left), text
    hierarchical = replace(SRA, intra=Intra.DENSE)
    assert gpus.cost_of(hierarchical) == gpus.cost_of(SRA)
    assert host.cost_of(hierarchical) == SLOW
    assert gpus.network.knows_inside(SRA)
    assert (host.cost_name(hierarchical), gpus.cost_name(hierarchical)) == (host_name(QSGD), str(QSGD))


def random_run(rng: random.Random, encodes_on: str) -> Measured:
    """Return one to four layers on machines with GPUs, whose codecs and hosts are faster or slower by up to 30x."""
    layers = tuple(
        Layer(name=f"l{index}", numel=int(10 ** rng.uniform(4, 7)), ndim=2) for index in range(rng.randint(1, 4))
    )
    gpu, host = (cost(10 ** rng.uniform(-5, -4), 10 ** rng.uniform(-10.5, -9)) for _ in range(2))
    return on_gpu(
        gpu,
        host,
        layers=layers,
        backward_s=tuple(rng.expovariate(50) for _ in layers),
        network=Network.flat(
            rng.choice((2, 5)), Link.from_rates(bandwidth_gbps=10 ** rng.uniform(-1, 1.5), latency_ms=0.1)
        ),
        bus=Link.from_rates(bandwidth_gbps=10 ** rng.uniform(2, 3), latency_ms=0.02),
        encodes_on=encodes_on,
    )


def some_options(rng: random.Random) -> list[Option]:
    """Return dense, and two others on either device."""
    flat = rng.sample([option for option in OPTIONS[1:] if option.intra is Intra.FLAT], 2)
    return [DENSE, *flat, *offloaded(flat)]


@pytest.mark.parametrize("encodes_on", ["thread", "backward"])
def test_the_search_equals_brute_force_over_groupings_options_and_devices(encodes_on: str) -> None:
    rng = random.Random(1)
    used = set()
    for case in range(40):
        run, options = random_run(rng, encodes_on), some_options(rng)
        pipeline = Pipeline(
            backward_s=run.backward_s,
            numel=tuple(layer.numel for layer in reversed(run.layers)),
            costs=tuple(
                group_cost(
                    option,
                    network=run.network,
                    codec_cost=run.cost_of(option),
                    encodes_on=run.encodes_on,
                    bus=run.bus,
                )
                for option in options
            ),
        )
        found = search(pipeline, max_gap=0)
        assert found.finish_s == pytest.approx(earliest_finish_s(pipeline), rel=1e-9), case
        used |= {options[group.option].device for group in found.groups}
    assert used == {"auto", "cpu"}


def test_the_joint_plan_equals_brute_force_over_simulated_steps_on_either_device() -> None:
    """The search knows a model of the simulated step, so the best plan may be longer than the optimum by MAX_ERROR."""
    rng = random.Random(4)
    used = set()
    for case in range(24):
        run, options = random_run(rng, "thread"), some_options(rng)
        least = min(predict(run, groups).score for groups in all_plans(run.layers, options))
        found = best_plan(run, options, max_gap=0)
        assert found.best.score <= least * (1 + MAX_ERROR), (case, found.best.score, least, found.best.describe())
        assert found.best.score * (1 - found.gap) <= least * (1 + MAX_ERROR), (case, found.gap, least)
        used |= {group.option.device for group in found.best.groups if group.option.codec.name != "none"}
    assert used == {"auto", "cpu"}


def test_the_device_that_costs_less_encodes_and_a_slow_bus_is_not_crossed() -> None:
    options = (SRA, ON_HOST)
    chosen = {
        name: {group.option for group in best_plan(run, options).best.groups}
        for name, run in (
            ("slow GPU", on_gpu(SLOW, FAST)),
            ("fast GPU", on_gpu(FAST, SLOW)),
            ("slow bus", on_gpu(SLOW, FAST, bus=Link.from_rates(bandwidth_gbps=0.5, latency_ms=0.02))),
        )
    }
    assert chosen["slow GPU"] == {ON_HOST}
    assert chosen["fast GPU"] == {SRA}
    assert ON_HOST not in chosen["slow bus"]


def test_where_encoding_delays_backward_the_host_takes_over_although_it_is_slower() -> None:
    """ByteComp's reason for offload. Backward hides what the host does, not what the GPU does."""
    gpu, host = cost(1e-5, 1e-9), cost(1e-5, 2e-9)
    run = on_gpu(gpu, host, backward_s=(0.05, 0.05), encodes_on="backward")
    best = best_plan(run, (SRA, ON_HOST)).best
    assert ON_HOST in {group.option for group in best.groups}, best.describe()
    on_one = [predict(run, [group._replace(option=option) for group in best.groups]) for option in (SRA, ON_HOST)]
    assert best.step_s <= on_one[1].step_s < on_one[0].step_s


def test_gains_do_not_depend_on_the_device() -> None:
    run = on_gpu(FAST, FAST, gain={str(SRA): 0.9})
    assert run.gain_of(ON_HOST) == run.gain_of(SRA) == 0.9
    groups = [PlannedGroup.of(LAYERS, option) for option in (SRA, ON_HOST)]
    assert predict(run, groups[:1]).efficiency == predict(run, groups[1:]).efficiency


def test_a_plan_for_ranks_names_the_device_of_each_group() -> None:
    run = on_gpu(SLOW, FAST)
    plan = best_plan(run, (SRA, ON_HOST)).best.plan(version=1, world_size=4)
    assert plan.describe() == ON_HOST.describe() == "qsgd 4-bit over sra on cpu"
    assert all(isinstance(group, GroupPlan) and group.option.device is Device.CPU for group in plan.groups)
