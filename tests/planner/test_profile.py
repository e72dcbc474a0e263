"""Profiles: lines through disturbed times, files that read back unchanged, and files that are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cgx_ray.cli import main
from cgx_ray.commands import profile
from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN, CodecSpec
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.cost import Link
from cgx_ray.planner.profile import Profile, fit_cost, fit_line, load_link, load_profile, save_profile
from cgx_ray.session.calibrate import slowest

SIZES = [1 << exponent for exponent in range(10, 25, 2)]
COST = CodecCost(encode_a_s=1e-5, encode_b_s_per_element=1e-9, decode_a_s=5e-6, decode_b_s_per_element=5e-10)
PROFILE = Profile(
    package_version="0.1.0",
    device="A processor",
    threads=2,
    codec_costs={"qsgd": COST, "topk:density=0.1": COST},
    link=Link(alpha_s=1e-4, beta_s_per_byte=8e-9),
)


def test_a_line_is_found_whatever_the_spread_of_its_sizes() -> None:
    fixed, slope = fit_line(SIZES, [7e-6 + 2e-10 * size for size in SIZES])
    assert fixed == pytest.approx(7e-6, rel=1e-9)
    assert slope == pytest.approx(2e-10, rel=1e-9)


@pytest.mark.parametrize("disturbed", [0, 3, 7])
def test_one_time_that_is_ten_times_too_long_moves_no_line(disturbed: int) -> None:
    seconds = [7e-6 + 2e-10 * size for size in SIZES]
    seconds[disturbed] *= 10
    assert fit_line(SIZES, seconds) == pytest.approx((7e-6, 2e-10), rel=1e-9)


def test_no_other_line_has_a_smaller_sum_of_relative_errors() -> None:
    rng = random.Random(0)
    for case in range(50):
        seconds = [(1e-6 + 1e-10 * size) * rng.uniform(0.5, 2) for size in SIZES]

        def error(a: float, b: float, seconds: list[float] = seconds) -> float:
            return sum(abs(a + b * size - time_s) / time_s for size, time_s in zip(SIZES, seconds, strict=True))

        found = fit_line(SIZES, seconds)
        assert min(found) >= 0, (case, found)
        for _ in range(500):
            other = (found[0] * rng.uniform(0.5, 2), found[1] * rng.uniform(0.5, 2))
            assert error(*found) <= error(*other) * (1 + 1e-12), (case, found, other)


def test_times_that_fall_with_the_size_have_a_line_without_slope() -> None:
    assert fit_line([10, 20], [2.0, 1.0]) == (1.0, 0.0)
    assert fit_line([10], [2.0]) == (0.0, 0.2)


@pytest.mark.parametrize(("sizes", "seconds"), [([], []), ([0], [1.0]), ([1], [0.0])])
def test_points_without_a_line_are_refused(sizes: list[int], seconds: list[float]) -> None:
    with pytest.raises(ConfigError, match="all above 0"):
        fit_line(sizes, seconds)


def test_a_cost_gives_back_the_times_it_was_fitted_to() -> None:
    encode_s, decode_s = ([time_s(1, numel) for numel in SIZES] for time_s in (COST.encode_s, COST.decode_s))
    cost = fit_cost(SIZES, encode_s, decode_s)
    for name in COST.known():
        assert getattr(cost, name) == pytest.approx(getattr(COST, name), rel=1e-9), name


@pytest.mark.parametrize(("slowness", "counted"), [(1.0, 1.0), (2.0, 2.0), (50.0, 3.0)])
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_codecs_take_as_long_as_on_the_slowest_rank_but_not_as_on_a_busy_one(
    slowness: float, counted: float, num_ranks: int
) -> None:
    ranks = [{"qsgd": COST.slowed(slowness if rank == 1 else 1.0)} for rank in range(num_ranks)]
    # A rank that timed no codecs counts for nothing.
    assert slowest([*ranks, {}])["qsgd"].known() == pytest.approx(COST.slowed(counted).known())


def test_a_profile_reads_back_as_it_was_saved(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == PROFILE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, r"\$.format_version: 1 was expected"),
        ({"threads": 0}, r"\$.threads"),
        ({"codec_costs": {}}, r"\$.codec_costs"),
        ({"codec_costs": {"qsgd": {"encode_a_s": 1}}}, r"\$.codec_costs.qsgd"),
        ({"link": {"alpha_s": 0, "beta_s_per_byte": 0}}, r"\$.link.beta_s_per_byte"),
        ({"link": {"alpha_s": float("nan"), "beta_s_per_byte": 1}}, "NaN is no number of JSON"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_no_profile_is_one_clear_error(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message):
        load_profile(path)


def test_files_that_are_missing_or_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("qsgd")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(tmp_path / "text.json")


def test_every_codec_gets_a_cost_by_name_and_the_file_has_the_probed_link(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile, "PROFILE_NUMELS", (1 << 10, 1 << 12))
    monkeypatch.setattr(profile, "TURN_S", 0.0)
    ways = [{"latency_s": 1e-3, "bytes_per_s": 1e8}, {"latency_s": 2e-3, "bytes_per_s": 2e8}]
    (tmp_path / "ways.json").write_text(json.dumps({"ways": ways}))
    out = tmp_path / "profile.json"
    result = CliRunner().invoke(main, ["profile", "--network", str(tmp_path / "ways.json"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = load_profile(out)
    assert found.device == profile.device_name(torch.device("cpu"))
    assert found.codec_costs.keys() >= {*BUILT_IN, str(CodecSpec(name="topk", density=0.001))}
    assert found.link == load_link(tmp_path / "ways.json") == Link(alpha_s=2e-3, beta_s_per_byte=1e-8)
    assert all(cost.encode_s(1, 1 << 20) > 0 for cost in found.codec_costs.values())
