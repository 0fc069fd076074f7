from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainyard import units
from trainyard.units import (
    Duration,
    Length,
    format_count,
    parse_count,
    parse_duration,
    parse_interval,
    parse_length,
    parse_points,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0), ("1500", 1500), ("1,500", 1500), ("1_500", 1500), ("1.5k", 1500), ("2 K", 2000),
        ("2.5M", 2_500_000), ("300B", 300 * 10**9), ("300 G", 300 * 10**9), ("1.25T", 125 * 10**10),
        (" 7 ", 7), ("4.0", 4), ("0.5k", 500), ("146,484,375", 146_484_375),
    ],
)  # fmt: skip
def test_counts_are_read_exactly(text: str, count: int) -> None:
    assert parse_count(text) == count


NO_COUNTS = "k 3e8 -1 1.5.2 one 1kk ٣ .5 1,5B 0,5B 0,500B 1,,000 1, 12,34 1,0000 1,00,000 10.000"


@pytest.mark.parametrize("text", ["", "1 Q", *NO_COUNTS.split(), "1.500"])
def test_what_is_not_a_count(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a count such as 1500, 2\.5M or 300B"):
        parse_count(text)


@pytest.mark.parametrize("text", ["1.5", "0.0001k", "1.2345k"])
def test_what_is_not_whole(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is not a whole number"):
        parse_count(text)


@given(st.integers(min_value=0, max_value=10**18))
@example(368_801_690_114_240_320)  # more digits than a float keeps
def test_printed_counts_read_back(count: int) -> None:
    assert parse_count(format_count(count)) == count


@given(
    st.integers(min_value=0, max_value=10**16), st.sampled_from(["tokens", "sequences", "steps"])
)
def test_printed_lengths_read_back(amount: int, unit: str) -> None:
    length = Length(amount, unit)  # type: ignore[arg-type]
    assert parse_length(str(length)) == length
    assert parse_length(length) is length


def test_points_read_back() -> None:
    points = parse_points("0: 0, 1,500 steps: 6e-4, 2k steps: .5, 1B tokens: 1e-5")
    assert [rate for _, rate in points.points] == [0, 6e-4, 0.5, 1e-5]
    assert str(points) == "0 steps: 0.0, 1.5k steps: 0.0006, 2k steps: 0.5, 1B tokens: 1e-05"
    assert parse_points(str(points)) == points and str(parse_points("")) == ""


@pytest.mark.parametrize(
    "value", [300, 3.5, None, "", "300B", "tokens", "300B samples", "5steps", ["5 steps"]]
)
def test_what_is_not_a_length(value: object) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_length(value)


PRINTED: dict[Callable[..., str], dict[float, str]] = {
    units.format_count: {
        **{0: "0", 999: "999", 1000: "1k", 1500: "1.5k", 1234: "1234", 320_000: "320k"},
        **{433_870: "433.87k", 146_484_375: "146484375", 300 * 10**9: "300B", 10**12: "1T"},
    },
    units.format_bytes: {
        **{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 2**20 - 1: "1.0 MiB", -2048: "-2.0 KiB"},
        **{1.5 * 2**30: "1.5 GiB", 2**41: "2.0 TiB", 2**51: "2048.0 TiB"},
    },
    units.format_large: {
        **{0: "0", 0.25: "0.25", 999: "999", 1000: "1k", 124_475_904: "124M", 999_999: "1M"},
        **{999_999_999: "1B", 174.6e9: "175B", 8.05e12: "8.05T", -1500: "-1.5k"},
    },
    units.format_seconds: {
        **{0.4: "0.4s", 9.94: "9.9s", 9.99: "10s", 10: "10s", 59.6: "1m 0s", 200: "3m 20s"},
        **{3600: "1h 0m", 86399.9: "1d 0h", 187_200: "2d 4h"},
    },
    units.format_figure: {
        **{0: "0", 0.01234: "0.0123", 9.996: "10", 12.34: "12.3", 999.4: "999", 48_300: "48,300"},
    },
}


@pytest.mark.parametrize("format_it", PRINTED, ids=lambda function: function.__name__)
def test_what_is_printed(format_it: Callable[..., str]) -> None:
    for number, text in PRINTED[format_it].items():
        assert format_it(number) == text


def test_articles() -> None:
    an = ["A100 80GB", "H100", "MI300X", "L4", "RTX 4090", "NVIDIA GeForce RTX 3090", "Apple M3"]
    an += ["Edge TPU", "FPGA", "IPU", "NPU", "OAM", "SXM5", "XPU"]
    for name in an:
        assert units.with_article(name) == f"an {name}"
    for name in ("T4", "V100 16GB", "B200", "CPU", "Max 1550", "my card"):
        assert units.with_article(name) == f"a {name}"


def test_durations() -> None:
    seconds = {"1 week": 604800, "10 days": 864000, "1.5 hours": 5400, " 36hours ": 129600}
    assert {text: parse_duration(text) for text in seconds} == seconds


@pytest.mark.parametrize("text", ["", "7", "week", "0 days", "-1 day", "1 fortnight", "1 weeks 2"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration such as '1 week', '10 days' or"):
        parse_duration(text)


@given(st.integers(1, 10**9))
def test_times_are_read_as_they_are_written(seconds: int) -> None:
    assert parse_interval(str(Duration(seconds))) == Duration(seconds)


def test_intervals() -> None:
    values = {"30 minutes": Duration(1800), "1.5 hours": Duration(5400), 500: 500, 0: 0}
    values |= {"2.5k steps": 2500, "1 second": Duration(1), "0.5 seconds": Duration(1)}
    assert {value: parse_interval(value) for value in values} == values
    assert [str(Duration(n)) for n in (60, 90, 5400, 7200)] == [
        *("1 minute", "90 seconds", "90 minutes", "2 hours")
    ]
    for wrong in ("30", "500 sequences", "0 minutes", -1, 1.5, True, None, "soon"):
        with pytest.raises(ValueError, match="is not an interval; write a time or steps"):
            parse_interval(wrong)
