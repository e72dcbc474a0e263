"""`python docs/making/fault_tables.py` writes the tables of faults in docs/reliability.md, from the tests' own marks.

A test is marked with `@pytest.mark.fault("the fault", "its outcome")`.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "reliability.md"
_TESTS = _ROOT / "tests"
BEGIN, END = "<!-- begin of what is made from the tests -->\n", "<!-- end of what is made from the tests -->\n"

# Headings of the page, each with the files whose marks stand below it, in this order.
THEMES = {
    "While ranks attach": (
        "faults/test_failing_attach.py",
        "faults/test_collected_models.py",
        "faults/test_broken_checkpoints.py",
        "faults/test_restarts.py",
        "engine/test_state_files.py",
        "engine/test_refused_attach.py",
        "engine/device/test_nccl.py",
        "collectives/test_mesh.py",
        "collectives/test_shm_setup.py",
    ),
    "Ranks that are killed or fail": (
        "faults/test_killed_ranks.py",
        "engine/test_soak.py",
        "collectives/test_shm.py",
        "faults/test_failing_engines.py",
        "faults/test_failing_ranks.py",
        "faults/test_ends.py",
        "engine/device/test_inside_nodes.py",
    ),
    "Ranks that are silent, networks that are cut": (
        "engine/test_side_by_side.py",
        "engine/test_attach_checks.py",
        "faults/test_network_cut.py",
    ),
    "Numbers": (
        "collectives/test_not_finite.py",
        "engine/test_not_finite_layers.py",
        "faults/test_numbers_in_trouble.py",
        "engine/test_loss_scale.py",
        "engine/test_float16.py",
        "engine/test_unused_layers.py",
        "engine/test_weight_check.py",
        "codecs/test_wire.py",
        "codecs/test_fuzzed_messages.py",
        "control/test_loss_trend.py",
        "ray/test_elastic.py",
    ),
    "Plans and controller": (
        "faults/test_plan_versions.py",
        "faults/test_failing_controller.py",
        "ray/test_train.py",
        "ray/test_config.py",
        "ray/test_plan_relay.py",
        "engine/test_plan_switches.py",
        "engine/test_local_control.py",
    ),
    "Monitors and journal": (
        "engine/test_telemetry.py",
        "faults/test_failing_monitors.py",
        "monitors/test_agent.py",
        "ray/test_missing_monitors.py",
        "control/test_joined_steps.py",
        "control/test_journal.py",
    ),
    "Strangers": (
        "faults/test_strangers_at_mesh.py",
        "faults/test_strangers_at_lifeline.py",
        "faults/test_strangers_at_monitors.py",
        "faults/test_strangers_at_metrics.py",
        "faults/test_strangers_at_iperf3.py",
        "collectives/test_broken_rings.py",
    ),
}


def marked_files() -> set[str]:
    """Return the files with marked tests, as in THEMES."""
    paths = (path for path in _TESTS.rglob("test_*.py") if any(_rows(path)))
    return {str(path.relative_to(_TESTS)) for path in paths}


def page() -> str:
    """Return the page, whose tables are those of the tests."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join([*_tables(), END]) + after


def _tables() -> Iterator[str]:
    """Yield the lines of all tables. A number stands for the file of a row's test."""
    for theme, names in THEMES.items():
        yield f"\n### {theme}\n\n| fault | outcome |\n|---|---|"
        for number, name in enumerate(names, start=1):
            for fault, outcome in _rows(_TESTS / name):
                yield f"| {fault} ({number}) | {outcome} |"
        files = "; ".join(f"({number}) `{name}`" for number, name in enumerate(names, start=1))
        yield "\n" + textwrap.fill(f"Tests: {files}.", 120, break_on_hyphens=False)


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield fault and outcome of each marked test, in the order of the file."""
    for function in ast.parse(path.read_text()).body:
        for decorator in getattr(function, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
                fault, outcome = map(ast.literal_eval, decorator.args)
                yield fault, outcome


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
