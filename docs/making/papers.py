"""`python -m docs.making.papers` writes the tables of docs/papers: what a paper says beside what bench/data has.

Each page has one marked part. Its numbers come from planner.json (`python -m bench planner --json`), accuracy.json,
peers.json and flexible_table*.csv; those of the papers stand here. Without planner.json, its tables say how to make it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.record import CellTimes, read_cells
from bench.planner.cases import read_table
from cgx_ray.commands.collective import compare_schemes
from cgx_ray.planner.cost import Link
from cgx_ray.units import format_seconds

_ROOT = Path(__file__).resolve().parents[2]
DATA = _ROOT / "bench" / "data"
FOLDER = _ROOT / "docs" / "papers"
_MARK = "of what is made by docs/making/papers.py -->\n"
BEGIN, END = f"<!-- begin {_MARK}", f"<!-- end {_MARK}"
MEASURE = "python -m bench planner --json bench/data/planner.json"
# A cell of a table that has nothing to say.
NONE = "-"

# CGX, table 7: compression of each method that it compares.
CGX_TABLE_7 = {"kmeans": "0.68", "bayes": "0.65", "linear": "0.53"}
_WORKLOADS = {"gpt_adamw": "GPT, AdamW", "gpt_sgd": "GPT, SGD", "digits": "digits, SGD"}
# Collectives of table VI by their names in `compare_schemes`: the paper's name, and the column of the file.
_TABLE_6 = {
    "allgather": ("AG", "ag_ms"),
    "artopk_ring": ("ART-Ring", "art_ring_ms"),
    "artopk_tree": ("ART-Tree", "art_tree_ms"),
}

_PLANNER_HEAD = ["", "the paper", "here"]

# Label of a row, what the paper says, and what is here.
Line = tuple[str, str, str]
# Label of a row, the way that may take longer, the way that it is compared with, and what the paper says.
Pair = tuple[str, str, str, str]

CGX_PAIRS: Sequence[Pair] = (
    ("plain DDP (Gloo)", "ddp", "qsgd_sra", "1.5 to 2.2, one server; up to 8.6, four (NCCL)"),
    ("GRACE's pattern, 4 bits", "grace_qsgd", "qsgd_sra", "2.7 to 8.7"),
    ("CGX's bits by layer, k-means", "cgx", "qsgd_sra", "0.95, one server; 0.72, four"),
)
FLEXIBLE_PAIRS: Sequence[Pair] = (
    ("plain DDP (Gloo)", "ddp", "flexible", NONE),
    ("the joint plan, 1 % of loss at most", "joint", "flexible", NONE),
)
CUPCAKE_PAIRS: Sequence[Pair] = (
    ("plain DDP (Gloo)", "ddp", "cupcake", "up to 1.72 (8 GPUs), 2.03 (64), over Horovod"),
    ("GRACE's pattern", "grace_qsgd", "cupcake", "up to 2.30 (8 GPUs), over GRACE"),
    ("layer by layer, our engine", "layerwise", "cupcake", NONE),
    ("HiPress' choice", "hipress", "cupcake", "up to 1.64 (8 GPUs), 1.79 (64)"),
    ("buckets of the best size", "buckets", "cupcake", "up to 1.12"),
    ("even split, best number", "even", "cupcake", "up to 1.18"),
    ("the joint plan", "joint", "cupcake", NONE),
)
# Cupcake's table 1, by model as in our rows: its search with both insights, the first alone, the second, none.
CUPCAKE_TABLE_1 = {
    "resnet50": ("2.8 s", "15 s", "2.2 h", "over 24 h"),
    "resnet101": ("6.6 s", "68 s", "9.4 h", "over 24 h"),
    "bert_base": ("4.2 s", "32 s", "over 24 h", "over 24 h"),
}
CUPCAKE_INSIGHTS = {"1_2": "both insights", "1": "insight 1 alone", "2": "insight 2 alone", "none": "no insight"}
BYTECOMP_PAIRS: Sequence[Pair] = (
    ("plain DDP (Gloo)", "ddp", "bytecomp", "up to 3.69 (64 GPUs), over BytePS"),
    ("HiPress' choice", "hipress", "bytecomp", "up to 1.77"),
    ("layer by layer, all compressed", "layerwise", "bytecomp", NONE),
    ("the joint plan", "joint", "bytecomp", NONE),
)
# In bench/data/accuracy.json.
CGX_CODECS = {
    "qsgd, 4 bits": "qsgd:bits=4,bucket_size=128 over sra",
    "qsgd, 3 bits": "qsgd:bits=3,bucket_size=128 over sra",
    "powersgd, rank 4": "powersgd:rank=4 over allreduce",
}
FLEXIBLE_CODECS = {
    **{f"top-k {density}, allgather": f"topk:density={density} over allgather" for density in ("0.1", "0.01", "0.001")},
    "top-k 0.01, artopk_ring": "topk:density=0.01 over artopk_ring",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A file that a bench has written with --json. `rows`: by name."""

    bench: str
    date: str
    commit: str
    machine: str
    rows: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Measurement:
        raw = json.loads(path.read_text())
        return cls(
            bench=raw["bench"],
            date=raw["date"],
            commit=(raw["commit"] or "unknown")[:8],
            machine=f"{raw['machine']['cpu']}, {raw['machine']['cores']} cores",
            rows={row["name"]: row for row in raw["rows"]},
        )

    @property
    def source(self) -> str:
        return f"`python -m bench {self.bench}`, {self.date}, {self.machine}, at {self.commit}"

    def number(self, name: str, field: str = "value") -> float:
        """Return a number of a row. Raises KeyError for a row that a run with --quick leaves out."""
        if name not in self.rows or self.rows[name][field] is None:
            raise KeyError(f"{self.bench}.json has no {field} of {name!r}; measure it again, without --quick")
        return float(self.rows[name][field])

    def count(self, name: str) -> str:
        """Return "18 of 18", for a row whose goal is "== 18"."""
        count, goal = self.number(name), self.rows[name]["goal"]
        if goal is None:
            raise KeyError(f"{self.bench}.json has no goal of {name!r}; measure it again, without --quick")
        return f"{count:,.0f} of {float(goal.removeprefix('== ')):,.0f}"

    def matching(self, pattern: str) -> dict[tuple[str, ...], float]:
        """Return the values of the rows whose whole name matches, by the groups of the pattern, one or more."""
        found = ((re.fullmatch(pattern, name), name) for name in self.rows)
        return {match.groups(): self.number(name) for match, name in found if match is not None}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, with an empty line after it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _span(values: Iterable[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """Return "0.95", or "0.95 to 1.20"."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys((form(ordered[0]), form(ordered[-1]))))


def _milliseconds(value: float) -> str:
    return format_seconds(float(f"{value / 1e3:.3g}"))


def planner_part(data: Path, make: Callable[[Measurement], str]) -> str:
    """Return what `make` makes of planner.json, or how to measure it."""
    path = data / "planner.json"
    if not path.exists():
        return f"The planner's numbers are not in `bench/data` yet. `{MEASURE}` writes them.\n\n"
    measured = Measurement.read(path)
    return f"From {measured.source}. Costs are predicted, searches are timed.\n\n{make(measured)}"


def accuracy_part(data: Path, codecs: Mapping[str, str]) -> str:
    """Return the losses of `codecs` over dense's."""
    measured = Measurement.read(data / "accuracy.json")
    ranks, steps, seeds = (f"{measured.number(name):.0f}" for name in ("ranks", "steps", "seeds"))
    rows = []
    for label, codec in codecs.items():
        cells = []
        for workload in _WORKLOADS:
            name = f"{workload} {codec}"
            least, most = (measured.number(f"{name}: {which} loss over dense") for which in ("least", "largest"))
            cells.append(f"{measured.number(f'{name}: loss', 'ratio'):.3f}, {least:.3f}-{most:.3f}")
        rows.append([label, f"{measured.number(f'gpt_adamw {codec}: wire', 'ratio'):.3f}", *cells])
    return (
        f"Last validation loss over dense's: mean of {seeds} seeds, then least and largest; {ranks} ranks, {steps} "
        f"steps,\n{measured.source}.\n\n{table(['codec', 'bytes / dense', *_WORKLOADS.values()], rows)}"
    )


def peers_part(data: Path, base: str, pairs: Sequence[Pair]) -> str:
    """Return the times of ways over those of one way, with their range over all cells that have both."""
    cells: list[CellTimes] = list(read_cells(data / "peers.json").values())
    rows = []
    for label, way, other, paper in pairs:
        ratios = [one.ratio(way) / one.ratio(other) for one in cells if {way, other} <= set(one.names)]
        rows.append([label, paper, _span(ratios) if ratios else "not timed"])
    dates = _span_of_words(run.date for one in cells for run in one.runs)
    names = ", ".join(f"`{one.cell}`" for one in cells) if len(cells) < 3 else f"{len(cells)}, from least to most"
    return (
        f"Measured: seconds of a step over those of {base}, `python -m bench peers`, {dates},\n"
        f"{cells[0].num_ranks} ranks. Cells: {names}. Below 1, {base} takes longer.\n\n"
        f"{table(['way', 'the paper', 'here'], rows)}"
    )


def _span_of_words(words: Iterable[str]) -> str:
    ordered = sorted(words)
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))


def cgx(data: Path) -> str:
    return (
        planner_part(data, _cgx_bits) + accuracy_part(data, CGX_CODECS) + peers_part(data, "4 bits over sra", CGX_PAIRS)
    )


def _cgx_bits(measured: Measurement) -> str:
    rows = []
    for method in ("dp", "kmeans", "linear", "bayes"):
        same = f"bits_{method}_over_4_bits"
        twice = f"{measured.number(f'bits_{method}_at_error_x2_over_4_bits'):.3f}"
        own = f"{measured.number(same):.3f}" if same in measured.rows else NONE
        rows.append([method, CGX_TABLE_7.get(method, NONE), own, twice])
    head = ["wire bytes over 4 bits everywhere", "the paper, table 7", "at the same error", "at twice the error"]
    return table(head, rows)


def flexible(data: Path) -> str:
    return (
        planner_part(data, _flexible_lines)
        + _table_6()
        + _table_2()
        + accuracy_part(data, FLEXIBLE_CODECS)
        + peers_part(data, "Flexible's plan", FLEXIBLE_PAIRS)
    )


def _flexible_lines(measured: Measurement) -> str:
    error, ring = measured.number("table6_mean_log_error"), measured.number("table2_dense_ring_error")
    return table(
        ["cost model beside the paper's measured times", "here"],
        [
            ("table VI: rows whose fastest collective is predicted", measured.count("table6_winners")),
            ("table VI: mean size of the logarithm of predicted over measured", f"{error:.3f}"),
            ("table II, dense ring: largest error", f"{100 * ring:.1f} %"),
        ],
    )


def _costs_ms(row: Mapping[str, str], density: float) -> Mapping[str, float]:
    link = Link.from_rates(bandwidth_gbps=float(row["bandwidth_gbps"]), latency_ms=float(row["latency_ms"]))
    found = compare_schemes(numel=int(row["params"]), density=density, num_workers=int(row["workers"]), link=link)
    return found.costs_ms


def _table_6() -> str:
    """Return the fastest collective of each row, with its time as measured by the paper and as predicted here."""
    cells: dict[tuple[str, str], list[str]] = {}
    densities: dict[str, None] = {}
    for row in read_table("flexible_table6"):
        costs = _costs_ms(row, float(row["cr"]))
        times = {scheme: float(row[column]) for scheme, (_, column) in _TABLE_6.items()}
        fastest = min(times, key=lambda scheme: times[scheme])
        predicted = min(times, key=lambda scheme: costs[scheme])
        other = "" if predicted == fastest else f", predicted {_TABLE_6[predicted][0]}"
        text = f"{_TABLE_6[fastest][0]} {times[fastest]:g}; {costs[fastest]:.1f}{other}"
        cells.setdefault((row["model"], f"{float(row['bandwidth_gbps']):g}"), []).append(text)
        densities[row["cr"]] = None
    head = ["model", "Gbit/s", *(f"CR {density}" for density in densities)]
    title = "Table VI, 1 ms, 8 workers: the fastest collective, its ms as the paper measured; as predicted here."
    return f"{title}\n\n{table(head, ([*place, *texts] for place, texts in cells.items()))}"


def _table_2() -> str:
    cells: dict[str, list[str]] = {}
    rates: dict[str, None] = {}
    for row in read_table("flexible_table2"):
        text = f"{float(row['dense_ring_ms']):,.0f}; {_costs_ms(row, 0.1)['dense']:,.0f}"
        cells.setdefault(f"{row['latency_ms']} ms", []).append(text)
        rates[row["bandwidth_gbps"]] = None
    head = ["latency", *(f"{rate} Gbit/s" for rate in rates)]
    title = "Table II, dense ring of 100 million elements, 8 workers: ms as the paper measured; as predicted here."
    return f"{title}\n\n{table(head, ([latency, *texts] for latency, texts in cells.items()))}"


def cupcake(data: Path) -> str:
    return planner_part(data, _cupcake_lines) + peers_part(data, "Cupcake's plan", CUPCAKE_PAIRS)


def _cupcake_lines(measured: Measurement) -> str:
    search = _milliseconds(measured.number("fusion_314_ms", "baseline"))
    cut = str(measured.rows["cupcake_314_over_fusion"]["unit"]).partition(", ")[2]
    ends = {float(groups[0]): value for groups, value in measured.matching(r"cupcake_ends_up_to_(.+)gbps").items()}
    by_layers = {int(groups[0]): value for groups, value in measured.matching(r"fusion_(\d+)_layers_ms").items()}
    exact = measured.count("fusion_equals_brute_force")
    lines: list[Line] = [
        ("`fuse` equals brute force, up to 14 layers", "proved of its search", exact),
        ("time for 314 tensors, `fuse`", NONE, _milliseconds(measured.number("fusion_314_ms"))),
        ("time for 314 tensors, Cupcake's search", "6.6 s, for PCIe", f"{search}, {cut}" if cut else search),
        ("its finish over `fuse`'s", "1", f"{measured.number('cupcake_314_over_fusion'):.3f}"),
    ]
    for model, seconds in CUPCAKE_TABLE_1.items():
        for (name, insights), theirs in zip(CUPCAKE_INSIGHTS.items(), seconds, strict=True):
            ours = _searched(measured, f"cupcake_{model}_insights_{name}")
            lines.append((f"its search for {model}, 1 Gbit/s, {insights}", theirs, ours))
    for gbps, most in sorted(ends.items()):
        label = f"largest model whose search ends, {gbps:g} Gbit/s"
        lines.append((label, "314 tensors, for PCIe", f"{most:.0f} tensors"))
    for num_layers, spent_ms in sorted(by_layers.items()):
        if num_layers >= 1000:
            lines.append((f"time for {num_layers:,} tensors, `fuse`", NONE, _milliseconds(spent_ms)))
    return table(_PLANNER_HEAD, lines)


def _searched(measured: Measurement, name: str) -> str:
    unit = str(measured.rows[name]["unit"]).partition(", ")[2]
    return ", ".join(filter(None, (_milliseconds(measured.number(name)), unit)))


def bytecomp(data: Path) -> str:
    return planner_part(data, _bytecomp_tables) + peers_part(data, "ByteComp's plan", BYTECOMP_PAIRS)


def _bytecomp_tables(measured: Measurement) -> str:
    flat, levels = (measured.matching(rf"joint_314_(.+)gbps_{nodes}_ms").values() for nodes in ("64x1", "8x8"))
    gap = max(measured.matching(r"(.+)_gap").values())
    options, offload = f"{measured.number('options'):.0f}", _milliseconds(measured.number("joint_314_offload_ms"))
    lines: list[Line] = [
        ("paths of the decision tree", "4,341", f"{measured.number('tree_paths'):,.0f}"),
        ("of these, run by the engine", NONE, f"{measured.number('tree_engine_paths'):.0f}"),
        ("not worse than another at 1 Gbit/s", NONE, f"{measured.number('tree_undominated_paths'):.0f}"),
        ("best plan of the engine's paths over best of all", NONE, f"{measured.number('tree_engine_over_best'):.3f}"),
        ("ByteComp's choice over best of all", "a few percent", f"{measured.number('tree_bytecomp_over_best'):.3f}"),
        (f"time to choose, 314 tensors, {options} options", "179 ms", _span(flat, _milliseconds)),
        ("the same, two levels", NONE, _span(levels, _milliseconds)),
        ("the same, offload among the options", "14 ms, offload alone", offload),
        ("joint search equals brute force, up to 8 layers", NONE, measured.count("joint_equals_brute_force")),
        ("largest gap to a proven bound", NONE, f"{100 * gap:.2f} %"),
    ]
    best = _by_rate("model", measured, r"(\w+?)_([\d.]+)gbps_best_strategy_over_joint")
    crippled = _by_rate("paths", measured, r"crippled_(\w+)_([\d.]+)gbps_over_best")
    return (
        f"{table(_PLANNER_HEAD, lines)}A step under the best of seven strategies, among them Cupcake and ByteComp, "
        f"over the joint plan's:\n\n{best}"
        "Figure 14, a part of the tree left out: the best step over that of the whole tree, predicted, for VGG16 on 8\n"
        "nodes of 8 GPUs, 0.1 s of compute, qsgd with 4 bits. At the paper's 25 and 100 Gbit/s our kernels leave\n"
        f"nothing to choose.\n\n{crippled}"
    )


def _by_rate(head: str, measured: Measurement, pattern: str) -> str:
    """Return a table by name and Gbit/s, the groups of `pattern`."""
    values = measured.matching(pattern)
    rates = sorted({gbps for _, gbps in values}, key=float)
    names = dict.fromkeys(name for name, _ in values)
    rows = [[name, *(f"{values[name, gbps]:.3f}" for gbps in rates)] for name in names]
    return table([head, *(f"{gbps} Gbit/s" for gbps in rates)], rows)


PAGES: Mapping[str, Callable[[Path], str]] = {
    "cgx.md": cgx,
    "flexible.md": flexible,
    "cupcake.md": cupcake,
    "bytecomp.md": bytecomp,
}


def page(name: str, data: Path = DATA) -> str:
    """Return a page with its tables made again, from the files in `data`."""
    before, _, rest = (FOLDER / name).read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{PAGES[name](data)}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(page(name))
        print(FOLDER / name)
