"""The boards, and the files that are made from them and from `monitors.export`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from dashboards.making.decisions import DECISIONS
from dashboards.making.grafana import board_json
from dashboards.making.metrics_page import metrics_page
from dashboards.making.network import NETWORK
from dashboards.making.overview import OVERVIEW

# The folder with dashboards/, in a checkout.
ROOT = Path(__file__).resolve().parents[2]
BOARDS = {"overview": OVERVIEW, "decisions": DECISIONS, "network": NETWORK}
_PROMETHEUS_RULE = """\
# Made of dashboards/rules.yaml by `python -m dashboards.making`; change that.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: cgx-ray
  labels:
    release: prometheus # the label that kube-prometheus-stack looks for
spec:
"""


def made_files() -> dict[str, str]:
    """Return the text of each file that is made, by its path in the checkout."""
    boards = list(BOARDS.values())
    files = {
        f"dashboards/{name}.json": board_json(board, [other for other in boards if other is not board])
        for name, board in BOARDS.items()
    }
    rules = (ROOT / "dashboards" / "rules.yaml").read_text()
    return {
        **files,
        "docs/metrics.md": metrics_page(boards),
        "deploy/k8s/overlays/monitoring/prometheusrule.yaml": _PROMETHEUS_RULE + textwrap.indent(rules, "  "),
    }
