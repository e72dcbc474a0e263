"""`python docs/making/decision_map.py` draws docs/img/decision-map.png: the best option over bandwidth and latency."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from cgx_ray.commands.plan.plan_tables import main_option
from cgx_ray.plan import DENSE, NONE
from cgx_ray.planner.cost import Link
from cgx_ray.planner.fidelity import USUAL_MIN_GAIN
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.models import load_model
from cgx_ray.planner.profile import load_profile
from cgx_ray.planner.scenario import TYPICAL_PROFILE, Scenario, make_network, typical_gains
from cgx_ray.report.style import DENSE_COLOR, INK, codec_color, new_figure, save_figure

PICTURE = Path(__file__).resolve().parents[1] / "img" / "decision-map.png"
BANDWIDTHS_GBPS = np.geomspace(0.1, 50, 14)
LATENCIES_MS = np.geomspace(0.02, 5, 9)


def solve(bandwidth_gbps: float, latency_ms: float) -> BestPlan:
    """Return the best plan for ResNet50 on 8 nodes of one worker with 100 ms of compute per step."""
    link = Link.from_rates(bandwidth_gbps=bandwidth_gbps, latency_ms=latency_ms)
    costs = load_profile(TYPICAL_PROFILE).codec_costs
    return Scenario(
        model=load_model("resnet50"),
        network=make_network(8, 1, link, link),
        compute_s=0.1,
        codec_costs={codec: cost for codec, cost in costs.items() if codec != "none"},
        gain=typical_gains(),
        min_gain=USUAL_MIN_GAIN,
    ).solve()


def draw(answers: list[list[BestPlan]]) -> Figure:
    """Draw the map. `answers`: a row per latency, a column per bandwidth."""
    figure = new_figure(10, 5.6)
    axes = figure.subplots()
    seen = {}
    for y, row in enumerate(answers):
        for x, answer in enumerate(row):
            option = main_option(answer.best)
            name = "dense by cgx_ray" if option.codec == NONE else option.codec.describe()
            # The fewer bits, the darker.
            color = codec_color(option.codec.name, place=1 if option.codec == NONE or option.codec.bits == 4 else 0)
            name = "dense, as plain DDP" if option == DENSE else name
            color = DENSE_COLOR if option == DENSE else color
            seen[name] = color
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=color, alpha=0.5, edgecolor="white"))
            text = f"{answer.speedup:.1f}x" if option == DENSE else f"{answer.speedup:.1f}x\n{option.scheme}"
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7.5, color=INK)
    axes.set_xlim(0, len(answers[0]))
    axes.set_ylim(0, len(answers))
    axes.set_xticks(np.arange(len(BANDWIDTHS_GBPS)) + 0.5, [f"{value:.2g}" for value in BANDWIDTHS_GBPS])
    axes.set_yticks(np.arange(len(LATENCIES_MS)) + 0.5, [f"{value:.2g}" for value in LATENCIES_MS])
    axes.set_xlabel("bandwidth of a node's link, Gbit/s")
    axes.set_ylabel("latency one way, ms")
    axes.set_title("codec and scheme of most bytes in the best plan; progress against dense", loc="left", fontsize=10)
    handles = [Patch(color=color, alpha=0.5, label=name) for name, color in seen.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    save_figure(draw([[solve(gbps, ms) for gbps in BANDWIDTHS_GBPS] for ms in LATENCIES_MS]), PICTURE)
    print(PICTURE)
