"""ISO 8601 durations, as limits and idle times are written."""

from __future__ import annotations

import re

_DURATION = re.compile(
    r"P(?=.)(?:(?P<w>\d+)W)?(?:(?P<d>\d+)D)?(?:T(?=.)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?"
)
_SECONDS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}


def seconds_of(text: object) -> float | None:
    """Seconds of a duration such as P1DT2H; None for what is none."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    return sum(float(value) * _SECONDS[unit] for unit, value in match.groupdict().items() if value)
