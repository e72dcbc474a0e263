"""Boards in the form that Grafana reads, made with the classes of grafana-foundation-sdk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.table import Options as TableOptions

from cgx_ray.monitors.export import RUN, RUN_ID, served_name
from dashboards.making.board import RUN_ID_VARIABLE, RUN_VARIABLE, SESSION_VARIABLE, Board, Kind, Panel, Query, of

# Any Prometheus that Grafana knows; the variable "datasource" chooses.
_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_PAGE_WIDTH = 24
# Numbers take 4 columns, so that six fit in a row.
_NUMBER_SIZE, _NAME_SIZE, _PANEL_SIZE, _STATES_SIZE = (4, 5), (24, 3), (12, 8), (24, 7)
_SIZES = {Kind.NUMBER: _NUMBER_SIZE, Kind.NAME: _NAME_SIZE, Kind.STATES: _STATES_SIZE}
_PANELS: dict[Kind, Any] = {
    Kind.LINES: timeseries.Panel,
    Kind.STACK: timeseries.Panel,
    Kind.NUMBER: stat.Panel,
    Kind.NAME: stat.Panel,
    Kind.STATES: statetimeline.Panel,
    Kind.MATRIX: table.Panel,
}


def board_json(board: Board, others: list[Board]) -> str:
    """Return the file of a board. `others` are linked from its head."""
    page = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(f"{board.meaning} {board.note}".strip())
        .tags(["cgx_ray"])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
    )
    for variable in _variables():
        page.with_variable(variable)
    for other in others:
        page.link(
            builders.DashboardLink(other.title)
            .type(dashboard.DashboardLinkType.LINK)
            .url(f"/d/{other.uid}")
            .tooltip(other.meaning)
            .include_vars(True)
            .keep_time(True)
        )
    for title, questions in board.sections:
        row = builders.Row(title)
        if title in board.folded:
            # Grafana keeps the panels of a closed row inside it.
            row.collapsed(True)
        page.with_row(row)
        for question in questions:
            (row if title in board.folded else page).with_panel(_panel(question))
    made = page.build()
    made.annotations = dashboard.AnnotationContainer(list_val=[_decisions()])
    _place(made.panels or [])
    _drop_defaults(made)
    return JSONEncoder(sort_keys=True, indent=1).encode(made) + "\n"


def _drop_defaults(made: dashboard.Dashboard) -> None:
    """Take out what the SDK adds by itself and Grafana's published types do not have."""
    for variable in (made.templating.list_val if made.templating is not None else None) or []:
        # Of variables that are intervals.
        variable.auto = variable.auto_min = variable.auto_count = None
    for panel in _with_folded(made.panels or []):
        options = getattr(panel, "options", None)
        if isinstance(options, TableOptions):
            options.footer = None


def _place(panels: list[Any]) -> None:
    """Number the panels and place them from left to right. The SDK does not, or lets them leave the page."""
    x = y = height = 0
    for number, panel in enumerate(_with_folded(panels), start=1):
        at = panel.grid_pos
        if x + at.w > _PAGE_WIDTH:
            x, y, height = 0, y + height, 0
        panel.id_val, at.x, at.y = number, x, y
        x, height = x + at.w, max(height, at.h)


def _with_folded(panels: list[Any]) -> Iterator[Any]:
    """Yield the panels of the page, those of a closed row after it."""
    for panel in panels:
        yield panel
        yield from getattr(panel, "panels", None) or []


def _variables() -> Iterator[Any]:
    """Yield the variables of Ray's own boards, so that a link from one to another keeps the choice."""
    yield builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    metric = served_name("cgx_ray_plan_version")
    in_session = f'{metric}{{SessionName=~"${SESSION_VARIABLE}"}}'
    in_run = f'{metric}{{SessionName=~"${SESSION_VARIABLE}",{RUN}="${RUN_VARIABLE}"}}'
    for name, label, series, tag in (
        (SESSION_VARIABLE, "Ray session", metric, "SessionName"),
        (RUN_VARIABLE, "Run", in_session, RUN),
        (RUN_ID_VARIABLE, "Run id", in_run, RUN_ID),
    ):
        variable = (
            builders.QueryVariable(name)
            .label(label)
            .datasource(_SOURCE)
            .query(f"label_values({series}, {tag})")
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_DESC)
        )
        # A board shows one run: the numbers of two have no sum.
        yield variable if name == RUN_VARIABLE else variable.include_all(True).all_value(".*")


def _decisions() -> dashboard.AnnotationQuery:
    """Return the marks of decisions: Grafana puts each at the time that is the series' value, in milliseconds."""
    return dashboard.AnnotationQuery(
        name="Changes of plan",
        datasource=_SOURCE,
        enable=True,
        icon_color="purple",
        expr=DECISION_MARKS,
        title_format="{{kind}}",
        text_format="cause: {{cause}}",
        tag_keys="kind,cause",
        step="10s",
        use_value_for_time=True,
    )


DECISION_MARKS = f"1000 * max by (kind, cause) ({of('cgx_ray_decision_timestamp_seconds', kind='replace|disable')})"


def _panel(question: Panel) -> Any:
    panel = _PANELS[question.kind]()
    width, height = _SIZES.get(question.kind, _PANEL_SIZE)
    panel.title(question.title).description(question.meaning).datasource(_SOURCE)
    panel.unit(question.unit).span(width).height(height).thresholds(_thresholds(question))
    panel.no_value(question.no_data)
    for letter, query in zip("ABCDEF", question.queries, strict=False):
        panel.with_target(_target(query, letter, question.kind))
    if question.kind in (Kind.LINES, Kind.STACK):
        _draw_lines(panel, question)
    elif question.kind in (Kind.NUMBER, Kind.NAME):
        panel.text_mode(common.BigValueTextMode.NAME if question.kind is Kind.NAME else common.BigValueTextMode.AUTO)
        panel.graph_mode(common.BigValueGraphMode.NONE)
        panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    elif question.kind is Kind.STATES:
        panel.color_scheme(builders.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS)).merge_values(True)
    elif question.kind is Kind.MATRIX:
        options = {"rowField": "instance", "columnField": "peer", "valueField": "Value"}
        panel.cell_options(common.TableAutoCellOptions())
        panel.with_transformation(dashboard.DataTransformerConfig(id_val="groupingToMatrix", options=options))
    return panel


def _draw_lines(panel: Any, question: Panel) -> None:
    panel.line_width(2).fill_opacity(25 if question.kind is Kind.STACK else 0)
    panel.show_points(common.VisibilityMode.NEVER)
    panel.legend(common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
    if question.kind is Kind.STACK:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if question.is_log:
        panel.scale_distribution(common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(10))
    elif question.kind is Kind.STACK or len(question.colours) == 1:
        panel.min(0)
    if len(question.colours) > 1:
        lines = common_builders.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        panel.thresholds_style(lines)


def _target(query: Query, letter: str, kind: Kind) -> Dataquery:
    target = Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter).datasource(_SOURCE)
    if kind is Kind.MATRIX:
        return target.instant().format(PromQueryFormat.TABLE)
    return target.instant() if kind in (Kind.NUMBER, Kind.NAME) else target.range()


def _thresholds(question: Panel) -> builders.ThresholdsConfig:
    steps = [dashboard.Threshold(value=value, color=colour) for value, colour in question.colours]
    return builders.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
