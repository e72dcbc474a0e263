"""The page of metrics in the docs, from `monitors.export`."""

from __future__ import annotations

import textwrap

from cgx_ray.monitors.export import LABELS, METRICS, Source, served_name
from dashboards.making.board import Board, metrics_in

_HEAD = """# Metrics

Made from `monitors/export.py` by `python -m dashboards.making`; change it there.

In a Ray Train run, Ray serves these metrics on each node's metrics port, and Prometheus finds them through Ray's
service discovery. Without Ray, `Attachment.serve_metrics` serves those of a rank. All have the labels
`ray_train_run_name` and `ray_train_run_id`. Ray adds `SessionName`, `WorkerId` and others, so take the sum or the
largest by the labels that you need.

A counter is served from its first event on. A gauge ends with its run, within a minute. Counters and histograms stay
as they are then, as all of Ray's do, until the cluster ends: their rates become 0.
"""
_SOURCES: dict[Source, str] = {
    "node": "Of a node: set by its agent, or without Ray by each rank",
    "controller": "Of the run: set by the controller",
}


def metrics_page(boards: list[Board]) -> str:
    """Return the page. `boards`: the panels that it names."""
    blocks = [_HEAD]
    for source, title in _SOURCES.items():
        blocks.append(f"## {title}\n")
        blocks += [_entry(name, boards) for name, metric in METRICS.items() if metric.source == source]
    blocks.append("## Labels\n")
    blocks.append("\n".join(_wrapped(f"- `{label}`: {values}", "  ") for label, values in LABELS.items()))
    return "\n".join(blocks) + "\n"


def _entry(name: str, boards: list[Board]) -> str:
    metric = METRICS[name]
    labels = ", ".join(f"`{label}`" for label in metric.extra) or "no other label"
    panels = [
        f"*{question.title}*"
        for board in boards
        for question in board.questions
        if any(name in metrics_in(query.expression) for query in question.queries)
    ]
    lines = [
        f"### `{served_name(name)}`\n",
        _wrapped(metric.meaning),
        "",
        f"- {metric.kind} in {metric.unit}; {labels}",
        _wrapped(f"- panels: {' '.join(panels)}", "  "),
        "",
    ]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
