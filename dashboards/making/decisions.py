"""The second board: what was decided, why, and was it right?"""

from __future__ import annotations

from cgx_ray.monitors.export import RANK
from dashboards.making.board import (
    AGO,
    BITS,
    BYTES_PER_S,
    COUNT,
    GREEN,
    RATIO,
    SECONDS,
    SHARE,
    TIMES,
    YELLOW,
    Board,
    Kind,
    Panel,
    Query,
    of,
    rate,
    total,
)

_OPTION = "{{codec}} over {{scheme}}"
_TOPK_ROW = "Top-k, where it is a candidate"

_PLANS = [
    Panel(
        title="Which codecs and schemes are in force?",
        meaning="Number of groups of layers that use each codec and scheme; 0 when the plan no longer uses it.",
        unit=COUNT,
        kind=Kind.STATES,
        colours=((None, "text"), (1, "blue")),
        queries=[Query(f"max by (codec, scheme) ({of('cgx_ray_groups')})", _OPTION)],
    ),
    Panel(
        title="Which plan does each rank use?",
        meaning="All ranks change in the same step. Ranks below the newest plan wait for one that has not got it yet.",
        unit=RATIO,
        queries=[
            Query(f"max by ({RANK}) ({of('cgx_ray_plan_version')})", f"rank {{{{{RANK}}}}}"),
            Query(f"max({of('cgx_ray_newest_plan_version')})", "newest"),
        ],
    ),
    Panel(
        title="How long is each codec and scheme used?",
        meaning="Steps per second by the codec and scheme of the largest part of the gradient, mean over ranks.",
        unit=RATIO,
        kind=Kind.STACK,
        queries=[
            Query(
                f"sum by (codec, scheme) ({rate('cgx_ray_steps')}) "
                f"/ scalar(count(count by ({RANK}) ({of('cgx_ray_steps')})))",
                _OPTION,
            )
        ],
    ),
    Panel(
        title="Why were decisions made?",
        meaning="Decisions so far, by kind and cause. Many of one cause mean that it is noise.",
        unit=COUNT,
        queries=[Query(f"sum by (kind, cause) ({of('cgx_ray_decisions')})", "{{kind}}: {{cause}}")],
        empty="no decision yet",
    ),
    Panel(
        title="How long ago was each decision?",
        meaning="Time since the newest decision of each kind and cause.",
        unit=AGO,
        kind=Kind.NUMBER,
        queries=[
            Query(
                f"time() - max by (kind, cause) ({of('cgx_ray_decision_timestamp_seconds')})",
                "{{kind}}: {{cause}}",
            )
        ],
        empty="no decision yet",
    ),
]

_RIGHT = [
    Panel(
        title="Is the speed-up what was predicted?",
        meaning="Dense step over the plan's step: as predicted with the last decision, and as measured, which is 1 "
        "while the plan is dense.",
        unit=TIMES,
        queries=[
            Query(
                f"max({of('cgx_ray_predicted_dense_step_seconds')}) / max({of('cgx_ray_predicted_step_seconds')})",
                "predicted",
            ),
            Query(f"max({of('cgx_ray_speed_up')})", "measured"),
        ],
    ),
    Panel(
        title="How wrong was the last prediction?",
        meaning="Measured over predicted time per step of the last outcome, less 1. Beyond 20 % either way the "
        "controller decides again.",
        unit=SHARE,
        colours=((None, YELLOW), (-0.2, GREEN), (0.2, YELLOW)),
        queries=[Query(f"max({of('cgx_ray_prediction_error')})", "measured / predicted - 1")],
        empty="no outcome yet",
    ),
    Panel(
        title="Why was a plan taken back?",
        meaning="Returns to an earlier plan so far, by cause.",
        unit=COUNT,
        queries=[Query(f"sum by (cause) ({of('cgx_ray_reverts')})", "{{cause}}")],
        empty="no plan was taken back",
    ),
    Panel(
        title="How many options are banned?",
        meaning="Options that may not be chosen for a time, because their gain fell or they cost loss. A ban "
        "takes 5 minutes, and twice as long each time.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, YELLOW)),
        queries=[Query(f"max({of('cgx_ray_banned_options')})", "banned")],
    ),
    Panel(
        title="How late does the latest rank end a step?",
        meaning="Time from the end of a rank's step until it knows that the last other rank has ended it, the largest "
        "of all ranks. New plans wait for the latest rank.",
        unit=SECONDS,
        queries=[Query(f"max({of('cgx_ray_agreement_lag_seconds')})", "lag")],
        empty="the ranks have no connections of their own (transport gloo)",
    ),
]

_GRADIENT = [
    Panel(
        title="How many bits does an element take?",
        meaning="Encoded size per element of the gradient, with indices and scales, mean over ranks; 32 if dense.",
        unit=BITS,
        is_log=True,
        queries=[Query(f"avg({of('cgx_ray_bits_per_element')})", "bits per element")],
    ),
    Panel(
        title="After how many steps do ranks exchange?",
        meaning="Period: 1 if they average the gradients of each step; else they train alone in between.",
        unit=COUNT,
        queries=[Query(f"max({of('cgx_ray_period')})", "period")],
    ),
    Panel(
        title="How many bytes does each codec and scheme send?",
        meaning="Per second, all ranks together.",
        unit=BYTES_PER_S,
        kind=Kind.STACK,
        queries=[Query(f"sum by (codec, scheme) ({rate('cgx_ray_wire_bytes')})", _OPTION)],
    ),
    Panel(
        title="How much of the gradient does each codec keep?",
        meaning="Compression gain, mean over ranks: 1 keeps all. An option in use (codec over scheme) has the gain "
        "that it really had, a codec the one that is predicted.",
        unit=RATIO,
        queries=[Query(f"avg by (codec) ({of('cgx_ray_gain')})", "{{codec}}")],
        empty="gains are not measured: the policy is static",
    ),
    Panel(
        title="How large is the residual?",
        meaning="Norm of the error-feedback residual over the norm of the gradient, mean over ranks. It "
        "grows as less is sent.",
        unit=RATIO,
        queries=[Query(f"avg({of('cgx_ray_residual_ratio')})", "residual / gradient")],
        empty="no codec in use has a residual",
    ),
    Panel(
        title="How large are the gradients?",
        meaning="Norm when last measured, mean over ranks. While it changes fast, only options that keep 95 % are "
        "taken up.",
        unit=RATIO,
        is_log=True,
        queries=[Query(f"avg({of('cgx_ray_gradient_norm')})", "norm")],
        empty="gains are not measured: the policy is static",
    ),
    Panel(
        title="How often were averages NaN or Inf?",
        meaning="Steps so far in which no memory was changed. Looked at only while a codec in use has memory.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, YELLOW)),
        queries=[total("cgx_ray_non_finite_steps")],
    ),
]

_TOPK = [
    Panel(
        title="Which share of the elements is sent?",
        meaning="Density, mean over elements and ranks; 1 if all are sent, at any number of bits.",
        unit=SHARE,
        is_log=True,
        queries=[Query(f"avg({of('cgx_ray_density')})", "density")],
    ),
    Panel(
        title="What would top-k keep?",
        meaning="Gain of top-k by density, mean over nodes. Plans with a density take those above min_gain. "
        "Measured also where top-k is no candidate.",
        unit=RATIO,
        queries=[Query(f"avg by (density) ({of('cgx_ray_gain_at_density')})", "density {{density}}")],
        empty="gains are not measured: the policy is static",
    ),
]

DECISIONS = Board(
    uid="cgx-ray-decisions",
    title="cgx_ray: decisions",
    meaning="What was decided, why, and was it right?",
    note="A mark on the panels is a change of plan. It names the kind of its cause alone, since labels of metrics hold "
    "no free text. The full reason of each decision, with its prediction, is in the run's report (cgx-ray report), in "
    "cgx-ray top while it trains, and in the journal decisions.jsonl.",
    sections=[("Plans", _PLANS), ("Was it right?", _RIGHT), ("The gradient", _GRADIENT), (_TOPK_ROW, _TOPK)],
    folded=[_TOPK_ROW],
)
