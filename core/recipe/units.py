"""Quantities with units as people write them in a recipe: ``4 GB``, ``15 min``, ``1000 steps``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_NUMBER = r"(?P<number>\d{1,15}(?:\.\d{1,15})?)"
_SIZES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


def parse_size(value: Any) -> int:
    """``"4 GB"`` -> 4000000000 bytes; ``"4 GiB"`` -> 4294967296. A plain integer is bytes."""
    if isinstance(value, bool):
        raise ValueError("a size such as `4 GB` or `512 MiB`")
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(_NUMBER + r"\s*(?P<unit>[KMGT]i?B|B)", str(value).strip())
        if not match:
            raise ValueError("a size such as `4 GB` or `512 MiB`")
        size = int(Fraction(match["number"]) * _SIZES[match["unit"]])
    if not 0 < size <= 10**18:
        raise ValueError("a size above zero, such as `4 GB`")
    return size


def parse_duration(value: Any) -> float:
    """``"15 min"`` -> 900.0 seconds. Units: s, min, h, d. A plain number is seconds."""
    if isinstance(value, bool):
        raise ValueError("a duration such as `30 s`, `15 min` or `2 h`")
    if isinstance(value, (int, float)):
        seconds = float(value)
    else:
        match = re.fullmatch(_NUMBER + r"\s*(?P<unit>s|min|h|d)", str(value).strip())
        if not match:
            raise ValueError("a duration such as `30 s`, `15 min` or `2 h`")
        seconds = float(match["number"]) * _SECONDS[match["unit"]]
    if not 0.001 <= seconds <= 1e9:
        raise ValueError("a duration above zero, such as `15 min`")
    # Whole milliseconds are written and read back exactly.
    return round(seconds, 3)


def format_seconds(seconds: float) -> str:
    """The duration as :func:`parse_duration` reads it back exactly: ``"900 s"``."""
    from decimal import Decimal

    text = format(Decimal(repr(float(seconds))), "f")
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} s"


@dataclass(frozen=True, slots=True)
class Interval:
    """A rhythm: every so many steps, or every so many seconds. Exactly one of the two is set."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else format_seconds(self.seconds or 0.0)

    def due(self, steps_since: int, seconds_since: float) -> bool:
        """Whether it is time again, given what has passed since the last time."""
        if self.steps is not None:
            return steps_since >= self.steps
        assert self.seconds is not None
        return seconds_since >= self.seconds


def parse_interval(value: Any) -> Interval:
    """``"1000 steps"`` or ``1000`` -> every 1000 steps; ``"15 min"`` -> every 900 seconds."""
    message = "an interval such as `1000 steps` or `15 min`"
    if isinstance(value, Interval):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        steps = value
    else:
        match = re.fullmatch(r"(\d[\d_]{0,14})\s*steps?", str(value).strip())
        if not match:
            try:
                return Interval(seconds=parse_duration(str(value)))
            except ValueError:
                raise ValueError(message) from None
        steps = int(match[1])
    if not 0 < steps <= 10**12:
        raise ValueError(message)
    return Interval(steps=steps)


def parse_fraction(value: Any) -> Fraction:
    """``1``, ``0.5`` or ``"3/2"`` -> an exact fraction with a small denominator."""
    message = "a number above zero such as `1`, `0.5` or `3/2`"
    if isinstance(value, Fraction):
        fraction = value
    else:
        # Few digits and no exponent: Fraction("1e999999999") would compute for hours.
        if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}(\.\d{0,17}|/\d{1,9})?", str(value).strip()):
            raise ValueError(message)
        try:
            fraction = Fraction(str(value).strip())
        except ZeroDivisionError:
            raise ValueError(message) from None
    if fraction <= 0:
        raise ValueError(message)
    limited = fraction.limit_denominator(1000)
    if abs(float(limited) - float(fraction)) > 1e-9:
        raise ValueError("a fraction with a denominator up to 1000, such as `1/3`")
    return limited


def _string(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "number"}], "examples": [example]}
    )


Size = Annotated[int, BeforeValidator(parse_size), _string(r"^[\d.]+ ?([KMGT]i?)?B$", "4 GB")]
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_seconds, return_type=str),
    _string(r"^[\d.]+ ?(s|min|h|d)$", "15 min"),
]
Every = Annotated[
    Interval,
    BeforeValidator(parse_interval),
    PlainSerializer(str, return_type=str),
    _string(r"^[\d_.]+ ?(steps?|s|min|h|d)$", "1000 steps"),
]
Repeat = Annotated[
    Fraction,
    BeforeValidator(parse_fraction),
    PlainSerializer(str, return_type=str),
    _string(r"^\d+(/\d+|\.\d+)?$", "1/2"),
]
