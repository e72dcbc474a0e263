"""`python docs/making/who_wins.py` draws docs/img/who-wins.png: what to use, by bandwidth and size of the model.

A calculation for four nodes that each process 8,192 tokens per step. Forward and backward take 6 operations per
parameter and token, two thirds of it backward, behind which an exchange can hide. A ring all-reduce sends 1.5 times the
gradient. Latency, coding and memory count nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cgx_ray.report.style import BLUE, DENSE_COLOR, GREEN, INK, PURPLE, new_figure, save_figure

PICTURE = Path(__file__).resolve().parents[1] / "img" / "who-wins.png"
RATES_BIT_PER_S = np.geomspace(10e6, 1e12, 361)
NUM_PARAMETERS = np.geomspace(10e6, 10e9, 181)
# Operations per second that training sustains, by the panel's title.
MACHINES = {"a node sustains 100 TFLOP/s (one large GPU)": 100e12, "a node sustains 1 TFLOP/s (processors)": 1e12}
TOKENS, NUM_NODES = 8192, 4
# From this size on, four replicas that exchange every 30 steps end within 1 % of dense (arXiv 2503.09799, table 4).
LEAST_FOR_30_STEPS = 335e6
# The simplest choice that is as fast as the fastest to this factor is shown.
SIMPLER_IF_WITHIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One thing to use.

    bits   per parameter and step
    least  parameters from which on it costs at most 1 % of loss
    """

    name: str
    color: str
    bits: float
    least: float = 0.0


# The simplest first. 4 bits and their scales; DiLoCo sends 32 bits every 30 steps.
CHOICES = (
    Choice(name="DDP as it is", color=DENSE_COLOR, bits=32),
    Choice(name="torch's fp16 or bf16 hook", color=GREEN, bits=16),
    Choice(name="cgx_ray, 4 bits in every step", color=BLUE, bits=4.25),
    Choice(name="DiLoCo (torchft), every 30 steps", color=PURPLE, bits=32 / 30, least=LEAST_FOR_30_STEPS),
)


def step_s(choice: Choice, num_parameters: float, rate_bit_per_s: float, flop_per_s: float) -> float:
    """Return the seconds of a mean step with `choice`; infinite where it costs more than 1 % of loss."""
    if num_parameters < choice.least:
        return float("inf")
    compute_s = 6 * num_parameters * TOKENS / flop_per_s
    exchange_s = 2 * (NUM_NODES - 1) / NUM_NODES * num_parameters * choice.bits / rate_bit_per_s
    return compute_s / 3 + max(compute_s * 2 / 3, exchange_s)


def winner(num_parameters: float, rate_bit_per_s: float, flop_per_s: float) -> int:
    """Return the place in `CHOICES` of the simplest choice that is nearly as fast as the fastest."""
    seconds = [step_s(choice, num_parameters, rate_bit_per_s, flop_per_s) for choice in CHOICES]
    return next(place for place, one in enumerate(seconds) if one <= SIMPLER_IF_WITHIN * min(seconds))


def _draw_panel(axes: Axes, title: str, flop_per_s: float) -> None:
    winners = [[winner(size, rate, flop_per_s) for rate in RATES_BIT_PER_S] for size in NUM_PARAMETERS]
    colors = ListedColormap([choice.color for choice in CHOICES])
    axes.pcolormesh(
        RATES_BIT_PER_S, NUM_PARAMETERS, np.array(winners), cmap=colors, vmin=0, vmax=len(CHOICES) - 1, alpha=0.6
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1e7, 1e8, 1e9, 1e10, 1e11, 1e12], ["10 Mbit/s", "100", "1 Gbit/s", "10", "100", "1 Tbit/s"])
    axes.set_yticks([1e7, 1e8, 1e9, 1e10], ["10 M", "100 M", "1 G", "10 G"])
    axes.set_xlabel("bandwidth between nodes")
    axes.set_title(title, loc="left", fontsize=10, color=INK)


def draw() -> Figure:
    """Draw a panel per machine."""
    figure = new_figure(10, 4.4)
    panels = figure.subplots(1, len(MACHINES), sharey=True)
    for axes, (title, flop_per_s) in zip(panels, MACHINES.items(), strict=True):
        _draw_panel(axes, title, flop_per_s)
    panels[0].set_ylabel("parameters")
    handles = [Patch(color=choice.color, alpha=0.6, label=choice.name) for choice in CHOICES]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    save_figure(draw(), PICTURE)
    print(PICTURE)
