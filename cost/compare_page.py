"""A comparison as text, as JSON and as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from isthmus import __version__
from isthmus.cost.chart import Dot, scatter
from isthmus.cost.compare import Comparison, Row
from isthmus.cost.table import amount, dollars, place_json, price_json, price_text

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""As of the report of a run: no script, no request."""
_HEAD = (
    "",
    "backend",
    "region",
    "tier",
    "machines",
    "total",
    "80 % interval",
    "hours",
    "$/M images",
    "speed",
)
_UNPRICED = 5
"""Offers without a price in the table below those that have one: what they cost nobody knows, so they answer little."""


def comparison_json(found: Comparison) -> dict[str, Any]:
    """JSON-able."""
    return {
        "recipe": found.recipe,
        "offers": [
            {
                **place_json(row.estimate),
                "priced": row.estimate.usd is not None,
                "usd": row.estimate.usd,
                "usd_interval80": list(row.estimate.usd_interval) if row.estimate.usd_interval else None,
                "hours": row.estimate.hours,
                "hours_interval80": list(row.estimate.hours_interval),
                "usd_per_million_images": row.estimate.usd_per_million_images,
                "speed": "measured" if row.estimate.measured else "estimated",
                "usd_lacks": list(row.incomplete),
                "pareto": row.pareto,
                "cheapest": row.cheapest,
                "fastest": row.fastest,
                "price": price_json(row.place.price) if row.place.price else None,
                "unpriced": list(row.estimate.unpriced),
                "how_to_price": row.place.how_to_price() if row.estimate.usd is None else None,
            }
            for row in found.rows
        ],
        "left_out": list(found.left_out),
        "warnings": list(found.warnings),
    }


def comparison_text(found: Comparison, limit: int | None = None) -> str:
    """A table; priced offers by dollars, then unpriced ones by hours.

    Args:
        limit: rows shown at most, beside those on the front; of unpriced ones a few, or so many where nothing is priced, and
            those that the recipe names. None: all.
    """
    priced = [row for row in found.rows if row.estimate.usd is not None]
    unpriced = [row for row in found.rows if row.estimate.usd is None]
    shown = priced if limit is None else [row for at, row in enumerate(priced) if at < limit or row.pareto]
    few = min(_UNPRICED, limit or 0) if priced else limit or 0
    named = unpriced if limit is None else [row for at, row in enumerate(unpriced) if at < few or row.named]
    cells = [_HEAD, *(_cells(row) for row in [*shown, *named])]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    right = {5, 6, 7, 8}
    lines = [
        "  ".join(
            f"{cell:>{width}}" if column in right else f"{cell:{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    if len(shown) < len(priced):
        lines.append(f"shown {len(shown)} of {len(priced)} priced offers; --all shows the rest")
    if len(named) < len(unpriced):
        lines.append(
            f"shown {len(named)} of {len(unpriced)} offers that nobody prices, the fastest and the recipe's own; --all shows the rest"
        )
    lines += ["", "* nothing is both cheaper and faster   $ the cheapest   ! the fastest"]
    missing = _missing(found)
    if missing:
        lines.append(missing)
    if unpriced:
        lines.append(f"unpriced: {unpriced[0].place.how_to_price()}")
    lines += [f"left out: {text}" for text in found.left_out]
    return "\n".join(lines)


def _missing(found: Comparison) -> str:
    groups = dict.fromkeys(group for row in found.rows for group in row.incomplete)
    if not groups:
        return ""
    names = " and ".join(groups)
    return f"+ without {names}, which nobody prices there; offers are ranked without {names}"


def marks(row: Row) -> str:
    """`*$` of the cheapest on the front."""
    return "*" * row.pareto + "$" * row.cheapest + "!" * row.fastest


def _cells(row: Row) -> tuple[str, ...]:
    found, place = row.estimate, row.place
    low_high = found.usd_interval
    return (
        marks(row),
        place.backend,
        place.region,
        place.tier,
        f"{place.nodes} x {place.sku} ({place.gpu})",
        "unpriced" if found.usd is None else dollars(found.usd) + ("+" if row.incomplete else ""),
        f"{dollars(low_high[0])} to {dollars(low_high[1])}" if low_high else "",
        amount(found.hours),
        "" if found.usd_per_million_images is None else f"{found.usd_per_million_images:,.2f}",
        "measured" if found.measured else "estimated",
    )


def comparison_page(found: Comparison, *, written: str) -> str:
    """The page as HTML.

    Args:
        written: a date, for the footer.
    """
    dots = [
        Dot(
            usd=row.estimate.usd,
            hours=row.estimate.hours,
            backend=row.place.backend,
            label=row.place.label,
            pareto=row.pareto,
        )
        for row in found.rows
        if row.estimate.usd is not None
    ]
    chart = scatter(dots, f"{found.recipe}: dollars against hours")
    chart.background = None
    title = f"{found.recipe}: what it would cost"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"<p>{_summary(found)}</p><figure>{chart.svg()}</figure><div class=scroll><table><thead><tr>"
        + "".join(f"<th{_numeric(column)}>{escape(name)}</th>" for column, name in enumerate(_HEAD))
        + "</tr></thead><tbody>"
        + "".join(_row(row) for row in found.rows)
        + "</tbody></table></div>"
        + "<p class=note>* nothing is both cheaper and faster, $ the cheapest, ! the fastest. An interval holds four of five "
        "runs; on spot it also spans the rates of interruption.</p>"
        + (f"<p class=note>{escape(_missing(found))}.</p>" if _missing(found) else "")
        + _list("Left out", found.left_out)
        + _list("Warnings", found.warnings)
        + _list("Prices", sorted({price_text(row.place.price) for row in found.rows if row.place.price}))
        + f"<footer>Written {escape(written)} by isthmus {escape(__version__)}.</footer></main></body></html>\n"
    )


def _summary(found: Comparison) -> str:
    priced = [row for row in found.rows if row.estimate.usd is not None]
    parts = []
    if priced:
        quickest = min(priced, key=lambda row: row.estimate.hours)
        same = quickest is priced[0]
        named = [("cheapest and fastest" if same else "cheapest", priced[0])]
        named += [] if same else [("fastest", quickest)]
        parts = [
            f"The {name} offer with a price: <b>{escape(row.place.label)}</b>, {dollars(row.estimate.usd or 0)}, "
            f"{amount(row.estimate.hours)} h."
            for name, row in named
        ]
    count = len(found.rows) - len(priced)
    if count:
        parts.append(
            f"{count} offer{'s are' if count > 1 else ' is'} priced by nobody; {escape(found.rows[-1].place.how_to_price())}."
        )
    return " ".join(parts)


def _row(row: Row) -> str:
    kind = " class=front" if row.pareto else " class=unpriced" if row.estimate.usd is None else ""
    title = f' title="{escape(price_text(row.place.price))}"' if row.place.price else ""
    cells = "".join(f"<td{_numeric(column)}>{escape(cell)}</td>" for column, cell in enumerate(_cells(row)))
    return f"<tr{kind}{title}>{cells}</tr>"


def _numeric(column: int) -> str:
    return " class=n" if column in {5, 6, 7, 8} else ""


def _list(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return f"<h2>{title}</h2><ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1b1f24; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 8px; } h2 { font-size: 16px; margin: 28px 0 6px; }
figure { margin: 16px 0; } figure svg { width: 100%; height: auto; max-width: 940px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: #5b636e; font-weight: 600; border-bottom: 1px solid #1b1f24; }
th, td { padding: 5px 10px 5px 0; white-space: nowrap; } td { border-bottom: 1px solid #e3e6ea; }
.n { text-align: right; } .front td { font-weight: 600; } .unpriced td { color: #5b636e; }
ul { padding-left: 20px; margin: 0; color: #5b636e; font-size: 13px; overflow-wrap: anywhere; }
.note, footer { color: #5b636e; font-size: 13px; } footer { margin-top: 32px; }
"""
