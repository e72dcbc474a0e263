"""`cgx-ray plan --clusters`: priced clusters from a file to a table, a picture and JSON; CGX's article as a case."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cgx_ray.cli import main
from cgx_ray.commands.plan.clusters import PricedCluster, Rental, read_clusters, rent, samples_per_usd
from cgx_ray.commands.plan.clusters_picture import draw_clusters
from cgx_ray.commands.plan.plan_clusters import best_buy, shared_assumptions
from cgx_ray.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "clusters.yaml"
GIVEN: dict[str, Any] = {
    "model": "resnet18", "batch": 32, "gpu": None, "throughput": None, "step_time": "50ms", "profile": None,
    "fidelity": "strict", "gains": (), "min_gain": 0.8, "period": "1", "samples_per_epoch": 6400,
}  # fmt: skip
TWO = """
- name: cheap
  usd_per_hour: 2
  nodes: 6
  gpus_per_node: 4
  bandwidth: 1gbps
  latency: 0.2ms
- {name: fast, usd_per_hour: 9, gpus_per_node: 8, inside_bandwidth: 800gbps, step_time: 40ms}
"""


def clusters_file(folder: Path, text: str = TWO, name: str = "clusters.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run(path: Path, *options: str) -> tuple[int, str]:
    words = ["plan", "--model", "resnet18", "--step-time", "50ms", "--clusters", str(path), *options]
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout if result.exit_code == 0 else result.output


def rented(folder: Path, **changes: Any) -> list[Rental]:
    return list(rent(read_clusters(clusters_file(folder)), {**GIVEN, **changes}))


def test_yaml_and_csv_describe_the_same_clusters(tmp_path: Path) -> None:
    table = (
        "name,usd_per_hour,nodes,gpus_per_node,bandwidth,latency,inside_bandwidth,step_time\n"
        "cheap,2,6,4,1gbps,0.2ms,,\nfast,9,,8,,,800gbps,40ms\n"
    )
    from_csv = read_clusters(clusters_file(tmp_path, table, "clusters.csv"))
    assert from_csv == read_clusters(clusters_file(tmp_path))
    assert from_csv[0] == PricedCluster(
        name="cheap", usd_per_hour=2, nodes=6, gpus_per_node=4, bandwidth="1gbps", latency="0.2ms"
    )


def test_nodes_double_up_to_all_of_them() -> None:
    def counts(nodes: int) -> tuple[int, ...]:
        return PricedCluster(name="x", usd_per_hour=1, nodes=nodes).node_counts

    assert [counts(nodes) for nodes in (1, 2, 3, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_throughput_and_cost_follow_from_the_steps(tmp_path: Path) -> None:
    code, output = run(clusters_file(tmp_path), "--samples-per-epoch", "6400", "--json", "-")
    assert code == 0, output
    rows = json.loads(output)["rows"]
    assert [(row["cluster"], row["num_nodes"], row["num_workers"]) for row in rows] == [
        ("cheap", 1, 4), ("cheap", 2, 8), ("cheap", 4, 16), ("cheap", 6, 24), ("fast", 1, 8),
    ]  # fmt: skip
    for row in rows:
        for step in (row["dense"], row["planned"]):
            samples_per_s = row["num_workers"] * 32 / (step["step_ms"] / 1e3)
            assert step["samples_per_s"] == pytest.approx(samples_per_s)
            assert step["samples_per_usd"] == pytest.approx(samples_per_s * 3600 / row["usd_per_hour"])
            assert step["epoch"]["usd"] == pytest.approx(step["epoch"]["hours"] * row["usd_per_hour"])
        assert row["planned"]["step_ms"] <= row["dense"]["step_ms"] * 1.0001
        assert row["speedup"] == pytest.approx(row["kept"] * row["dense"]["step_ms"] / row["planned"]["step_ms"])
    assert [row["usd_per_hour"] for row in rows] == [2, 4, 8, 12, 9]
    # The cluster's own time of a step comes before the command's.
    assert rows[-1]["dense"]["step_ms"] < 50


def test_clusters_that_differ_in_price_alone_train_alike(tmp_path: Path) -> None:
    text = "\n".join(
        f"- {{name: a{usd}, usd_per_hour: {usd}, nodes: 2, bandwidth: 1gbps, latency: 1ms}}" for usd in (1, 4)
    )
    cheap, dear = (list(group) for _, group in itertools.groupby(
        rent(read_clusters(clusters_file(tmp_path, text)), GIVEN), key=lambda rental: rental.cluster.name
    ))  # fmt: skip
    for one, other in zip(cheap, dear, strict=True):
        assert one.answer.best.step_s == other.answer.best.step_s
        ratio = one.samples_per_usd(one.answer.best) / other.samples_per_usd(other.answer.best)
        assert ratio == pytest.approx(4)
    assert "planned 1 x a1" in best_buy([*cheap, *dear]) or "no plan brings more" in best_buy([*cheap, *dear])


def test_the_best_buy_is_the_most_progress_per_dollar(tmp_path: Path) -> None:
    # Within a node dense is best.
    rentals = [rental for rental in rented(tmp_path) if rental.num_nodes > 1]
    most = max(rentals, key=lambda one: one.kept * one.samples_per_usd(one.answer.best))
    assert f"planned {most.num_nodes} x {most.cluster.name}" in best_buy(rentals)


def test_assumptions_are_said_once_and_with_the_clusters_that_they_are_of(tmp_path: Path) -> None:
    lines = shared_assumptions(rented(tmp_path))
    assert len(lines) == len(set(lines))
    assert any(line.startswith("fast: compute time of a step as given: 40 ms") for line in lines), lines
    assert any(line.startswith("codec times of") for line in lines), lines


def test_the_picture_has_a_line_per_cluster_dense_and_planned(tmp_path: Path) -> None:
    rentals = rented(tmp_path)
    speed, money = draw_clusters(rentals, title="").axes
    for axes, value in ((speed, Rental.samples_per_s), (money, Rental.samples_per_usd)):
        drawn = [list(line.get_ydata()) for line in axes.lines]
        for name in ("cheap", "fast"):
            own = [rental for rental in rentals if rental.cluster.name == name]
            assert [value(rental, rental.answer.dense) for rental in own] in drawn
            assert [value(rental, rental.answer.best) for rental in own] in drawn


def test_the_example_is_answered_with_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "clusters.png"
    code, output = run(EXAMPLE, "--plot", str(picture))
    assert code == 0, output
    assert output.startswith("Most per US dollar: dense")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "None is not of type 'array'; give a list of clusters"),
        ("[]", "should be non-empty"),
        ("- {name: a}", "cluster 1 (a): 'usd_per_hour' is a required property"),
        ("- {usd_per_hour: 1}", "cluster 1: 'name' is a required property"),
        ("- {name: a, usd_per_hour: 0}", "cluster 1 (a), usd_per_hour: 0 is less than or equal to the minimum of 0"),
        ("- {name: a, usd_per_hour: .nan}", "nan is no finite number"),
        ("- {name: a, usd_per_hour: much}", "usd_per_hour: 'much' is not of type 'number'"),
        ("- {name: a, usd_per_hour: 1, nodes: 1.5}", "nodes: 1.5 is not of type 'integer'"),
        ("- {name: a, usd_per_hour: 1, price: 2}", "('price' was unexpected)"),
        ("- {name: a, usd_per_hour: 1}\n- {name: a, usd_per_hour: 2}", "there are 2 clusters 'a'"),
        ("- {name: a, usd_per_hour: 1, nodes: 2}", "the network between nodes is unknown"),
        ("- {name: a, usd_per_hour: 1, nodes: 2, latency: 1ms, bandwidth: fast}", "bandwidth 'fast' is not allowed"),
        ("- {name: a, usd_per_hour: 1, gpu: abacus}", "no GPU 'abacus'"),
        ("- {name: a, usd_per_hour: 1, gpu: a100, throughput: 3}", "throughput and GPU both say"),
        ("- [", "cannot be read as YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    code, output = run(clusters_file(tmp_path, text))
    assert code == 2, output
    assert says in " ".join(output.split()), output
    assert "Traceback" not in output


def test_a_wrong_cell_and_a_cell_too_many_are_named(tmp_path: Path) -> None:
    for line, says in (("a,x", "usd_per_hour: 'x' is not of type 'number'"), ("a,1,2", "(no heading)")):
        path = clusters_file(tmp_path, f"name,usd_per_hour\n{line}\n", "clusters.csv")
        with pytest.raises(ConfigError, match="cluster 1 ") as error:
            read_clusters(path)
        assert says in str(error.value)


def test_options_of_one_network_are_refused_and_without_clusters_they_are_asked_for(tmp_path: Path) -> None:
    code, output = run(clusters_file(tmp_path), "--workers", "4", "--price", "2")
    assert code == 2
    assert "--workers, --price and --clusters both describe a network" in " ".join(output.split())
    result = CliRunner().invoke(main, ["plan", "--model", "resnet18", "--latency", "1ms", "--bandwidth", "1gbps"])
    assert result.exit_code == 2
    assert "give --workers" in " ".join(result.output.split())


# CGX, table 4: one node of 4 GPUs that trains BERT; tokens per second, US dollars per hour, tokens/s per dollar/h.
TABLE_4 = ((4737, 6.8, 696), (14407, 12.2, 1181), (14171, 6.8, 2083))

# "Breaking the Scalability Barrier with CGX", BERT: US dollars per hour and GPU, then for 1, 2, 4 and 8 GPUs tokens per
# second and the US dollars of a whole training.
ARTICLE_BERT = {
    "Genesis": (1.30, (5820, 5052, 4744, 8606), (11.4, 26.3, 56.2, 61.7)),
    "AWS": (3.06, (3830, 7034, 14407, 27915), (41.7, 45.0, 43.2, 43.9)),
    "Genesis with CGX": (1.30, (5831, 8891, 14171, 28434), (11.4, 15.0, 18.8, 18.6)),
}


@pytest.mark.parametrize(("tokens_per_s", "usd_per_hour", "per_usd"), TABLE_4)
def test_throughput_per_dollar_is_that_of_the_papers_table(
    tokens_per_s: float, usd_per_hour: float, per_usd: float
) -> None:
    # The table counts seconds of an hour's price; half a unit is its rounding.
    assert samples_per_usd(tokens_per_s, usd_per_hour) / 3600 == pytest.approx(per_usd, abs=1)


def test_costs_of_trainings_are_those_of_the_article() -> None:
    # The length of the training is not published. That of the first column gives all others.
    tokens = 11.4 * samples_per_usd(5820, 1.30)
    for usd_per_gpu, throughputs, costs in ARTICLE_BERT.values():
        for num_gpus, throughput, cost in zip((1, 2, 4, 8), throughputs, costs, strict=True):
            # Throughputs are rounded to about 1 %, and AWS's trainings end 2 % dearer than its throughput says.
            assert tokens / samples_per_usd(throughput, num_gpus * usd_per_gpu) == pytest.approx(cost, rel=0.025)


def test_predictions_for_the_articles_servers_are_near_its_measurements() -> None:
    """Transformer-XL base on 8 GPUs, thousands of tokens per second: NCCL 105, CGX 186; AWS's V100 with NVLink 259.

    Links and speeds of single GPUs are those of the article and the paper; nothing is fitted to these three numbers.
    Gradients of the article are float16, ours float32, so that dense on the bus is predicted too slow.
    """
    given = {**GIVEN, "model": "transformer_xl_base", "batch": 41, "step_time": None, "samples_per_epoch": None}
    genesis, aws = (rental for rental in rent(read_clusters(EXAMPLE), given) if rental.num_nodes == 1)
    assert [genesis.usd_per_hour, aws.usd_per_hour] == [10.40, 24.48]
    kilotokens = [0.15 * one.samples_per_s(step) for one, step in (
        (genesis, genesis.answer.dense), (genesis, genesis.answer.best), (aws, aws.answer.dense)
    )]  # fmt: skip
    assert kilotokens[0] == pytest.approx(105, rel=0.25)
    assert kilotokens[1] == pytest.approx(186, rel=0.15)
    assert kilotokens[2] == pytest.approx(259, rel=0.15)
    # The article's point: the cheap server with compression trains 1.7 times as much per dollar as the dear one.
    per_usd = genesis.samples_per_usd(genesis.answer.best) / aws.samples_per_usd(aws.answer.dense)
    assert per_usd == pytest.approx((186 / 10.40) / (259 / 24.48), rel=0.1)
