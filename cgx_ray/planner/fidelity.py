"""What each codec was measured to cost in loss, and the levels of fidelity that follow from it.

A level says which codecs policy "adaptive" may choose, besides none:

strict    codecs that ended within 1 % of dense's validation loss in all three workloads of `cgx-ray bench accuracy`
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
    "bf16": LossCost(gpt_adamw=1.0, gpt_sgd=1.0, digits=1.0, relative_error=3e-6),
    "qsgd:bits=4,bucket_size=128": LossCost(gpt_adamw=1.0043, gpt_sgd=1.0, digits=1.0, relative_error=0.0175),
    "qsgd:bits=3,bucket_size=128": LossCost(gpt_adamw=1.0059, gpt_sgd=1.0, digits=1.0, relative_error=0.08),
    "qsgd:bits=2,bucket_size=128": LossCost(gpt_adamw=1.0238, gpt_sgd=1.0, digits=1.0, relative_error=0.45),
    "qsgd:bits=2,bucket_size=64": LossCost(gpt_adamw=1.016, gpt_sgd=1.0, digits=1.0, relative_error=0.35),
    "terngrad:bucket_size=128": LossCost(gpt_adamw=1.0359, gpt_sgd=1.0, digits=1.0, relative_error=1.3),
    "topk:density=0.1": LossCost(gpt_adamw=1.0291, gpt_sgd=1.0, digits=1.0),
    "topk:density=0.01": LossCost(gpt_adamw=1.12, gpt_sgd=1.0, digits=1.0),
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
    minus the relative error of one message, does not say what a step is worth: with 3 bits up to 13 % of the energy is
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
