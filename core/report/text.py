"""Numbers, times and untrusted text as they appear in the page."""

from __future__ import annotations

import html
import math
from datetime import UTC, datetime

MINUS = "−"


def escape(value: object, limit: int = 2000) -> str:
    """Any value as text that cannot become markup; cut at `limit` characters."""
    text = str(value)
    if len(text) > limit:
        text = text[:limit] + "…"
    # Characters that HTML forbids even escaped, and those that reorder text around them.
    shown = "".join(c for c in text if (c >= " " or c in "\n\t") and not _reorders(c) and c != "\x7f")
    return html.escape(shown, quote=True)


def _reorders(character: str) -> bool:
    return "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"


def finite(value: object) -> float | None:
    """The value when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def figure(value: float, digits: int = 4) -> str:
    """A number to `digits` significant digits: 1,234,567 or 0.01234 or 2.5e-5."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10 ** (digits - 1) and size < 1e15:
        text = f"{value:,.0f}"
    elif size < 1e-3 or size >= 1e15:
        return scientific(value, digits)
    else:
        text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"
    return text.replace("-", MINUS)


def scientific(value: float, digits: int = 3) -> str:
    """2.5e−5: the mantissa without trailing zeros."""
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}e{int(exponent)}".replace("-", MINUS)


def short(value: float) -> str:
    """A count for an axis or a tile: 900, 12k, 1.25M."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if suffix == "k" else size
            return f"{value / unit:.3f}".rstrip("0").rstrip(".") + suffix
    return f"{value:,.6g}" if abs(value) < 1e-3 else f"{value:,.3f}".rstrip("0").rstrip(".")


def size(count: float) -> str:
    """Bytes in decimal units: 1.5 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Two units: 3 d 4 h, 2 h 5 min, 3 min 12 s, 42 s, 8.2 s."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if 0.05 <= seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    for unit, below, one, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= one:
            rest = whole % one // part
            return f"{whole // one} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def moment(time: object) -> str:
    """Unix seconds as UTC to the second; a dash when it is none."""
    seconds = finite(time)
    if seconds is None or not 0 <= seconds < 253402300800:
        return "–"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
