"""The files of dashboards/ and the page of metrics: up to date, complete, and valid without a running Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from markdown.extensions.toc import slugify

from cgx_ray.monitors.export import METRICS, RUN, served_name
from dashboards.making.board import Kind, chosen, metrics_in, of
from dashboards.making.files import BOARDS, made_files
from dashboards.making.grafana import DECISION_MARKS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards"
EXPRESSIONS = [query.expression for board in BOARDS.values() for one in board.questions for query in one.queries]


def board_file(name: str) -> dict[str, Any]:
    board: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return board


def all_panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows and panels, those of closed rows after their row."""
    return [one for panel in board["panels"] for one in (panel, *panel.get("panels", []))]


@pytest.mark.parametrize("path", sorted(made_files()))
def test_the_file_is_up_to_date(path: str) -> None:
    made = made_files()[path]
    assert (ROOT / path).read_text() == made, f"{path} is old; run: .venv/bin/python -m dashboards.making"


def test_panels_use_known_metrics_and_every_metric_is_on_a_panel() -> None:
    shown = set().union(*map(metrics_in, EXPRESSIONS))
    assert shown == METRICS.keys()


def test_rules_and_marks_use_known_metrics() -> None:
    rules = (FOLDER / "rules.yaml").read_text()
    assert metrics_in(rules) <= METRICS.keys()
    assert metrics_in(DECISION_MARKS) <= METRICS.keys()
    # A name that is unknown is found.
    assert metrics_in("rate(ray_cgx_ray_nothing_total[1m])") == {"ray_cgx_ray_nothing_total"}
    assert metrics_in(f"{served_name('cgx_ray_step_seconds')}_bucket") == {"cgx_ray_step_seconds"}


def problems_of(board: dict[str, Any]) -> list[str]:
    """Return what is wrong with a board by Grafana's published types, which `condense_grafana.py` turns to JSON."""
    schema = json.loads((Path(__file__).parent / "schemas" / "grafana.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    errors = jsonschema.Draft7Validator(schema).iter_errors(board)
    return [f"{error.json_path}: {error.message}" for error in errors]


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_a_board_is_valid_by_grafanas_published_schema(name: str) -> None:
    found = board_file(name)
    assert problems_of(found) == []
    ids = Counter(panel["id"] for panel in all_panels(found))
    assert set(ids.values()) == {1}


def _panel(board: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(panel for panel in board["panels"] if panel["type"] == kind)


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (lambda board: board.update(title=7), "$.title: 7 is not of type 'string'"),
        (lambda board: board.update(dashboards=[]), "('dashboards' was unexpected)"),
        (lambda board: board.pop("schemaVersion"), "'schemaVersion' is a required property"),
        (lambda board: board["templating"]["list"][1].update(refresh=9), "9 is not"),
        (lambda board: board["annotations"]["list"][0].pop("iconColor"), "'iconColor' is a required property"),
        (lambda board: board["annotations"]["list"][0].update(exp="up"), "('exp' was unexpected)"),
        (lambda board: board["links"][0].update(type="page"), "'page' is not one of ['link', 'dashboards']"),
        (lambda board: _panel(board, "stat")["gridPos"].update(w="wide"), "'wide' is not of type 'number'"),
        (lambda board: _panel(board, "stat")["options"].update(graphMode="pie"), "'pie' is not one of"),
        (lambda board: _panel(board, "stat")["options"].pop("reduceOptions"), "'reduceOptions' is a required property"),
        (lambda board: _panel(board, "stat")["targets"][0].update(query="up"), "('query' was unexpected)"),
        (lambda board: _panel(board, "stat")["targets"][0].pop("expr"), "'expr' is a required property"),
        (
            lambda board: _panel(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(lineWidth="2"),
            "'2' is not of type 'number'",
        ),
        (
            lambda board: _panel(board, "timeseries")["fieldConfig"]["defaults"]["custom"].update(line=2),
            "('line' was unexpected)",
        ),
        (
            lambda board: _panel(board, "timeseries")["fieldConfig"]["defaults"]["thresholds"].pop("mode"),
            "'mode' is a required property",
        ),
        (lambda board: _panel(board, "timeseries").pop("type"), "'type' is a required property"),
    ],
)
def test_a_planted_error_in_a_board_is_found(plant: Callable[[dict[str, Any]], object], says: str) -> None:
    board = board_file("decisions")
    plant(board)
    found = "\n".join(problems_of(board))
    assert says in found, found


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_do_not_overlap_and_stay_on_the_page(name: str) -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in all_panels(board_file(name)):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        taken.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert max(taken.values()) == 1


def test_every_panel_is_a_question_with_a_unit_and_a_meaning() -> None:
    for board in BOARDS.values():
        titles = [one.title for one in board.questions]
        assert len(set(titles)) == len(titles)
        for one in board.questions:
            assert one.title.endswith("?"), one.title
            assert one.meaning.endswith("."), one.title
            assert one.unit, one.title
            assert one.colours[0][0] is None, one.title
            assert len(one.queries) == 1 or one.kind not in (Kind.NUMBER, Kind.NAME), one.title


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_every_panel_says_why_it_has_no_data(name: str) -> None:
    panels = [panel for panel in all_panels(board_file(name)) if panel["type"] != "row"]
    said = {panel["title"]: panel["fieldConfig"]["defaults"]["noValue"] for panel in panels}
    assert said.keys() == {one.title for one in BOARDS[name].questions}
    assert all(len(text) > 10 for text in said.values()), said


def test_a_panel_without_data_says_whether_ranks_or_the_controller_are_missing() -> None:
    of_ranks, of_controller = (
        next(one for one in BOARDS["decisions"].questions if name in one.queries[0].expression and one.empty is None)
        for name in ("cgx_ray_bits_per_element", "cgx_ray_banned_options")
    )
    assert of_ranks.no_data.startswith("no rank has reported")
    assert of_controller.no_data.startswith("no controller has reported")
    loss = next(one for one in BOARDS["overview"].questions if one.title == "Does the loss fall?")
    assert loss.no_data == "the training reports no loss"


def test_the_path_of_the_journal_is_shown_as_text() -> None:
    (panel,) = [one for one in board_file("overview")["panels"] if one["title"] == "Where is the journal?"]
    assert panel["options"]["textMode"] == "name"
    (target,) = panel["targets"]
    assert target["legendFormat"] == "{{journal}}"
    assert metrics_in(target["expr"]) == {"cgx_ray_journal_info"}


def test_panels_of_top_k_are_in_a_row_that_is_closed_at_first() -> None:
    rows = [panel for panel in board_file("decisions")["panels"] if panel["type"] == "row"]
    closed = {row["title"]: row for row in rows if row["collapsed"]}
    assert closed.keys() == {"Top-k, where it is a candidate"}
    expressions = json.dumps(closed["Top-k, where it is a candidate"]["panels"])
    assert metrics_in(expressions) == {"cgx_ray_gain_at_density", "cgx_ray_density"}


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_variables_are_those_of_rays_boards_and_links_keep_them(name: str) -> None:
    found = board_file(name)
    names = [variable["name"] for variable in found["templating"]["list"]]
    assert names == ["datasource", "SessionName", "TrainRunName", "TrainRunId"]
    assert {link["url"] for link in found["links"]} == {f"/d/{b.uid}" for b in BOARDS.values()} - {f"/d/{found['uid']}"}
    assert all(link["includeVars"] and link["keepTime"] for link in found["links"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(found)))
    assert used == {*names, "__rate_interval"}


def test_the_board_of_decisions_says_where_the_reasons_are_that_its_marks_lack() -> None:
    said = board_file("decisions")["description"]
    assert all(place in said for place in ("cgx-ray report", "cgx-ray top", "decisions.jsonl"))


def test_names_of_runs_are_escaped() -> None:
    asked = chosen(of("cgx_ray_plan_version"), run='a"} or vector(1) #\\')
    assert f'{RUN}="a\\"}} or vector(1) #\\\\"' in asked


def test_alerts_say_whom_they_concern_and_what_to_do() -> None:
    rules = [rule for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    tested = (FOLDER / "rules-test.yaml").read_text()
    for alert in alerts:
        assert "$labels.ray_train_run_name" in alert["annotations"]["summary"]
        assert alert["annotations"]["description"].endswith((".", "?"))
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
        assert anchor in {slugify(heading, "-") for heading in headings}, f"{path} has no section #{anchor}"
        assert f"alertname: {alert['alert']}," in tested, f"{alert['alert']} has no test"


@pytest.mark.parametrize("command", [("check", "rules", "rules.yaml"), ("test", "rules", "rules-test.yaml")])
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_knows_where_the_boards_lie() -> None:
    (provider,) = yaml.safe_load((FOLDER / "provisioning.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/")
