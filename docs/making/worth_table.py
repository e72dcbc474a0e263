"""`python docs/making/worth_table.py` writes the table of docs/worth-it.md: seconds per step, dense and planned."""

from __future__ import annotations

from pathlib import Path

from cgx_ray.commands.plan.question import INSIDE_BANDWIDTH, INSIDE_LATENCY, read_question
from cgx_ray.planner.fidelity import USUAL_MIN_GAIN, Fidelity
from cgx_ray.planner.models import load_model
from cgx_ray.planner.scenario import Scenario
from cgx_ray.units import format_seconds

PAGE = Path(__file__).resolve().parents[1] / "worth-it.md"
BEGIN, END = "<!-- begin of what is made by the planner -->\n", "<!-- end of what is made by the planner -->\n"
BANDWIDTHS = {"100mbps": "100 Mbit/s", "1gbps": "1 Gbit/s", "10gbps": "10 Gbit/s", "100gbps": "100 Gbit/s"}
# Samples per worker and step, by model.
BATCHES = {"resnet18": 64, "resnet50": 64, "vgg16": 32, "vit_b_16": 64, "bert_base": 16, "gpt2": 8}


def scenario(model: str, bandwidth: str) -> Scenario:
    """Return the scenario of `cgx-ray plan --model MODEL --workers 8 --gpu a10 --latency 0.2ms --bandwidth ...`."""
    return read_question(
        model=load_model(model),
        workers=8,
        latency="0.2ms",
        bandwidth=bandwidth,
        ranks_per_node=1,
        inside_latency=INSIDE_LATENCY,
        inside_bandwidth=INSIDE_BANDWIDTH,
        step_time=None,
        throughput=None,
        gpu="a10",
        batch=BATCHES[model],
        profile=None,
        fidelity=Fidelity.STRICT,
        gains=(),
        min_gain=USUAL_MIN_GAIN,
        period="1",
        price=None,
        samples_per_epoch=None,
        sweep=None,
    ).scenario


def cell(model: str, bandwidth: str) -> str:
    """Return "1.8 s, 0.6 s: 3.1x", or "0.21 s: dense"."""
    answer = scenario(model, bandwidth).solve()
    dense, best = (format_seconds(float(f"{step.step_s:.2g}")) for step in (answer.dense, answer.best))
    return (
        f"{dense}: dense"
        if answer.speedup == 1
        else f"{dense}, {best}: {answer.speedup:{'.2f' if answer.speedup < 1.1 else '.2g'}}x"
    )


def table() -> str:
    """Return the table: a row per model, a column per bandwidth."""
    rows = [["model, MB of gradients, samples", *BANDWIDTHS.values()], ["---"] * (1 + len(BANDWIDTHS))]
    for model, batch in BATCHES.items():
        num_bytes = sum(layer.dense_bytes for layer in scenario(model, "1gbps").model.layers)
        rows.append([f"{model}, {num_bytes / 1e6:.0f}, {batch}", *(cell(model, one) for one in BANDWIDTHS)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page() -> str:
    """Return the page with the table made again."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
