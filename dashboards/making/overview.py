"""The first board: is the run fast, and what bounds its steps?"""

from __future__ import annotations

from cgx_ray.monitors.export import RANK
from dashboards.making.board import (
    AGO,
    BYTES_PER_S,
    COUNT,
    GREEN,
    RATIO,
    RED,
    SECONDS,
    SHARE,
    STEPS_PER_S,
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

_MEASURED, _DENSE = of("cgx_ray_measured_step_seconds"), of("cgx_ray_dense_step_seconds")
_EXPOSED = f"max by ({RANK}) ({of('cgx_ray_exposed_seconds')})"
_COMPUTE = f"max by ({RANK}) ({of('cgx_ray_phase_seconds', phase='compute')})"

_NOW = [
    Panel(
        title="How fast is the training?",
        meaning="Steps per second, mean over ranks. All ranks make the same steps.",
        unit=STEPS_PER_S,
        kind=Kind.NUMBER,
        queries=[Query(f"avg(sum by ({RANK}) ({rate('cgx_ray_steps')}))", "steps/s")],
    ),
    Panel(
        title="How much faster is it than dense?",
        meaning="Time of a dense step, as this run's dense steps have taught, divided by that of the newest steps; 1 "
        "while the plan is dense. Below 0.97 the promise of 3 % is broken, and the controller goes back to dense by "
        "itself.",
        unit=TIMES,
        kind=Kind.NUMBER,
        colours=((None, RED), (0.97, YELLOW), (1.03, GREEN)),
        queries=[Query(f"max({of('cgx_ray_speed_up')})", "dense / measured")],
    ),
    Panel(
        title="How much smaller is what is sent?",
        meaning="Bytes of the gradient divided by bytes of its encoding in the last step, mean over ranks.",
        unit=TIMES,
        kind=Kind.NUMBER,
        queries=[Query(f"avg({of('cgx_ray_compression_ratio')})", "compression")],
    ),
    Panel(
        title="Which share of a step waits for the network?",
        meaning="Communication that compute does not hide, divided by the time of a step; the largest of all ranks. "
        "Near 0 compute bounds the step: a faster network or more compression gains nothing.",
        unit=SHARE,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (0.2, YELLOW), (0.5, RED)),
        queries=[
            Query(f"max({_EXPOSED} / ({_EXPOSED} + {_COMPUTE}))", "exposed"),
        ],
    ),
    Panel(
        title="When was the last decision?",
        meaning="Time since the controller decided last, also if it kept the plan. It reviews the plan each minute.",
        unit=AGO,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (300, YELLOW)),
        queries=[Query(f"time() - max({of('cgx_ray_decision_timestamp_seconds')})", "ago")],
        empty="no decision yet",
    ),
    Panel(
        title="Where is the journal?",
        meaning="Path of decisions.jsonl on the node of the run's controller. It has every decision with its full "
        "reason. cgx-ray report, cgx-ray top and cgx-ray replay read the folder.",
        unit=RATIO,
        kind=Kind.NAME,
        queries=[Query(f"max by (journal) ({of('cgx_ray_journal_info')})", "{{journal}}")],
    ),
]

_TIME = [
    Panel(
        title="Where does the time of a step go?",
        meaning="Mean over ranks. Compute is the step without what it waits for; exposed is the communication that "
        "compute does not hide. Together they are the step. Between steps ranks evaluate, save, report or sleep; ranks "
        "that wait for such a rank show that as exposed.",
        unit=SECONDS,
        kind=Kind.STACK,
        queries=[
            Query(f"avg({of('cgx_ray_phase_seconds', phase='compute')})", "compute"),
            Query(f"avg({of('cgx_ray_exposed_seconds')})", "exposed communication"),
            Query(f"avg({of('cgx_ray_phase_seconds', phase='between')})", "between steps"),
        ],
    ),
    Panel(
        title="Is it faster than dense, and as fast as predicted?",
        meaning="Measured and predicted time per step of the plan in force, and the time of a dense step as it is "
        "known now. Measured above dense for long means that the plan is wrong.",
        unit=SECONDS,
        queries=[
            Query(f"max({_MEASURED})", "measured"),
            Query(f"max({of('cgx_ray_predicted_step_seconds')})", "predicted"),
            Query(f"max({_DENSE})", "dense"),
        ],
    ),
    Panel(
        title="What do encoding, sending and decoding take?",
        meaning="Seconds per step, mean over ranks. They overlap with compute and with each other, so their sum may "
        "exceed the step. Encoding above sending: the codec is too slow for this network.",
        unit=SECONDS,
        queries=[
            Query(
                f"avg by (phase) ({of('cgx_ray_phase_seconds', phase='encode|exchange|decode')})",
                "{{phase}}",
            )
        ],
    ),
    Panel(
        title="How even are the steps?",
        meaning="Quantiles of the time of a step, all ranks, without the time between steps. A 99th percentile far "
        "above the median: something disturbs single steps, such as other jobs.",
        unit=SECONDS,
        queries=[
            Query(
                f"histogram_quantile({share}, sum by (le) ({rate('cgx_ray_step_seconds', 'bucket')}))",
                name,
            )
            for share, name in ((0.5, "median"), (0.95, "95th percentile"), (0.99, "99th percentile"))
        ],
    ),
    Panel(
        title="Does the loss fall?",
        meaning="Newest loss that the training has reported, mean over ranks. A bend upwards at a change of plan means "
        "that the new plan keeps too little.",
        unit=RATIO,
        queries=[Query(f"avg({of('cgx_ray_loss')})", "loss")],
        empty="the training reports no loss",
    ),
    Panel(
        title="Which learning rate is it?",
        meaning="Newest learning rate that the training reported. Gains and losses are judged again after a change.",
        unit=RATIO,
        is_log=True,
        queries=[Query(f"avg({of('cgx_ray_learning_rate')})", "learning rate")],
        empty="the training reports no learning rate",
    ),
    Panel(
        title="Which rank do the others wait for?",
        meaning="Compute per step of each rank. All ranks wait for the slowest one in every step.",
        unit=SECONDS,
        queries=[Query(_COMPUTE, f"rank {{{{{RANK}}}}}")],
    ),
    Panel(
        title="How many bytes leave, and how many would dense encode?",
        meaning="Per second, all ranks together: bytes sent, and bytes of the gradients before compression.",
        unit=BYTES_PER_S,
        queries=[
            Query(f"sum({rate('cgx_ray_wire_bytes')})", "sent"),
            Query(f"sum({rate('cgx_ray_dense_bytes')})", "gradients"),
        ],
    ),
]

_NODES = [
    Panel(
        title="Are processors or memory the limit?",
        meaning="Share in use, by node. Processors near 100 %: codecs and backward take time from each other.",
        unit=SHARE,
        colours=((None, GREEN), (0.9, YELLOW)),
        queries=[
            Query(f"max by (instance) ({of('cgx_ray_cpu_share')})", "processors {{instance}}"),
            Query(f"max by (instance) ({of('cgx_ray_memory_share')})", "memory {{instance}}"),
        ],
    ),
    Panel(
        title="Do processes wait for a resource?",
        meaning="Share of the last 10 s in which a process of the node waited (pressure stall information).",
        unit=SHARE,
        colours=((None, GREEN), (0.3, YELLOW)),
        queries=[
            Query(f"max by (instance, resource) ({of('cgx_ray_pressure')})", "{{resource}} {{instance}}"),
        ],
        empty="the kernels of the nodes report no pressure",
    ),
]

_FAULTS = [
    Panel(
        title="Were gradients NaN or Inf?",
        meaning="Steps so far, the largest of all ranks. Few are normal with float16 and a GradScaler.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, YELLOW)),
        queries=[Query(f"max({of('cgx_ray_non_finite_steps')}) or vector(0)", "steps")],
    ),
    Panel(
        title="How often were all weights the same?",
        meaning="Comparisons of all ranks' weights that found no difference, the fewest of all ranks; one every 500 "
        "steps by default (weight_check_steps). A difference beyond rounding ends the training with an error.",
        unit=COUNT,
        kind=Kind.NUMBER,
        queries=[Query(f"min(sum by ({RANK}) ({of('cgx_ray_weight_checks')})) or vector(0)", "comparisons")],
    ),
    Panel(
        title="How far apart are the ranks' weights?",
        meaning="Largest difference of a layer, relative to its norm, when last compared. 0: all bits are the same. "
        "Processors of different kinds round differently; average_weights makes them the same again.",
        unit=RATIO,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1e-12, YELLOW)),
        queries=[Query(f"max({of('cgx_ray_weight_drift')})", "difference")],
        empty="weights have not been compared",
    ),
    Panel(
        title="Are reports of steps missing?",
        meaning="Steps that the controller could not use, since a rank has not reported them.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, YELLOW)),
        queries=[total("cgx_ray_incomplete_steps")],
    ),
    Panel(
        title="Were lines of the journal lost?",
        meaning="Lines that could not be written: the disk is full or the folder not writable. Training goes on.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, RED)),
        queries=[total("cgx_ray_journal_errors")],
    ),
    Panel(
        title="How often was a plan taken back?",
        meaning="Returns to an earlier plan, because a plan was slower than dense or its trial ended without outcome.",
        unit=COUNT,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (3, YELLOW)),
        queries=[total("cgx_ray_reverts")],
    ),
    Panel(
        title="Do the ranks use the newest plan?",
        meaning="Versions by which the rank that is furthest behind is older than the controller's newest plan. "
        "Normal for a few steps after a decision.",
        unit=RATIO,
        kind=Kind.NUMBER,
        colours=((None, GREEN), (1, YELLOW)),
        queries=[Query(f"max({of('cgx_ray_newest_plan_version')}) - min({of('cgx_ray_plan_version')})", "behind")],
    ),
    Panel(
        title="Which errors have ended the training on ranks?",
        meaning="So far, over all restarts of the workers: time-outs, damaged messages (CRC-32C), ranks with different "
        "weights, broken connections. One rank's error breaks the connections of all others. Their texts are in "
        "decisions.jsonl, in cgx-ray top, and in the logs of the workers.",
        unit=COUNT,
        colours=((None, GREEN), (1, RED)),
        queries=[
            Query(f"sum by (fault) (max by ({RANK}, fault) ({of('cgx_ray_faults')}))", "{{fault}}"),
        ],
        empty="no error has ended the training",
    ),
]

OVERVIEW = Board(
    uid="cgx-ray-overview",
    title="cgx_ray: run",
    meaning="Is the run fast, and what bounds its steps?",
    sections=[("Now", _NOW), ("Time", _TIME), ("Faults", _FAULTS), ("Nodes", _NODES)],
)
