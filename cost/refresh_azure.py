"""Azure's Retail Prices API: machines, blob storage and traffic. No account is needed.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices: an OData filter, up to 1,000
items a page, `NextPageLink`. Throttled with 429 and `x-ms-ratelimit-retailprices-retry-after`. Traps in the answers:
Windows has meters of the same name under another product; some machines have two spot meters (the higher one is
taken); a spot meter may repeat the on-demand price (dropped: no spot price); meters of zero dollars.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any
from urllib.parse import urlencode, urlsplit

from isthmus.cost.catalog import Price, Rate
from isthmus.cost.refresh import Http, RefreshFailed
from isthmus.cost.skus import SKUS

ENDPOINT = "https://prices.azure.com/api/retail/prices"
SOURCE = "Azure Retail Prices API"
MOST_PAGES = 200
MACHINES = tuple(sku for sku in SKUS if sku.startswith("Standard_"))
_STORAGE = ("General Block Blob v2", "Hot LRS Data Stored")
_EGRESS = ("Rtn Preference: MGN", "Standard Data Transfer Out")
_INTER_REGION = "Standard Inter-Region Data Transfer"


def fetch(
    http: Http, today: date, *, endpoint: str = ENDPOINT, regions: Sequence[str] = ()
) -> tuple[list[Price], list[Rate]]:
    """Every row of the machines that isthmus knows, and storage and traffic.

    Args:
        regions: only these; all where it is empty.

    Raises:
        RefreshFailed: a page could not be had, or is not of the documented form.
    """
    prices: list[Price] = []
    for sku in MACHINES:
        query = f"serviceName eq 'Virtual Machines' and armSkuName eq '{sku}' and priceType eq 'Consumption'"
        prices += machine_prices(pages(http, endpoint, query), today)
    items = list(pages(http, endpoint, f"serviceName eq 'Storage' and meterName eq '{_STORAGE[1]}'"))
    items += pages(http, endpoint, "serviceName eq 'Bandwidth' and priceType eq 'Consumption'")
    rates = traffic_rates(items, today)
    wanted = set(regions)
    return (
        [price for price in prices if not wanted or price.region in wanted],
        [rate for rate in rates if not wanted or rate.region in wanted],
    )


def pages(http: Http, endpoint: str, query: str) -> Iterator[Mapping[str, Any]]:
    """The items of all pages of a query."""
    url = f"{endpoint}?{urlencode({'currencyCode': 'USD', '$filter': query})}"
    seen: set[str] = set()
    for _ in range(MOST_PAGES):
        if url in seen:
            raise RefreshFailed("its pages go round in a circle", where=endpoint)
        seen.add(url)
        page = http.json(url)
        if not isinstance(page, dict) or not isinstance(page.get("Items"), list):
            raise RefreshFailed("a page has no `Items`: the API's form has changed", where=endpoint)
        yield from page["Items"]
        following = page.get("NextPageLink")
        if not following:
            return
        if urlsplit(following).netloc.split(":")[0] != urlsplit(endpoint).netloc.split(":")[0]:
            raise RefreshFailed("its next page is on another host", where=endpoint)
        url = following
    raise RefreshFailed(f"it has more than {MOST_PAGES} pages", where=endpoint)


def machine_prices(items: Iterator[Mapping[str, Any]], today: date) -> list[Price]:
    """Linux prices by region and tier."""
    found: dict[tuple[str, str, str, str], Price] = {}
    for item in items:
        sku, region = _text(item, "armSkuName"), _text(item, "armRegionName")
        name, product = _text(item, "meterName"), _text(item, "productName")
        if sku not in SKUS or not region or "Windows" in product or item.get("type") != "Consumption":
            continue
        if item.get("currencyCode") != "USD" or item.get("unitOfMeasure") != "1 Hour":
            currency, unit = item.get("currencyCode"), item.get("unitOfMeasure")
            raise RefreshFailed(f"{sku} in {region} is in {currency} for {unit}, not in USD for 1 Hour")
        usd = _number(item, "retailPrice")
        if usd == 0:
            continue
        tier = "on_demand"
        for ending, meaning in (("Spot", "spot"), ("Low Priority", "low_priority")):
            tier = meaning if name.endswith(ending) else tier
        gpu, gpus = SKUS[sku]
        price = Price(
            backend="azure",
            service="Azure ML / VM",
            sku=sku,
            gpu=gpu,
            gpus=gpus,
            region=region,
            tier=tier,
            usd_per_hour=usd,
            currency="USD",
            unit="hour",
            source=SOURCE,
            as_of=today.isoformat(),
        )
        before = found.get(price.key)
        if before is None or (before.usd_per_hour or 0) < usd:
            found[price.key] = price
    return [price for price in found.values() if not _no_discount(price, found)]


def _no_discount(price: Price, found: Mapping[tuple[str, str, str, str], Price]) -> bool:
    full = found.get((*price.key[:3], "on_demand"))
    if price.tier == "on_demand" or full is None or full.usd_per_hour is None:
        return False
    return (price.usd_per_hour or 0) >= full.usd_per_hour


def traffic_rates(items: Sequence[Mapping[str, Any]], today: date) -> list[Rate]:
    """Hot, locally redundant blob storage; traffic to the internet; traffic between regions."""
    found: dict[tuple[str, str, str, str, float], Rate] = {}
    for item in items:
        meter, region = (_text(item, "productName"), _text(item, "meterName")), _text(item, "armRegionName")
        if meter == _STORAGE:
            kind, to, unit = "storage", "", "GB-month"
        elif meter == _EGRESS:
            kind, to, unit = "egress", "internet", "GB"
        elif meter[1] == _INTER_REGION:
            kind, to, unit = "inter_region", "", "GB"
        else:
            continue
        if not region or item.get("currencyCode") != "USD" or item.get("type") != "Consumption":
            continue
        usd, start = _number(item, "retailPrice"), _number(item, "tierMinimumUnits")
        if usd == 0 and start > 0:
            raise RefreshFailed(f"{kind} in {region} is free from {start:g} GB")
        rate = Rate(
            backend="azure",
            kind=kind,
            region=region,
            to=to,
            from_gb=start,
            usd=usd,
            currency="USD",
            unit=unit,
            source=SOURCE,
            as_of=today.isoformat(),
        )
        found[rate.key] = rate
    return list(found.values())


def _text(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name) if isinstance(item, Mapping) else None
    return value if isinstance(value, str) else ""


def _number(item: Mapping[str, Any], name: str) -> float:
    try:
        return float(item.get(name, 0))
    except (TypeError, ValueError):
        raise RefreshFailed(
            f"{name} of {_text(item, 'meterName')} is `{item.get(name)}`, no number"
        ) from None
