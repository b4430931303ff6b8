"""Quantities with units as people write them in a recipe: ``4 GB``, ``15 min``, ``1000 steps``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_NUMBER = r"(?P<number>\d+(?:\.\d+)?)"
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
    if size <= 0:
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
    if seconds <= 0:
        raise ValueError("a duration above zero, such as `15 min`")
    return seconds


@dataclass(frozen=True, slots=True)
class Interval:
    """A rhythm: every so many steps, or every so many seconds. Exactly one of the two is set."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.steps is not None else f"{self.seconds:g} s"

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
        match = re.fullmatch(r"([\d_]+)\s*steps?", str(value).strip())
        if not match:
            try:
                return Interval(seconds=parse_duration(str(value)))
            except ValueError:
                raise ValueError(message) from None
        steps = int(match[1])
    if steps <= 0:
        raise ValueError(message)
    return Interval(steps=steps)


def parse_fraction(value: Any) -> Fraction:
    """``1``, ``0.5`` or ``"3/2"`` -> an exact fraction with a small denominator."""
    try:
        fraction = value if isinstance(value, Fraction) else Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError("a number above zero such as `1`, `0.5` or `3/2`") from None
    if isinstance(value, bool) or fraction <= 0:
        raise ValueError("a number above zero such as `1`, `0.5` or `3/2`")
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
    PlainSerializer(lambda seconds: f"{seconds:g} s", return_type=str),
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
