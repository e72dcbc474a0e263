"""The boards, and the files that are made from them and from `monitors.export`."""

from __future__ import annotations

from cgx_ray.boards.decisions import DECISIONS
from cgx_ray.boards.grafana import board_json
from cgx_ray.boards.metrics_page import metrics_page
from cgx_ray.boards.network import NETWORK
from cgx_ray.boards.overview import OVERVIEW

BOARDS = {"overview": OVERVIEW, "decisions": DECISIONS, "network": NETWORK}


def made_files() -> dict[str, str]:
    """Return the text of each file that is made, by its path in the checkout."""
    boards = list(BOARDS.values())
    files = {
        f"dashboards/{name}.json": board_json(board, [other for other in boards if other is not board])
        for name, board in BOARDS.items()
    }
    return {**files, "docs/metrics.md": metrics_page(boards)}
