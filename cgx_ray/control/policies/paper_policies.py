"""The papers' policies, as published: what they choose is put in force.

The loop asks them for the same reasons as `Adaptive`, and every `review_s`. They neither compare with dense nor take
back what was slower: the user has asked for them by name.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cgx_ray.control.policies.policy import (
    REVIEW_S,
    Decision,
    Policy,
    Situation,
    as_codec,
    check_name,
    check_review,
)
from cgx_ray.errors import ConfigError, names_arguments
from cgx_ray.plan import DENSE, NONE, CodecSpec, Intra, Option, as_option, preferred_scheme
from cgx_ray.planner.bits import ALPHA, QSGD, STATIC_BITS, WIDTHS, bits_of
from cgx_ray.planner.candidates import offloaded
from cgx_ray.planner.papers.bytecomp import bytecomp, tree_options, twins
from cgx_ray.planner.papers.cgx import METHODS as CGX_METHODS
from cgx_ray.planner.papers.cgx import cgx_groups
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES, PRICES, FlexibleLoop
from cgx_ray.planner.papers.flexible import METHODS as FLEXIBLE_METHODS
from cgx_ray.planner.papers.groups import groups_on, pipeline_of
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, predict

# Seconds between two looks at the triggers of Flexible Communication.
TRIGGER_S = 20.0
# Partial groupings that Cupcake's search tries: less than a second, in which the loop answers nobody.
CUPCAKE_NODES = 2_000
# Layers that ByteComp's search prices, those of all its trials: two seconds. Enough for 316 layers with 10 options.
BYTECOMP_LAYERS = 1_000_000

Groups = tuple[PlannedGroup, ...]


class PaperPolicy(Policy):
    """Puts the groups in force that `groups` returns for the measurements; None keeps the plan."""

    is_guarded = False

    @property
    def title(self) -> str:
        """The policy in words."""
        raise NotImplementedError

    def groups(self, measured: Measured) -> Groups | None:
        raise NotImplementedError

    def decide(self, situation: Situation) -> Decision:
        now, current = situation.planner_input.now, situation.current()
        chosen = self.groups(now)
        keeps = chosen is None or chosen == current.groups
        predicted = current if chosen is None or keeps else predict(now, chosen)
        reason = (
            f"{situation.cause}: {self.title} {'keeps' if keeps else 'chooses'} {predicted.describe_options()}; "
            f"predicted {situation.planner_input.step_s(predicted):.3f} s per step"
        )
        return situation.decision(predicted, reason)

    def recorded(self) -> dict[str, Any]:
        return {"kind": "paper", "name": self.title}


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Cgx(PaperPolicy):
    """CGX, section 5: qsgd over sra with bits by layer, chosen again every `review_s`.

    method       "kmeans", "linear", "bayes" or "dp"
    alpha        the largest error of all layers, over that of 4 bits
    bits         that a layer may have, of 1 to 8: one number at least is 4 or more, whose error is allowed everywhere
    bucket_size  of qsgd in all layers. The paper also says that bucket sizes are chosen by layer, but not how
    review_s     seconds after a decision until it is asked again without any other cause
    """

    method: str = "kmeans"
    alpha: float = ALPHA
    bits: Sequence[int] = WIDTHS
    bucket_size: int = QSGD.parameters["bucket_size"]
    review_s: float = REVIEW_S

    def __post_init__(self) -> None:
        if not isinstance(self.bits, tuple | list) or not self.bits:
            raise ConfigError(f"bits {self.bits!r} is not allowed; give a tuple such as (2, 3, 4)")
        codecs = self.timed_codecs
        if max(bits_of(codecs)) < STATIC_BITS:
            raise ConfigError(f"bits {self.bits!r} is not allowed; give one number at least of {STATIC_BITS} or more")
        object.__setattr__(self, "bits", bits_of(codecs))
        check_name("method", self.method, tuple(CGX_METHODS))
        if not isinstance(self.alpha, int | float) or not 1 <= self.alpha < math.inf:
            raise ConfigError(f"alpha {self.alpha!r} is not allowed; give 1 or more, in the paper 1.5 to 3")
        check_review(self.review_s)

    @property
    def codec_by_layer(self) -> CodecSpec:
        return QSGD.replace(bucket_size=self.bucket_size)

    @property
    def gain_codecs(self) -> Sequence[CodecSpec]:
        return (self.codec_by_layer,)

    @property
    def timed_codecs(self) -> Sequence[CodecSpec]:
        return tuple(self.codec_by_layer.replace(bits=bits) for bits in self.bits)

    @property
    def title(self) -> str:
        return f"cgx ({self.method})"

    @property
    def max_error(self) -> float:
        return self.alpha

    def groups(self, measured: Measured) -> Groups | None:
        return cgx_groups(measured, self.codec_by_layer, self.method, self.alpha, self.bits)


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Flexible(PaperPolicy):
    """Flexible Communication, section 3: top-k, density and collective chosen again when a trigger fires.

    method     "knee", or "nsga2", which needs pymoo
    densities  that may be chosen; "nsga2" chooses any from the least to the largest
    prices     of exchanges: "run" for the costs of the schemes as they run here, "paper" for those that the paper's
               equations 5a to 5c compare
    """

    method: str = "knee"
    densities: Sequence[float] = CANDIDATE_DENSITIES
    prices: str = "run"
    _loop: FlexibleLoop = field(init=False, repr=False, compare=False)

    review_s = TRIGGER_S

    def __post_init__(self) -> None:
        check_name("method", self.method, FLEXIBLE_METHODS)
        if self.method == "nsga2" and importlib.util.find_spec("pymoo") is None:
            raise ConfigError("method 'nsga2' needs pymoo; pip install \"cgx-ray[nsga2]\", or give method='knee'")
        if not isinstance(self.densities, tuple | list) or not self.densities:
            raise ConfigError(f"densities {self.densities!r} is not allowed; give a tuple such as (0.1, 0.01)")
        for density in self.densities:
            CodecSpec(name="topk", density=density)
        object.__setattr__(self, "densities", tuple(self.densities))
        check_name("prices", self.prices, tuple(PRICES))
        object.__setattr__(self, "_loop", FlexibleLoop(self.method, self.densities, self.prices))

    @property
    def timed_codecs(self) -> Sequence[CodecSpec]:
        return tuple(CodecSpec(name="topk", density=density) for density in self.densities)

    @property
    def title(self) -> str:
        return f"flexible ({self.method}, {PRICES[self.prices]})"

    def groups(self, measured: Measured) -> Groups | None:
        return self._loop.groups(measured)


@dataclass(frozen=True, kw_only=True)
class SearchedGroups(PaperPolicy):
    """Searches groups at the first measurements, and again for other nodes or ranks on them: the papers do so before
    training.

    codec  that the groups may have
    """

    codec: CodecSpec | str = str(QSGD)
    # By the nodes and the ranks on them.
    _found: dict[tuple[int, ...], Groups] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        codec = as_codec(self.codec)
        if codec == NONE:
            raise ConfigError("codec 'none' encodes nothing; give one that does, such as 'qsgd:bits=4'")
        # As text, so that policies that mean the same are the same.
        object.__setattr__(self, "codec", str(codec))

    def groups(self, measured: Measured) -> Groups:
        if not measured.free_layers:
            return measured.fixed
        network = measured.network
        nodes = (network.num_nodes, network.ranks_per_node, *network.node_sizes)
        if nodes not in self._found:
            self._found[nodes] = self._search(measured)
        return self._found[nodes]

    def _search(self, measured: Measured) -> Groups:
        """Return groups of all layers. There is a layer without a rule."""
        raise NotImplementedError


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Cupcake(SearchedGroups):
    """Cupcake (Wang et al. 2023): one codec for all layers, fused so that the step ends the soonest.

    codec   such as "qsgd:bits=4", the default
    scheme  None: the codec's usual one
    """

    scheme: str | None = None

    title = "cupcake"

    def __post_init__(self) -> None:
        super().__post_init__()
        codec = as_codec(self.codec)
        scheme = preferred_scheme(codec) if self.scheme is None else self.scheme
        object.__setattr__(self, "scheme", str(as_option((codec, scheme)).scheme))

    @property
    def options(self) -> Sequence[Option]:
        assert self.scheme is not None
        return (as_option((self.codec, self.scheme)),)

    def _search(self, measured: Measured) -> Groups:
        found, _ = cupcake(pipeline_of(measured, self.options), 0, CUPCAKE_NODES)
        return groups_on(measured, self.options, found)


@names_arguments
@dataclass(frozen=True, kw_only=True)
class ByteComp(SearchedGroups):
    """ByteComp, later Espresso (Wang et al. 2022): each layer by itself, dense, or encoded in one of the ways of its
    tree that the engine runs, on a GPU or offloaded to its host.

    codec  such as "qsgd:bits=4", the default. Only all-gathers are in the tree of codecs that sra cannot carry

    The search tries the largest layers first and ends after some two seconds. In models with many hundreds of layers
    the smallest ones then stay dense, and what is on the GPU stays there.
    """

    title = "bytecomp"

    @property
    def options(self) -> Sequence[Option]:
        return tree_options(as_codec(self.codec))

    def _search(self, measured: Measured) -> Groups:
        network = measured.network
        own = [
            option
            for option in self.options
            if network.knows_inside(option) and (option.intra is Intra.FLAT or not network.is_flat(option.intra))
        ]
        options = [DENSE, *own, *(offloaded(own) if measured.bus is not None else ())]
        pipeline = pipeline_of(measured, options)
        found = bytecomp(
            pipeline,
            dense=0,
            compressing=range(1, 1 + len(own)),
            offloaded=twins(options),
            max_trials=BYTECOMP_LAYERS // pipeline.num_layers,
        )
        return groups_on(measured, options, found)
