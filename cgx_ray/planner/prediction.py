"""Prediction of a step under a plan, from measured times, costs and gains."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, get_args

from cgx_ray.errors import ConfigError, names_arguments
from cgx_ray.plan import (
    DEFAULT_GROUP_BYTES,
    DENSE,
    MAX_PERIOD,
    NONE,
    CodecSpec,
    GroupPlan,
    Intra,
    Layer,
    Option,
    Plan,
    Scheme,
)
from cgx_ray.planner.bits import QSGD, LayerErrors
from cgx_ray.planner.candidates import CodecCost, CodecCosts, codec_cost_of, efficiency, host_name
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.fidelity import describe_loss, expected_loss, loss_of, period_loss
from cgx_ray.planner.legs import EncodesOn, copy_s, exchange_stages, legs
from cgx_ray.planner.planned_group import PlannedGroup, period_of
from cgx_ray.planner.scheme_costs import cost_of_scheme
from cgx_ray.planner.timeline import Stage, StepPart, Timeline, simulate
from cgx_ray.units import format_count

# Difference of two efficiencies that no reader sees.
ROUNDING = 5e-4
# Elements of a group whose encoded size stands for those of all.
_SAMPLE_NUMEL = 1 << 20


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements that a plan depends on.

    layers       in registration order
    backward_s   of each layer, in the order of backward, the reverse of `layers`; the first includes forward
    codec_costs  by `str(CodecSpec)`, else by codec name; "none" is free by default. With `bus` also those on the host,
                 by `options.host_name` of these
    bus          link by which the host gets gradients from a GPU and gives them back; None if the host holds them. Only
                 then is the host's work with a codec not that of the device that runs backward
    gain         compression gain by `str(Option)`, else of the flat option, else by `str(CodecSpec)`; options without
                 one are not chosen
    after_s      seconds of a step after the last exchange: the optimizer
    encodes_on   "backward" if encoding and decoding take the processor from backward, as they do where few cores do
                 both; "thread" if they work beside it; "device" if a GPU does both
    engine       what groups cost the engine besides, where the device that holds the gradients encodes
    fixed        groups that every plan has, since layer rules of the user have chosen them
    layer_errors of qsgd with 2 to 8 bits, by layer, for policy "cgx"; else empty
    squared_errors
                 of qsgd by number of bits and by layer, in any unit; empty before they are measured
    error_excess error of bits in force over what was expected of them, 1 or more
    max_period   longest period that may be chosen: 1 while gradients change fast
    round_loss   loss over dense's of the round that counts as one step here, see `of_round`
    loss_fall    first losses of the run over the last ones, at least 1; 1 if the run reports none
    """

    layers: tuple[Layer, ...]
    backward_s: tuple[float, ...]
    network: Network
    codec_costs: CodecCosts
    gain: Mapping[str, float]
    after_s: float = 0.0
    encodes_on: EncodesOn = "thread"
    fixed: tuple[PlannedGroup, ...] = ()
    layer_errors: Mapping[str, LayerErrors] = field(default_factory=dict)
    squared_errors: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    error_excess: float = 1.0
    bus: Link | None = None
    max_period: int = MAX_PERIOD
    round_loss: float = 1.0
    loss_fall: float = 1.0
    engine: EngineCost = HOST_ENGINE

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.backward_s):
            raise ConfigError(
                f"{len(self.layers)} layers and {len(self.backward_s)} backward times; give one each, for at least one"
            )
        for name, seconds in (
            ("after_s", self.after_s),
            *((f"backward_s {i}", s) for i, s in enumerate(self.backward_s)),
        ):
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"{name} is {seconds!r}; give finite seconds, 0 or more")
        for name, gain in self.gain.items():
            if not (math.isfinite(gain) and gain > 0):
                raise ConfigError(f"gain of {name} is {gain!r}; a measured gain is finite and more than 0")
        if self.encodes_on not in get_args(EncodesOn):
            raise ConfigError(f"encodes_on is {self.encodes_on!r}; give one of {', '.join(get_args(EncodesOn))}")

    @property
    def free_layers(self) -> tuple[Layer, ...]:
        """The layers that are in no fixed group, in the order of `layers`."""
        fixed = {name for group in self.fixed for name in group.layers}
        return tuple(layer for layer in self.layers if layer.name not in fixed)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without any exchange."""
        return math.fsum(self.backward_s) + self.after_s

    @cached_property
    def ready_s(self) -> dict[str, float]:
        """Seconds from the start of a step without any exchange to each layer's gradient, by its name."""
        names = (layer.name for layer in reversed(self.layers))
        return dict(zip(names, itertools.accumulate(self.backward_s), strict=True))

    def efficiency(self, option: Option) -> float | None:
        """Return the progress under `option` as a share of a dense step's; None if its gain was not measured."""
        if option.codec == NONE:
            return 1.0
        gain = self.gain_of(option)
        return efficiency(gain, option.codec, self.loss_fall) if gain is not None else None

    def loss_of(self, option: Option, period: int, replicas: int) -> float:
        """Return `fidelity.loss_of` the option's codec, with the errors and the fall of the loss that were measured."""
        gain = self.gain_of(option)
        return loss_of(option.codec, period, replicas, self.loss_fall, 0.0 if gain is None else 1 - gain)

    def in_round(self, efficiency: float) -> float:
        """Return an efficiency; in a round as a share of what its period keeps, since the larger loss counts."""
        return min(1.0, efficiency * self.round_loss)

    def gain_of(self, option: Option) -> float | None:
        """Return the gain of `option`; None if it is unknown."""
        names = (str(option), str(option.flat()), str(option.codec))
        return next((self.gain[name] for name in names if name in self.gain), None)

    def counted_numel(self, codec: CodecSpec) -> dict[str, float]:
        """Return the elements that each layer counts as in what `codec` loses; empty if each counts as its own.

        What qsgd loses of a step's progress are its errors. So layers whose errors with as many bits are known count as
        all their elements together, divided by squared error. The quantization buckets of both may differ.
        """
        if codec.name != QSGD.name or codec.bits is None:
            return {}
        return self._counted_by_bits.get(codec.bits, {})

    @cached_property
    def _counted_by_bits(self) -> dict[int, dict[str, float]]:
        found = {}
        for bits, errors in self.squared_errors.items():
            total = math.fsum(errors.values())
            if 0 < total < math.inf:
                counted = {layer.name: float(layer.numel) for layer in self.layers}
                scale = sum(counted[name] for name in errors) / total
                found[bits] = counted | {name: scale * error for name, error in errors.items()}
        return found

    @property
    def inside_sum_s(self) -> float:
        """Seconds of a step in which nodes sum all gradients, DDP bucket by bucket, beside backward where they can."""
        link = self.network.inside
        if link is None or self.network.is_flat(Intra.DENSE):
            return 0.0
        num_bytes = sum(layer.dense_bytes for layer in self.layers)
        num_buckets = max(1, math.ceil(num_bytes / DEFAULT_GROUP_BYTES))
        (hops, crossing_bytes), _ = self.network.terms(Scheme.SRA, Intra.DENSE, num_bytes, num_bytes)
        alone_s = num_buckets * hops * link.alpha_s + crossing_bytes * link.beta_s_per_byte
        return max(alone_s / num_buckets, alone_s - math.fsum(self.backward_s[1:]))

    def of_round(self, period: int, options: Iterable[Option]) -> Measured:
        """Return the measurements as if a round of `period` steps were one step: all its compute, then all gradients.

        Changes of parameters are known when the optimizer has stepped, so nothing hides their exchange. If one of
        `options` sums inside nodes, nodes do so in each step, see `engine.period`.
        """
        replicas = self.network.num_replicas(options)
        inside_s = self.inside_sum_s if replicas < self.network.num_workers else 0.0
        backward_s = (period * (self.compute_s + inside_s), *[0.0] * (len(self.layers) - 1))
        return replace(self, backward_s=backward_s, after_s=0.0, round_loss=period_loss(period, replicas))

    def rounds(self, period: int, options: Sequence[Option]) -> list[tuple[Measured, Sequence[Option]]]:
        """Return `of_round` without sums inside nodes and with them, each with the options that may then be chosen."""
        flat = [option for option in options if self.network.is_flat(option.intra)]
        inside = [option for option in options if option not in flat]
        return [(self.of_round(period, pool), pool) for pool in (flat, inside) if pool]

    def slowed(self, factor: float) -> Measured:
        """Return the measurements with `factor` times the times of links and codecs."""
        costs = {name: cost.slowed(factor) for name, cost in self.codec_costs.items()}
        bus = self.bus.slowed(factor) if self.bus is not None else None
        return replace(self, network=self.network.slowed(factor), codec_costs=costs, bus=bus)

    def cost_of(self, option: Option) -> CodecCost:
        """Return the codec's times under `option`.

        Each message of a codec on a GPU crosses the bus. Where the engine codes rows, copies are counted by `legs`: the
        thread waits for none of them.
        """
        if self.bus is None or self.network.needs_host(option):
            return codec_cost_of(self.codec_costs, option.codec, on_host=self.bus is not None)
        cost = codec_cost_of(self.codec_costs, option.codec)
        if cost_of_scheme(option.scheme).is_vendor_ring or self.engine.codes_rows:
            return cost
        copy_b_s = self.bus.beta_s_per_byte * option.codec.payload_bytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL
        return CodecCost(
            encode_a_s=cost.encode_a_s + self.bus.alpha_s,
            encode_b_s_per_element=cost.encode_b_s_per_element + copy_b_s,
            decode_a_s=cost.decode_a_s + self.bus.alpha_s,
            decode_b_s_per_element=cost.decode_b_s_per_element + copy_b_s,
        )

    def is_untimed(self, option: Option) -> bool:
        """Return whether steps do not say how long the codec of `option` takes: the host does not wait for it."""
        return self.encodes_on == "device" and not self.network.needs_host(option)

    def cost_name(self, option: Option) -> str:
        """Return the name of the option's codec in `codec_costs`."""
        return (
            host_name(option.codec) if self.bus is not None and self.network.needs_host(option) else str(option.codec)
        )


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted step with given groups. With a period of more than 1, the mean step of a round.

    timeline    the step as the engine runs it, groups side by side, up to its last exchange
    compute_s   seconds of the step without any exchange
    after_s     the part of `compute_s` after the last exchange
    codec_s     seconds of encoding and decoding on one rank, hidden or not
    efficiency  share of a dense step's progress: that of the groups' options, weighted by the elements that layers
                count as (`Measured.counted_numel`); None if one of the gains is unknown. Fixed groups count as dense:
                what they lose is the user's choice
    replicas    ranks, or nodes, that train alone in a round
    loss        expected loss over dense's with such codecs and such a period; None if it was not measured
    """

    groups: tuple[PlannedGroup, ...]
    timeline: Timeline
    compute_s: float
    after_s: float
    codec_s: float
    efficiency: float | None
    replicas: int
    loss: float | None

    @property
    def step_s(self) -> float:
        return self.timeline.finish_s + self.after_s

    @property
    def period(self) -> int:
        """Steps between two exchanges."""
        return period_of(self.groups)

    @property
    def score(self) -> float:
        """Seconds for the progress of one dense step, infinite without any known progress. Smaller is better."""
        return self.step_s / self.efficiency if self.efficiency else math.inf

    @property
    def bound_by(self) -> StepPart:
        """Kind of work that takes most of the critical path up to the last exchange."""
        return self.timeline.bound_by

    @property
    def is_dense(self) -> bool:
        """True if all groups, except fixed ones, are summed by the vendor over all workers in each step, as in DDP."""
        return self.period == 1 and all(group.option == DENSE or group.is_fixed for group in self.groups)

    @property
    def options(self) -> tuple[Option, ...]:
        """Options in use: those that compress first, then by number of groups."""
        counts = Counter(group.option for group in self.groups)
        return tuple(sorted(counts, key=lambda option: (option.codec == NONE, -counts[option], str(option))))

    def describe_options(self) -> str:
        """Return `"qsgd 4-bit over sra (5 groups), dense (1 group)"` or `"dense"`, and the period if it is not 1."""
        every = f", every {self.period} steps" if self.period > 1 else ""
        if len(self.options) == 1:
            return f"{self.options[0].describe()}{every}"
        counts = Counter(group.option for group in self.groups)
        parts = (f"{option.describe()} ({format_count(counts[option], 'group')})" for option in self.options)
        return ", ".join(parts) + every

    def describe_kept(self) -> str:
        """Return in words what the plan is expected to lose.

        That is its measured loss, unless its steps count as less of dense ones: what feedback keeps says so.
        """
        assert self.efficiency is not None
        if self.loss is not None and self.efficiency >= 1 / self.loss - ROUNDING:
            return f"expected loss {describe_loss(self.loss)}"
        return f"a step counts as {self.efficiency:.1%} of a dense one"

    def describe(self) -> str:
        """Return `describe_options` with the number of groups, such as `"7 groups: dense"`; of one group without."""
        has_number = len(self.groups) == 1 or len(self.options) > 1
        return self.describe_options() if has_number else f"{len(self.groups)} groups: {self.describe_options()}"

    def plan(self, *, version: int, world_size: int) -> Plan:
        """Return the plan for the ranks."""
        return Plan(
            version=version,
            world_size=world_size,
            groups=tuple(
                GroupPlan(layers=group.layers, option=group.option, is_fixed=group.is_fixed, numel=group.numel)
                for group in self.groups
            ),
            period=self.period,
        )


def predict(measured: Measured, groups: Sequence[PlannedGroup]) -> Prediction:
    """Predict a step with `groups`, which hold every layer once.

    A group is ready when all its layers are, and begins then. From there on groups are under way side by side: of the
    groups that can go on, the engine's thread takes the oldest. While one group is on the network, others are encoded
    or decoded, and a group that waits for a hop holds up no other group. `exchange_stages` has the work of each group.

    So a step of many groups tends to the longest of compute, codec and network, plus what nothing hides of one group.
    With a period, all groups begin together when the steps of a round have been computed, see `Measured.of_round`.
    """
    options = {group.option for group in groups}
    if (period := period_of(groups)) > 1:
        whole = measured.of_round(period, options)
        return _mean_step(predict(whole, [one._replace(period=1) for one in groups]), period, whole.round_loss)
    replicas = measured.network.num_replicas(options)
    under = {option: _Under.of(option, measured) for option in options}
    waits_s: list[float] = []
    works: list[_GroupWork] = []
    kept: list[tuple[float | None, float]] = []
    passed_s = 0.0
    for group in groups:
        ready = max(passed_s, *(measured.ready_s[name] for name in group.layers))
        waits_s.append(ready - passed_s)
        passed_s = ready
        work, efficiency, counted = under[group.option]
        works.append(work(group.numel, group.dense_bytes // group.numel))
        kept.append((1.0, group.numel) if group.is_fixed else (efficiency, _counted(group, counted)))
    known = [(share, numel) for share, numel in kept if share is not None]
    return Prediction(
        groups=tuple(groups),
        timeline=simulate(waits_s, [work.stages for work in works]),
        compute_s=measured.compute_s,
        after_s=measured.after_s,
        codec_s=sum(work.codec_s for work in works),
        efficiency=_efficiency(known, sum(group.numel for group in groups)) if len(known) == len(kept) else None,
        replicas=replicas,
        loss=expected_loss(measured.loss_of(option, 1, replicas) for option in options),
    )


def _mean_step(whole: Prediction, period: int, loss: float) -> Prediction:
    """Return the mean step of a round of `period` steps, which `whole` predicts as one step."""
    return replace(
        whole,
        groups=tuple(group._replace(period=period) for group in whole.groups),
        timeline=whole.timeline.shared_by(period),
        compute_s=whole.compute_s / period,
        after_s=whole.after_s / period,
        codec_s=whole.codec_s / period,
        efficiency=whole.efficiency / loss if whole.efficiency is not None else None,
        loss=max(whole.loss, loss) if whole.loss is not None else None,
    )


class _GroupWork(NamedTuple):
    """Stages of a group, and seconds in which a rank encodes and decodes it."""

    stages: tuple[Stage, ...]
    codec_s: float


class _Under(NamedTuple):
    """Groups under one option: their work by elements and bytes of an element, efficiency, and `counted_numel`."""

    work: Callable[[int, int], _GroupWork]
    efficiency: float | None
    counted: Mapping[str, float]

    @classmethod
    def of(cls, option: Option, measured: Measured) -> _Under:
        share = measured.efficiency(option)
        return cls(
            _work_under(
                option,
                measured.network,
                measured.cost_of(option),
                measured.encodes_on,
                measured.bus,
                measured.engine,
            ),
            measured.in_round(share) if share is not None else None,
            measured.counted_numel(option.codec),
        )


# A search for a plan predicts some dozens of plans under some options, and the next plan has many of the same groups.
@lru_cache(maxsize=256)
def _work_under(
    option: Option, network: Network, cost: CodecCost, encodes_on: EncodesOn, bus: Link | None, engine: EngineCost
) -> Callable[[int, int], _GroupWork]:
    """Return a function that returns the work of a group, and knows it from then on."""

    @lru_cache(maxsize=1024)
    def work(numel: int, item_bytes: int) -> _GroupWork:
        parts = legs(option, network, numel, item_bytes, engine, bus)
        return _GroupWork(
            stages=exchange_stages(option, network, cost, numel, item_bytes, encodes_on, bus, engine),
            codec_s=sum(leg.encode_s(cost) + leg.decode_s(cost) for leg in parts)
            + 2 * copy_s(option, network, numel * item_bytes, bus),
        )

    return work


def forget_work() -> None:
    """Forget the work of groups that is known from earlier predictions, for benches: the first search has none."""
    _work_under.cache_clear()


def _counted(group: PlannedGroup, counted: Mapping[str, float]) -> float:
    """Return the elements that `group` counts as. `counted`: those of each layer; empty if each counts as its own."""
    return math.fsum(counted[name] for name in group.layers) if counted else group.numel


def _efficiency(shares: Sequence[tuple[float, float]], numel: int) -> float:
    """Return the efficiency of a plan of `numel` elements: 1 - (elements lost) / (all elements).

    shares  of each group, the share that it keeps, and the number of elements that it counts as

    The sum is that of what is lost, so shares of 1 give exactly 1. Different codecs may lose more than all.
    """
    return max(0.0, 1 - math.fsum((1 - share) * counted for share, counted in shares) / numel)
