"""An estimate as text and as JSON."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from isthmus.cost.catalog import Price
from isthmus.cost.estimate import Estimate
from isthmus.cost.lines import Line


def estimate_json(found: Estimate) -> dict[str, Any]:
    """JSON-able; hours, US dollars, bytes as the names say. `usd` is null where nobody prices the machines."""
    place, spot = found.place, found.spot
    return {
        "recipe": found.recipe,
        **place_json(found),
        "usd": _round(found.usd),
        "usd_interval80": [_round(usd) for usd in found.usd_interval] if found.usd_interval else None,
        "hours": _round(found.hours),
        "hours_interval80": [_round(hours) for hours in found.hours_interval],
        "images": found.images,
        "usd_per_million_images": _round(found.usd_per_million_images),
        "speed": "measured" if found.measured else "estimated",
        "basis": found.basis,
        "lines": [
            {
                "group": line.group,
                "name": line.name,
                "quantity": _round(line.quantity),
                "unit": line.unit,
                "usd": _round(line.usd),
                "note": line.note,
            }
            for line in found.lines
        ],
        "by_stage": [
            {
                "name": stage.name,
                "resolution": stage.resolution,
                "images": stage.images,
                "images_per_s": _round(stage.images_per_s),
                "images_per_s_interval80": [_round(end) for end in stage.images_per_s_interval],
                "hours": _round(stage.hours),
                "usd": _round(stage.usd),
                "data_gb_per_s_per_node": _round(stage.data_gb_per_s),
                "data_limited": stage.data_limited,
                "memory_bytes": stage.memory.total if stage.memory else None,
                "memory_fits": stage.memory.fits if stage.memory else None,
            }
            for stage in found.by_stage
        ],
        "interruptions": {
            "expected": _round(found.times.interruptions),
            "mean_hours_between": _round(_finite(found.times.interruption_model.mean_h)),
            "checkpoint_interval_hours": _round(found.times.interval_h),
            "best_checkpoint_interval_hours": _round(_finite(found.times.best_interval_h)),
            "on_demand_usd": _round(spot.on_demand_usd) if spot else None,
            "break_even_per_node_hour": _round(spot.break_even) if spot else None,
        },
        "assumptions": list(found.assumptions),
        "prices": [price_json(place.price)] if place.price else [],
        "unpriced": list(found.unpriced),
        "warnings": list(found.warnings),
    }


def place_json(found: Estimate) -> dict[str, Any]:
    """Where, on what."""
    place = found.place
    return {
        "backend": place.backend,
        "region": place.region,
        "tier": place.tier,
        "sku": place.sku,
        "gpu": place.gpu,
        "nodes": place.nodes,
        "gpus_per_node": place.gpus_per_node,
        "usd_per_hour": _round(place.usd_per_hour),
    }


def price_json(price: Price) -> dict[str, Any]:
    """The row that was used."""
    return {
        "sku": price.sku,
        "region": price.region,
        "tier": price.tier,
        "usd_per_hour": price.usd_per_hour,
        "currency": price.currency,
        "unit": price.unit,
        "source": price.source,
        "as_of": price.as_of,
        "note": price.note,
    }


def estimate_text(found: Estimate) -> str:
    """A tree of lines, the totals, then what they rest on."""
    place = found.place
    kind = "process" if place.gpu == "none" else place.gpu
    rows = [
        f"{found.recipe} on {place.label} ({place.nodes * place.gpus_per_node} x {kind})",
        "",
        *_tree(found.lines),
        "",
        _total(found),
        *(f"  {line}" for line in _details(found)),
    ]
    if found.unpriced:
        rows += ["", "without a figure, so not in the total:"]
        rows += [f"  {text}" for text in found.unpriced]
    rows += ["", "rests on:"]
    rows.append(f"  speed: {found.basis}")
    rows += [f"  {text}" for text in found.assumptions]
    if place.price is not None:
        rows.append(f"  price: {price_text(place.price)}")
    return "\n".join(rows)


def price_text(price: Price) -> str:
    """The row in a line."""
    usd = "unpriced" if price.usd_per_hour is None else f"${price.usd_per_hour:,.4g}/h"
    note = f"; {price.note}" if price.note else ""
    return (
        f"{price.sku} {price.region} {price.tier} {usd}, as of {price.as_of or 'no date'}, "
        f"{price.source or 'no source'}{note}"
    )


def _tree(lines: tuple[Line, ...]) -> list[str]:
    cells: list[tuple[str, str, str, str]] = []
    for group, members in groupby(lines, key=lambda line: line.group):
        rows = list(members)
        known = [line.usd for line in rows if line.usd is not None]
        cells.append((group, "", "", dollars(sum(known)) if known else "unpriced"))
        for index, line in enumerate(rows):
            branch = "└─" if index == len(rows) - 1 else "├─"
            quantity = "?" if line.quantity is None else amount(line.quantity)
            usd = (line.note or "unpriced") if line.usd is None else dollars(line.usd)
            if line.note and line.usd is not None:
                usd = f"{usd} ({line.note})"
            cells.append((f" {branch} {line.name}", quantity, line.unit, usd))
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return [
        f"  {row[0]:{widths[0]}}  {row[1]:>{widths[1]}} {row[2]:{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in cells
    ]


def _total(found: Estimate) -> str:
    low, high = found.hours_interval
    hours = f"{amount(found.hours)} h ({amount(low)} to {amount(high)})"
    if found.usd is None or found.usd_interval is None:
        return f"  total  unpriced, {hours}"
    return (
        f"  total  {dollars(found.usd)} ({dollars(found.usd_interval[0])} to {dollars(found.usd_interval[1])}), {hours}, "
        f"${found.usd_per_million_images:,.2f} per million images"
    )


def _details(found: Estimate) -> list[str]:
    rows = []
    for stage in found.by_stage:
        limited = ", limited by the data" if stage.data_limited else ""
        memory = ""
        if stage.memory is not None:
            memory = f", {stage.memory.total / 1e9:.1f} of {stage.memory.gpu_bytes / 1e9:.0f} GB of a GPU"
        rows.append(
            f"{stage.name}: {amount(stage.images_per_s)} images/s, reads {stage.data_gb_per_s:.2g} GB/s a node"
            f"{limited}{memory}"
        )
    spot = found.spot
    if spot is not None:
        rows.append(
            f"spot: {spot.interruptions:,.1f} interruptions, one in {amount(spot.mean_h)} h; checkpoints every "
            f"{60 * spot.interval_h:,.0f} min, best every {60 * spot.best_interval_h:,.0f} min (Daly 2006)"
        )
        if spot.on_demand_usd is not None:
            even = (
                "spot costs more even without an interruption"
                if spot.break_even is None
                else f"spot is cheaper below {spot.break_even:.2g} interruptions of a node an hour"
            )
            rows.append(f"on demand {dollars(spot.on_demand_usd)} of node hours; {even}")
    return rows


def dollars(usd: float) -> str:
    """`$31,230` or `$4.12`."""
    return f"${usd:,.0f}" if abs(usd) >= 100 or usd == 0 else f"${usd:,.2f}"


def amount(number: float) -> str:
    """Three figures at least, thousands separated."""
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def _round(number: float | None) -> float | None:
    """Enough figures for any use, few enough to read."""
    return None if number is None else float(f"{number:.8g}")


def _finite(number: float) -> float | None:
    return number if number < float("inf") else None
