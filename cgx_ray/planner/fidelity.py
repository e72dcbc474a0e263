"""Measured cost of each codec in loss, and the levels of fidelity that follow from it.

A level says which codecs policy "adaptive" may choose, besides none:

strict    codecs that ended within 1 % of dense's validation loss in all three workloads of `python -m bench accuracy`
balanced  codecs that ended within 5 %
fast      also top-k at the densities of the settings, whatever it costs

LOSS_COSTS is the committed run, bench/data/accuracy.json; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cgx_ray.plan import NONE, CodecSpec


class Fidelity(StrEnum):
    """How close to dense's loss a run must stay."""

    STRICT = "strict"
    BALANCED = "balanced"
    FAST = "fast"

    @property
    def max_loss(self) -> float:
        """Largest measured loss over dense that codecs without a density of the settings may have."""
        return 1.01 if self is Fidelity.STRICT else 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """Validation loss over dense's after equal steps, mean over seeds, by workload.

    relative_error  largest of the codec's messages in these runs, |g - decode(encode(g))|^2 / |g|^2; None for codecs
                    with error feedback, which send later what they left out
    """

    gpt_adamw: float
    gpt_sgd: float
    digits: float
    relative_error: float | None = None

    @property
    def worst(self) -> float:
        return max(self.gpt_adamw, self.gpt_sgd, self.digits)


# By `str(CodecSpec)`, over the codec's usual scheme.
LOSS_COSTS: Mapping[str, LossCost] = {
    "bf16": LossCost(gpt_adamw=1.0, gpt_sgd=0.9996, digits=0.9993, relative_error=3.27e-06),
    "qsgd:bits=4,bucket_size=128": LossCost(gpt_adamw=1.0046, gpt_sgd=0.9968, digits=1.0004, relative_error=0.0319),
    "qsgd:bits=3,bucket_size=128": LossCost(gpt_adamw=1.007, gpt_sgd=0.9966, digits=1.0057, relative_error=0.147),
    "qsgd:bits=2,bucket_size=128": LossCost(gpt_adamw=1.0214, gpt_sgd=1.0153, digits=1.0395, relative_error=0.912),
    "qsgd:bits=2,bucket_size=64": LossCost(gpt_adamw=1.0149, gpt_sgd=1.0144, digits=1.0274, relative_error=0.537),
    "terngrad:bucket_size=128": LossCost(gpt_adamw=1.0356, gpt_sgd=1.05, digits=1.1636, relative_error=1.92),
    "powersgd:rank=4": LossCost(gpt_adamw=1.0304, gpt_sgd=1.0052, digits=1.0172),
    "topk:density=0.1": LossCost(gpt_adamw=1.0547, gpt_sgd=1.0481, digits=1.0167),
    "topk:density=0.033": LossCost(gpt_adamw=1.1012, gpt_sgd=1.0977, digits=1.05),
    "topk:density=0.01": LossCost(gpt_adamw=1.1276, gpt_sgd=1.1866, digits=1.134),
    "topk:density=0.001": LossCost(gpt_adamw=1.2196, gpt_sgd=1.234, digits=1.5053),
    "dgc:density=0.01": LossCost(gpt_adamw=1.0448, gpt_sgd=1.1649, digits=4.5928),
    "ef_signsgd:bucket_size=1024": LossCost(gpt_adamw=1.1937, gpt_sgd=1.3672, digits=1.1476),
}
# Families whose gain is known before they are used. PowerSGD's depends on the shapes of the layers and on what it sent
# before, so it is chosen by hand only.
_FAMILIES = ("bf16", "qsgd", "topk")


def codecs_of(fidelity: Fidelity | str, densities: Iterable[float] = ()) -> tuple[CodecSpec, ...]:
    """Return none, the codecs that a level allows, and for "fast" top-k at each of `densities`, each once."""
    level = Fidelity(fidelity)
    measured = (CodecSpec.parse(codec) for codec, cost in LOSS_COSTS.items() if cost.worst <= level.max_loss)
    sparse = (CodecSpec(name="topk", density=density) for density in densities) if level is Fidelity.FAST else ()
    return tuple(dict.fromkeys([NONE, *(codec for codec in measured if codec.name in _FAMILIES), *sparse]))


def measured_progress(codec: CodecSpec, gain: float) -> float | None:
    """Return dense's loss over that of `codec`, both measured, as the progress of a step; None if that tells nothing.

    A codec without feedback makes errors that are 0 on average, and ranks and steps average them out. So its gain, 1
    minus the relative error of one message, does not say what a step is worth: with 3 bits up to 15 % of the energy is
    error, and the loss is less than 1 % higher. The measured loss counts as long as errors are no larger than the
    largest in the runs that measured it. Beyond that it says nothing, and the gain is the cautious answer.

    gain  measured in this training
    """
    cost = LOSS_COSTS.get(str(codec))
    if cost is None or cost.relative_error is None or 1 - gain > cost.relative_error:
        return None
    return min(1.0, 1 / cost.worst)


def describe_costs(codecs: Iterable[CodecSpec]) -> str:
    """Return in words what those of `codecs` cost in loss that level "strict" does not allow; "" without such."""
    allowed = codecs_of(Fidelity.STRICT)
    return "; ".join(_describe_cost(codec) for codec in dict.fromkeys(codecs) if codec not in allowed)


def _describe_cost(codec: CodecSpec) -> str:
    cost = LOSS_COSTS.get(str(codec))
    if cost is not None:
        return f"{codec} was measured to end up to {cost.worst - 1:.1%} above dense's loss"
    if codec.name == "topk" and codec.density is not None:
        # A smaller density costs more.
        measured = {CodecSpec.parse(text).density or 0.0: one for text, one in LOSS_COSTS.items() if "topk" in text}
        smaller = [density for density in measured if density <= codec.density]
        if smaller:
            density = max(smaller)
            return (
                f"{codec} was not measured, density {density:g} ended up to {measured[density].worst - 1:.1%} above "
                "dense's loss"
            )
    return f"what {codec} costs in loss was not measured"
