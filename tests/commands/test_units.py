"""Rates, durations, sizes, shares and counts: texts that are read, texts that are refused, texts that are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cgx_ray.errors import ConfigError
from cgx_ray.units import (
    compact_rate,
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_rate,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [
        ("1gbit", 1e9),
        ("100mbit", 1e8),
        ("2.5Gbit/s", 2.5e9),
        ("64kbit", 64e3),
        ("10 gbps", 1e10),
        ("1tbps", 1e12),
        (".5gbit", 5e8),
        ("1e-1gbps", 1e8),
        ("100000bit", 1e5),
    ],
)
def test_rates_are_read_as_people_and_tc_write_them(text: str, bit_per_s: float) -> None:
    assert parse_rate("rate", text) == pytest.approx(bit_per_s, rel=1e-12)
    assert parse_rate("rate", text, needs_unit=False) == pytest.approx(bit_per_s, rel=1e-12)


@pytest.mark.parametrize("text", ["10GBps", "10 GBps", "1GB"])
def test_bytes_are_no_rate(text: str) -> None:
    for needs_unit in (True, False):
        with pytest.raises(ConfigError, match="give a number and kbit"):
            parse_rate("bandwidth", text, needs_unit=needs_unit)


def test_a_rate_without_a_unit_is_read_only_where_that_is_allowed() -> None:
    assert parse_rate("rate", "1e6", needs_unit=False) == 1e6
    with pytest.raises(ConfigError, match=r"rate '1e6' is not allowed; give a number and kbit, .*, such as 100mbit"):
        parse_rate("rate", "1e6")


def test_durations_sizes_shares_and_counts_are_read_with_their_units() -> None:
    seconds = [parse_seconds("latency", text) for text in ("4ms", "50 us", ".1s", "0ms")]
    assert seconds == pytest.approx([4e-3, 50e-6, 0.1, 0], rel=1e-12)
    assert [parse_bytes("queue", text) for text in ("250kb", "1MB", "9000b")] == [250_000, 1_000_000, 9000]
    assert [parse_share("loss", text) for text in ("1%", "0.01", "0")] == [0.01, 0.01, 0]
    assert parse_count("workers", "16") == 16


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_rate, text) for text in ("fast", "1 parsec", "", "-", "10", "10gb", "-1gbps", "1.2.3gbit")),
        *((parse_seconds, text) for text in ("fast", "4", "-4ms", "4 min", "ms")),
        *((parse_bytes, text) for text in ("none", "250", "1tb")),
        *((parse_share, text) for text in ("much", "1 of 10", "-1%")),
        *((parse_count, text) for text in ("many", "1.5", "-2", "")),
    ],
)
def test_an_unknown_text_is_one_error_with_name_text_and_an_example(parse: Callable[..., float], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse("given", text)
    assert str(error.value).startswith(f"given {text!r} is not allowed; give ")
    assert ", such as " in str(error.value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(parse_rate, "1e400gbps"), (parse_rate, "1e300tbps"), (parse_seconds, "1e400ms"), (parse_bytes, "1e400kb")],
)
def test_a_number_that_overflows_is_an_error(parse: Callable[..., float], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^given {text!r} is not allowed, because it is too large; give a number"):
        parse("given", text)


def test_rates_are_written_for_readers_and_as_options() -> None:
    rates = (1e9, 2.5e9, 1e8, 64e3)
    assert [format_rate(rate) for rate in rates] == ["1 Gbit/s", "2.5 Gbit/s", "100 Mbit/s", "64 kbit/s"]
    assert [compact_rate(rate) for rate in rates] == ["1gbit", "2.5gbit", "100mbit", "64kbit"]
    assert [parse_rate("rate", compact_rate(rate)) for rate in rates] == list(rates)


def test_durations_sizes_and_counts_are_written_with_their_units() -> None:
    assert [format_seconds(seconds) for seconds in (4.25e-3, 0.5, 1.5)] == ["4.25 ms", "500 ms", "1.5 s"]
    assert [format_seconds(seconds) for seconds in (0, 1e-8, 5e-5, 0.9996)] == ["0 s", "10 ns", "50 us", "1 s"]
    assert [format_seconds(seconds) for seconds in (999.4, 999.9, 1234)] == ["999 s", "1,000 s", "1,234 s"]
    assert [format_bytes(size) for size in (1 << 16, 1 << 28)] == ["64 KiB", "256 MiB"]
    assert [format_count(count, "thread") for count in (1, 4)] == ["1 thread", "4 threads"]
