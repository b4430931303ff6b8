"""What GPUs cost: the dated snapshot that comes with isthmus, with a user's own prices over it."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path

PRICES = Path(__file__).with_name("data") / "prices.csv"
TRAFFIC = Path(__file__).with_name("data") / "traffic.csv"
TIERS = ("on_demand", "spot", "low_priority", "reserved")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One machine for one hour in one region and tier."""

    backend: str
    """azure, sagemaker; ec2 and others for comparison only."""
    service: str
    sku: str
    gpu: str
    """The recipe's word."""
    gpus: int
    region: str
    tier: str
    """One of TIERS."""
    usd_per_hour: float | None
    """Of the machine with all its GPUs; None: known to exist, priced by nobody whose word we have (`unpriced`)."""
    currency: str
    unit: str
    source: str
    as_of: str
    """ISO date."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Storage or traffic: what a unit of something other than a GPU costs."""

    backend: str
    kind: str
    """storage (GB-month), egress (GB to the internet), inter_region (GB to another region of the same cloud), ..."""
    region: str
    to: str
    """Where traffic goes: internet, a region, or a zone of them."""
    from_gb: float
    """The month's amount from which this rate applies."""
    usd: float | None
    unit: str
    source: str
    as_of: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Prices and rates of one snapshot, overrides included."""

    prices: tuple[Price, ...]
    rates: tuple[Rate, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    """One line each: stale rows, and where overrides came from."""

    def find(self, backend: str, sku: str, region: str, tier: str = "on_demand") -> Price | None:
        """The row for exactly this; None when there is none. Its `usd_per_hour` may be None: unpriced."""
        for price in self.prices:
            if (price.backend, price.sku, price.region, price.tier) == (backend, sku, region, tier):
                return price
        return None

    def offers(self, gpu: str, gpus_per_node: int) -> list[Price]:
        """Every row of machines with these GPUs, cheapest first, unpriced last."""
        fits = [price for price in self.prices if price.gpu == gpu and price.gpus == gpus_per_node]
        return sorted(fits, key=lambda p: (p.usd_per_hour is None, p.usd_per_hour or 0, p.backend, p.region))

    def rate(self, backend: str, kind: str, region: str, to: str = "") -> list[Rate]:
        """The rates of a kind in a region, by the amount they start at; [] where nobody prices it."""
        found = [r for r in self.rates if (r.backend, r.kind, r.region) == (backend, kind, region)]
        return sorted((r for r in found if not to or r.to == to), key=lambda r: r.from_gb)


def load_catalog(override: Path | None = None) -> Catalog:
    """The snapshot of the package, with a user's rows over it.

    Args:
        override: a YAML or CSV file; None for $ISTHMUS_PRICES, if set.

    Raises:
        UsageError: rows that cannot be right; the message names file, row and field.
    """
    with PRICES.open(encoding="utf-8", newline="") as file:
        prices = tuple(_price(row) for row in csv.DictReader(file))
    return Catalog(prices)


def _price(row: dict[str, str]) -> Price:
    usd = row.pop("usd_per_hour")
    return Price(**{**row, "gpus": int(row["gpus"])}, usd_per_hour=float(usd) if usd else None)  # type: ignore[arg-type]
