"""What GPUs cost: the dated snapshot that comes with isthmus, with a user's own prices over it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from isthmus.cost.integrity import CURRENCY, TIERS, as_date, price_problems, rate_problems
from isthmus.cost.price_files import read_rows, row_price, row_rate
from isthmus.errors import UsageError

__all__ = ["CURRENCY", "TIERS", "Catalog", "Price", "Rate", "load_catalog"]

PRICES = Path(__file__).with_name("data") / "prices.csv"
TRAFFIC = Path(__file__).with_name("data") / "traffic.csv"
OVERRIDE_VARIABLE = "ISTHMUS_PRICES"
STALE_DAYS = 180
"""Older rows are said to be old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One machine for one hour in one region and tier."""

    backend: str
    """azure, sagemaker; ec2 for comparison only: its prices are not SageMaker's."""
    service: str
    sku: str
    gpu: str
    """The recipe's word."""
    gpus: int
    region: str
    tier: str
    """One of TIERS."""
    usd_per_hour: float | None
    """Of the machine with all its GPUs; None: it is there, and nobody whose word we have prices it (`unpriced`)."""
    currency: str
    unit: str
    source: str
    as_of: str
    """A date, or a month."""
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What there is one row of."""
        return self.backend, self.sku, self.region, self.tier

    def age_days(self, today: date | None = None) -> int:
        """Days since `as_of`, at the most."""
        return ((today or date.today()) - (as_date(self.as_of) or date.min)).days

    def stale(self, today: date | None = None) -> str | None:
        """A warning where the row is priced and older than STALE_DAYS."""
        days = self.age_days(today)
        if self.usd_per_hour is None or days <= STALE_DAYS:
            return None
        name = f"{self.sku} in {self.region} ({self.tier})"
        return f"the price of {name} is {days / 30.4:.0f} months old ({self.as_of}); `isthmus prices refresh`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Storage or traffic: what a unit of something other than a GPU costs."""

    backend: str
    kind: str
    """storage (GB-month), egress (GB to the internet), inter_region (GB to another region of the same cloud),
    read_requests and write_requests (10k: ten thousand of the object store's requests)."""
    region: str
    to: str
    """Where traffic goes: internet, a region, or nothing: anywhere."""
    from_gb: float
    """The month's amount from which this rate applies."""
    usd: float | None
    """None: nobody prices it."""
    currency: str
    unit: str
    source: str
    as_of: str
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, float]:
        """What there is one row of."""
        return self.backend, self.kind, self.region, self.to, self.from_gb


Row = TypeVar("Row", Price, Rate)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Prices and rates of one snapshot, overrides included."""

    prices: tuple[Price, ...]
    rates: tuple[Rate, ...] = ()
    warnings: tuple[str, ...] = field(default=())
    """One line each: where overrides came from. A row's own age: :meth:`Price.stale`."""

    def find(self, backend: str, sku: str, region: str, tier: str = "on_demand") -> Price | None:
        """The row for exactly this; None when there is none. Its `usd_per_hour` may be None: unpriced."""
        wanted = (backend, sku, region, tier)
        return next((price for price in self.prices if price.key == wanted), None)

    def offers(self, gpu: str, gpus_per_node: int) -> list[Price]:
        """Every row of machines with these GPUs, cheapest first, unpriced last."""
        fits = [price for price in self.prices if price.gpu == gpu and price.gpus == gpus_per_node]
        return sorted(
            fits, key=lambda p: (p.usd_per_hour is None, p.usd_per_hour or 0.0, p.backend, p.region, p.sku)
        )

    def rate(self, backend: str, kind: str, region: str, to: str = "") -> list[Rate]:
        """The rates of a kind in a region, by the amount they start at; [] where there is not even an unpriced row."""
        found = [rate for rate in self.rates if rate.key[:3] == (backend, kind, region)]
        return sorted((rate for rate in found if not to or rate.to == to), key=lambda rate: rate.from_gb)


def load_catalog(override: Path | None = None, *, today: date | None = None) -> Catalog:
    """The snapshot of the package, with a user's rows over it.

    Args:
        override: a YAML or CSV file of rows that replace those of the same backend, SKU, region and tier, or come
            beside them; None for the file that $ISTHMUS_PRICES names, if it is set.
        today: for tests.

    Raises:
        UsageError: no such file, or rows that cannot be right; the message names file and row.
    """
    today = today or date.today()
    prices, rates = snapshot()
    path = override or (Path(named) if (named := os.environ.get(OVERRIDE_VARIABLE)) else None)
    if path is None:
        return Catalog(tuple(prices), tuple(rates))
    own_prices, own_rates = _own(path, today)
    over: tuple[str, ...] = (f"{len(own_prices) + len(own_rates)} rows are from {path}",)
    merged = tuple(_over(prices, own_prices)), tuple(_over(rates, own_rates))
    # The package's own rows may be newer than a clock that is wrong; they are not this file's fault.
    newest = max([today, *(day for price in prices if (day := as_date(price.as_of)))])
    wrong = price_problems(merged[0], newest)
    if wrong:
        raise _refused(path, wrong)
    return Catalog(*merged, over)


def snapshot_folder() -> Path:
    """Where `isthmus prices refresh` keeps what it fetched: with the rest of this machine's state, see `backends/runs.py`."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "isthmus" / "prices"


def snapshot(folder: Path | None = None) -> tuple[list[Price], list[Rate]]:
    """The rows that `prices refresh` wrote, or else those of the package.

    Args:
        folder: where refreshed ones are; None for `snapshot_folder()`.
    """
    folder = folder or snapshot_folder()
    prices, traffic = folder / PRICES.name, folder / TRAFFIC.name
    return read_snapshot(prices if prices.is_file() else PRICES, traffic if traffic.is_file() else TRAFFIC)


def read_snapshot(prices: Path, traffic: Path) -> tuple[list[Price], list[Rate]]:
    """The rows of two CSV files in the package's form; not checked, see `isthmus prices check`."""
    return (
        [row_price(row, where) for where, row in read_rows(prices)],
        [row_rate(row, where) for where, row in read_rows(traffic)],
    )


def _own(path: Path, today: date) -> tuple[list[Price], list[Rate]]:
    prices, rates = [], []
    for where, row in read_rows(path):
        filled = {"as_of": today.isoformat(), "source": f"own prices ({path.name})", **row}
        if "kind" in row:
            rates.append(row_rate(filled, where))
        else:
            prices.append(row_price(filled, where))
    wrong = price_problems(prices, today) + rate_problems(rates, today)
    if wrong:
        raise _refused(path, wrong)
    return prices, rates


def _refused(path: Path, wrong: Sequence[str]) -> UsageError:
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return UsageError(f"{wrong[0]}{more}", where=str(path), hint="docs/cost.md says what a prices file holds")


def _over(rows: Iterable[Row], own: Iterable[Row]) -> list[Row]:
    replaced: dict[Any, Row] = {row.key: row for row in own}
    kept: list[Row] = [row for row in rows if row.key not in replaced]
    kept.extend(replaced.values())
    return kept
