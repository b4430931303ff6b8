"""AWS's public price list files: SageMaker training machines, S3 storage and traffic. No account is needed.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-bulk-api.html: a file per
service and region, found through `region_index.json`. Traps: the same machine has a price per component (Training is
ours; others may differ), `instanceName` may be missing beside an `instanceType` that ends in the component, zero
dollars mean a free tier or a placeholder, and amounts of storage come in steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any
from urllib.parse import urljoin, urlsplit

from isthmus.cost.catalog import Price, Rate
from isthmus.cost.refresh import Http, RefreshFailed
from isthmus.cost.skus import SKUS

ENDPOINT = "https://pricing.us-east-1.amazonaws.com"
SOURCE = "AWS price list"
REGIONS = ("us-east-1", "us-east-2", "us-west-2", "eu-west-1", "eu-central-1", "eu-north-1", "eu-west-2")
"""Where SageMaker has the machines with eight GPUs in the US and Europe; others by `--region`."""
COMPONENT = "Training"


def fetch(
    http: Http, today: date, *, endpoint: str = ENDPOINT, regions: Sequence[str] = ()
) -> tuple[list[Price], list[Rate]]:
    """Rows of SageMaker training, S3 storage and traffic out of the regions.

    Raises:
        RefreshFailed: a file could not be had, or is not of the documented form.
    """
    prices: list[Price] = []
    rates: list[Rate] = []
    wanted = tuple(regions) or REGIONS
    for region, document in _files(http, endpoint, "AmazonSageMaker", wanted):
        prices += training_prices(document, region, today)
    for region, document in _files(http, endpoint, "AmazonS3", wanted):
        rates += storage_rates(document, region, today)
    for region, document in _files(http, endpoint, "AWSDataTransfer", wanted):
        rates += transfer_rates(document, region, today)
    return prices, rates


def _files(
    http: Http, endpoint: str, service: str, regions: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    index = http.json(f"{endpoint}/offers/v1.0/aws/{service}/current/region_index.json")
    listed = index.get("regions") if isinstance(index, dict) else None
    if not isinstance(listed, dict):
        raise RefreshFailed(f"the index of {service} has no `regions`: its form has changed", where=endpoint)
    for region in regions:
        if region not in listed:
            continue
        url = urljoin(endpoint, str(listed[region].get("currentVersionUrl", "")))
        if urlsplit(url).netloc != urlsplit(endpoint).netloc:
            raise RefreshFailed(f"the file of {region} is on another host", where=endpoint)
        document = http.json(url)
        if not isinstance(document, dict) or not isinstance(document.get("products"), dict):
            raise RefreshFailed(f"{service} of {region} has no `products`: its form has changed", where=url)
        yield region, document


def training_prices(document: Mapping[str, Any], region: str, today: date) -> list[Price]:
    """On-demand prices of training machines that isthmus knows, of one region's file."""
    found: dict[str, Price] = {}
    for product, attributes in _products(document):
        component = attributes.get("platoinstancetype") or attributes.get("component") or ""
        sku = attributes.get("instanceName") or attributes.get("instanceType", "").removesuffix(
            f"-{component}"
        )
        if component != COMPONENT or sku not in SKUS or attributes.get("regionCode", region) != region:
            continue
        # Savings and free allowances are dimensions of their own; a placeholder costs nothing.
        usd = {
            price
            for start, price, unit in _dimensions(document, product)
            if price > 0 and "Hr" in unit.title()
        }
        if not usd:
            continue
        if len(usd) > 1:
            raise RefreshFailed(f"{sku} in {region} has {len(usd)} prices: {sorted(usd)}")
        gpu, gpus = SKUS[sku]
        found[sku] = Price(
            backend="sagemaker",
            service="SageMaker",
            sku=sku,
            gpu=gpu,
            gpus=gpus,
            region=region,
            tier="on_demand",
            usd_per_hour=usd.pop(),
            currency="USD",
            unit="hour",
            source=f"{SOURCE} (AmazonSageMaker, {COMPONENT})",
            as_of=today.isoformat(),
        )
    return list(found.values())


def storage_rates(document: Mapping[str, Any], region: str, today: date) -> list[Rate]:
    """S3 Standard by amount, of one region's file."""
    rates = []
    for product, attributes in _products(document):
        if attributes.get("volumeType") == "Standard" and attributes.get("usagetype", "").endswith(
            "TimedStorage-ByteHrs"
        ):
            for start, usd, _ in _dimensions(document, product):
                rates.append(_rate("storage", region, "", start, usd, "GB-month", "AmazonS3", today))
    return rates


def transfer_rates(document: Mapping[str, Any], region: str, today: date) -> list[Rate]:
    """Traffic out of a region, to the internet and to other regions."""
    rates = []
    for product, attributes in _products(document):
        if attributes.get("fromRegionCode", region) != region:
            continue
        kind = attributes.get("transferType")
        if kind == "AWS Outbound" and attributes.get("toLocation") == "External":
            where = ("egress", "internet")
        elif kind == "InterRegion Outbound" and attributes.get("toRegionCode"):
            where = ("inter_region", attributes["toRegionCode"])
        else:
            continue
        for start, usd, _ in _dimensions(document, product):
            rates.append(_rate(where[0], region, where[1], start, usd, "GB", "AWSDataTransfer", today))
    return rates


def _rate(
    kind: str, region: str, to: str, start: float, usd: float, unit: str, service: str, today: date
) -> Rate:
    if usd == 0 and start > 0:
        raise RefreshFailed(f"{kind} in {region} is free from {start:g} GB")
    return Rate(
        backend="sagemaker",
        kind=kind,
        region=region,
        to=to,
        from_gb=start,
        usd=usd,
        currency="USD",
        unit=unit,
        source=f"{SOURCE} ({service})",
        as_of=today.isoformat(),
    )


def _products(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, str]]]:
    for sku, product in document["products"].items():
        attributes = product.get("attributes") if isinstance(product, Mapping) else None
        if isinstance(attributes, Mapping):
            yield sku, attributes


def _dimensions(document: Mapping[str, Any], product: str) -> Iterator[tuple[float, float, str]]:
    """(from amount, dollars, unit) of a product on demand."""
    terms = document.get("terms", {}).get("OnDemand", {}).get(product, {})
    for term in terms.values():
        for dimension in term.get("priceDimensions", {}).values():
            per_unit = dimension.get("pricePerUnit", {})
            if "USD" not in per_unit:
                raise RefreshFailed(
                    f"product {product} is in {', '.join(per_unit) or 'no currency'}, not in USD"
                )
            try:
                yield (
                    float(dimension.get("beginRange") or 0),
                    float(per_unit["USD"]),
                    str(dimension.get("unit", "")),
                )
            except ValueError:
                raise RefreshFailed(f"the price of product {product} is no number") from None
