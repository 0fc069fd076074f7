"""Parsing and formatting of quantities: "300B", "375M tokens", bytes, seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

LengthUnit = Literal["tokens", "sequences", "steps"]

_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 7 * 86400}
# A comma may only group three digits, and 10.000 is refused: in much of the world they are swapped.
_COUNT = re.compile(
    r"(?![0-9]+\.[0-9]{3}$)((?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]+)?)\s*([kKMBGT]?)"
)


@dataclass(frozen=True)
class Length:
    """A length of training in tokens, sequences or steps."""

    amount: int
    unit: LengthUnit

    def __str__(self) -> str:
        return f"{format_count(self.amount)} {self.unit}"


@dataclass(frozen=True)
class Duration:
    """A time in whole seconds."""

    seconds: int

    def __str__(self) -> str:
        unit = [each for each, length in _SECONDS.items() if self.seconds % length == 0][-1]
        number = self.seconds // _SECONDS[unit]
        return f"{number} {unit}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class RatePoints:
    """Learning rates at positions of a run."""

    points: tuple[tuple[Length, float], ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{length}: {rate}" for length, rate in self.points)

    def scaled(self, n: int, whole: int) -> RatePoints:
        """Multiplies positions by n / whole."""
        scaled = ((Length(p.amount * n // whole, p.unit), rate) for p, rate in self.points)
        return RatePoints(tuple(scaled))


def parse_count(text: str) -> int:
    """Parses "1,500", "2.5M" or "300B" as an integer.

    Raises:
        ValueError: the text is not a count, or not an integer.
    """
    match = _COUNT.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a count such as 1500, 2.5M or 300B")
    digits, prefix = match.groups()
    whole, _, fraction = digits.replace(",", "").replace("_", "").partition(".")
    scale = _PREFIXES[prefix]
    scaled = int(whole + fraction) * scale
    count, rest = divmod(scaled, int(10 ** len(fraction)))
    if rest:
        raise ValueError(f"{text!r} is not a whole number")
    return count


def parse_length(value: object) -> Length:
    """Parses "300B tokens", "146484375 sequences" or "500000 steps".

    Raises:
        ValueError: the value is not a length.
    """
    if isinstance(value, Length):
        return value
    amount, _, unit = str(value).strip().rpartition(" ")
    if isinstance(value, str) and unit in get_args(LengthUnit):
        return Length(parse_count(amount), unit)  # type: ignore[arg-type]
    raise ValueError(
        f"{value!r} is not a length; write an amount and a unit, "
        "such as '300B tokens', '1.5M sequences' or '2000 steps'"
    )


def parse_points(value: object) -> RatePoints:
    """Parses "0: 0, 2000 steps: 6e-4, 1B tokens: 6e-5"; empty text: no points.

    Raises:
        ValueError: an entry is not a length and a rate, or there are fewer than two.
    """
    if isinstance(value, RatePoints):
        return value
    points = []
    for entry in re.split(r",\s+", str(value).strip()) if value else []:
        position, _, rate = (word.strip() for word in entry.partition(":"))
        if not re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", rate):
            raise ValueError(
                f"{entry!r} is not a position and a learning rate; write points such as "
                "'0: 0, 2000 steps: 6e-4, 1B tokens: 6e-5'"
            )
        length = Length(0, "steps") if position == "0" else parse_length(position)
        points.append((length, float(rate)))
    if points and (len(points) < 2 or not 0 < max(rate for _, rate in points) < math.inf):
        raise ValueError(f"{value!r} needs two points at least, and a rate that is positive")
    return RatePoints(tuple(points))


def format_count(count: int) -> str:
    """Formats a count exactly, with the largest prefix that leaves at most two decimals."""
    for prefix in ("T", "B", "M", "k"):
        scale = _PREFIXES[prefix]
        if count >= scale and (count * 100) % scale == 0:
            whole, rest = divmod(count, scale)  # a quotient of floats would round
            return f"{whole}.{rest * 100 // scale:02}".rstrip("0").rstrip(".") + prefix
    return str(count)


def format_bytes(n_bytes: float) -> str:
    """Formats a size in powers of 1024: "512 B", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1023.95:  # from here on one decimal rounds to the next unit
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def format_large(number: float) -> str:
    """Formats a number to three significant digits with a prefix: 124475904 is "124M"."""
    for prefix in ("T", "B", "M", "k"):
        digits = f"{number / _PREFIXES[prefix]:.3g}"
        if abs(float(digits)) >= 1:
            return digits + prefix
    return f"{number:.3g}"


def format_number(number: int, thing: str) -> str:
    """Formats a number with its noun: "1 node", "2,048 nodes", "8 processes"."""
    plural = "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def with_article(name: str) -> str:
    """Prepends the article, by pronunciation: "an A100", "a T4", "an MI300X"."""
    is_vowel = re.match(r"[AEFHILMNORSX](?![a-z])|[AEIOUaeiou]", name)
    return f"{'an' if is_vowel else 'a'} {name}"


def format_figure(number: float, digits: int = 3) -> str:
    """Formats at least `digits` significant digits without an exponent: "48,300", "0.0123"."""
    if abs(number) >= 10 ** (digits - 1):
        return f"{number:,.0f}"
    return f"{number:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """Formats a duration in its two largest units: "2d 4h", "3m 20s", "0.4s", "3ms"."""
    if 0 < seconds < 0.0995:
        return f"{max(1, round(1000 * seconds))}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (whole % 60, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        parts.pop(0)
    return " ".join(f"{amount}{unit}" for amount, unit in parts[:2])


def parse_duration(text: str) -> float:
    """Parses "1 week", "10 days" or "36.5 hours" as seconds.

    Raises:
        ValueError: the text is not a positive duration.
    """
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*([a-z]+?)s?\s*", text)
    if not match or match[2] not in _SECONDS or not float(match[1]):
        raise ValueError(f"{text!r} is not a duration such as '1 week', '10 days' or '36 hours'")
    return float(match[1]) * _SECONDS[match[2]]


def parse_interval(value: object) -> int | Duration:
    """Parses "30 minutes" as a time and "500 steps" as 500; a whole number counts steps.

    Raises:
        ValueError: the value is neither a positive time nor a number of steps.
    """
    if isinstance(value, Duration) or (type(value) is int and value >= 0):
        return value
    try:
        text = value if isinstance(value, str) else ""
        if text.endswith(" steps"):
            return parse_length(text).amount
        return Duration(math.ceil(parse_duration(text)))
    except ValueError:
        raise ValueError(
            f"{value!r} is not an interval; write a time or steps, such as '30 minutes' or "
            "'500 steps'"
        ) from None


def parse_shares(text: str) -> list[float]:
    """Parses "949,50,1" as the shares of train, valid and test, on any scale.

    Raises:
        ValueError: it is not one to three numbers with at least one positive.
    """
    numbers = [word.strip() for word in text.split(",")]
    if len(numbers) > 3 or not all(re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", n) for n in numbers):
        raise ValueError(
            f"split {text!r} is not one to three comma-separated numbers, the shares of train, "
            'valid and test, such as "949,50,1"'
        )
    shares = [float(number) for number in numbers] + [0.0] * (3 - len(numbers))
    if not sum(shares) > 0:
        raise ValueError(f'split {text!r} leaves every split empty; try "949,50,1"')
    return shares


def nearest_divisor(number: int, near: int) -> int:
    """Returns the divisor of `number` that is nearest to `near`."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return min({*small, *(number // n for n in small)}, key=lambda n: (abs(n - near), n))
