"""What a row of prices must be: refuses what public catalogs get wrong, in one line each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from math import isfinite
from typing import TYPE_CHECKING

from isthmus.cost.skus import GPU_USD_PER_HOUR, gpu_of

if TYPE_CHECKING:
    from isthmus.cost.catalog import Price, Rate

BACKENDS = ("azure", "sagemaker", "ec2", "local")
TIERS = ("on_demand", "spot", "low_priority", "reserved")
INTERRUPTIBLE = ("spot", "low_priority")
KINDS = {
    "storage": "GB-month",
    "egress": "GB",
    "inter_region": "GB",
    "read_requests": "10k",
    "write_requests": "10k",
}
CURRENCY = "USD"


def as_date(text: str) -> date | None:
    """A day, or the first of a month (`2024-09`); None of anything else."""
    try:
        return date.fromisoformat(f"{text}-01" if len(text) == 7 else text)
    except ValueError:
        return None


def price_problems(prices: Iterable[Price], today: date) -> list[str]:
    """Everything that is wrong with the rows, each with the row's name."""
    prices = list(prices)
    found = [f"{_name(price)}: {what}" for price in prices for what in _price(price, today)]
    seen: set[tuple[str, str, str, str]] = set()
    for price in prices:
        if price.key in seen:
            found.append(f"{_name(price)}: there are two rows for it")
        seen.add(price.key)
    return found + _not_below_on_demand(prices)


def _price(price: Price, today: date) -> Iterable[str]:
    yield from _common(price.backend, price.currency, price.source, price.as_of, today)
    if price.tier not in TIERS:
        yield f"tier `{price.tier}` is none of {', '.join(TIERS)}"
    if not price.sku or not price.region:
        yield "needs a sku and a region"
    if price.unit != "hour":
        yield f"unit `{price.unit}` is not hour"
    if price.gpus < (0 if price.gpu == "none" else 1):
        yield f"{price.gpus} GPUs"
    known = gpu_of(price.sku)
    if known and known != (price.gpu, price.gpus):
        yield f"says {price.gpus} x {price.gpu}; the machine has {known[1]} x {known[0]}"
    usd = price.usd_per_hour
    if usd is None or (price.gpus < 1 and price.gpu != "none"):
        return
    if not isfinite(usd) or usd <= 0:
        yield f"a price of {usd:g} dollars (leave usd_per_hour empty where nobody prices it)"
        return
    low, high = GPU_USD_PER_HOUR.get(price.gpu, (0.02, 100))
    each = usd / max(1, price.gpus)
    if not low <= each <= high:
        what = "a machine without GPUs" if price.gpu == "none" else f"one {price.gpu}"
        yield f"{each:.4g} dollars for {what} and hour is not between {low:g} and {high:g}"


def _common(backend: str, currency: str, source: str, as_of: str, today: date) -> Iterable[str]:
    if backend not in BACKENDS:
        yield f"backend `{backend}` is none of {', '.join(BACKENDS)}"
    if currency != CURRENCY:
        yield f"currency is {currency}; all rows are in {CURRENCY}, so convert it"
    if not source:
        yield "needs a source"
    day = as_date(as_of)
    if day is None:
        yield f"as_of `{as_of}` is no date such as 2026-11-30 or 2026-11"
    elif day > today:
        yield f"as_of {as_of} is in the future"


def _not_below_on_demand(prices: Sequence[Price]) -> list[str]:
    full = {price.key[:3]: price.usd_per_hour for price in prices if price.tier == "on_demand"}
    found = []
    for price in prices:
        other = full.get(price.key[:3])
        if price.tier in INTERRUPTIBLE and other and price.usd_per_hour and price.usd_per_hour >= other:
            found.append(f"{_name(price)}: {price.usd_per_hour:g} is not below on-demand's {other:g}")
    return found


def rate_problems(rates: Iterable[Rate], today: date) -> list[str]:
    """The same of storage and traffic, where a free allowance at the start is allowed."""
    found = []
    for rate in rates:
        name = f"{rate.backend} {rate.kind} {rate.region} from {rate.from_gb:g} GB"
        wrong = list(_common(rate.backend, rate.currency, rate.source, rate.as_of, today))
        if rate.kind not in KINDS:
            wrong.append(f"kind `{rate.kind}` is none of {', '.join(KINDS)}")
        elif rate.unit != KINDS[rate.kind]:
            wrong.append(f"unit `{rate.unit}` is not {KINDS[rate.kind]}")
        if rate.from_gb < 0:
            wrong.append(f"starts at {rate.from_gb:g} GB")
        if rate.usd is not None and (not isfinite(rate.usd) or rate.usd < 0 or rate.usd > 2):
            wrong.append(f"{rate.usd:g} dollars a {rate.unit}")
        if rate.usd == 0 and rate.from_gb > 0:
            wrong.append("is free beyond the allowance")
        found += [f"{name}: {what}" for what in wrong]
    return found


def _name(price: Price) -> str:
    return f"{price.backend} {price.sku} {price.region} {price.tier}"
