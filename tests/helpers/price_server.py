"""A local server that answers as Azure's Retail Prices API and AWS's price list do: in pages, throttled, or with lies."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGE = 3
"""Items of a page; the real API has 1,000."""


def meter(
    sku: str,
    region: str,
    name: str,
    usd: float,
    product: str = "Virtual Machines NDsr H100 v5 Series",
    **over: Any,
) -> dict[str, Any]:
    """An item as the API returns it (recorded 2026-09; fields that nobody reads left out)."""
    return {
        "currencyCode": "USD", "tierMinimumUnits": 0.0, "retailPrice": usd, "unitPrice": usd, "armRegionName": region,
        "location": region, "meterName": name, "productName": product, "skuName": name, "serviceName": "Virtual Machines",
        "serviceFamily": "Compute", "unitOfMeasure": "1 Hour", "type": "Consumption", "isPrimaryMeterRegion": True,
        "armSkuName": sku, **over,
    }  # fmt: skip


H100 = "Standard_ND96isr_H100_v5"
H200 = "Standard_ND96isr_H200_v5"
AZURE_ITEMS = [
    meter(H100, "eastus", "ND96isrH100v5", 98.32),
    # Windows shares the meter's name; only the product's differs.
    meter(H100, "eastus", "ND96isrH100v5", 102.736, "Virtual Machines NDsr H100 v5 Series Windows"),
    meter(H100, "eastus", "ND96isrH100v5 Spot", 18.169536),
    meter(
        H100, "eastus", "ND96isrH100v5 Low Priority", 41.094, "Virtual Machines NDsr H100 v5 Series Windows"
    ),
    meter(H100, "uksouth", "ND96isrH100v5", 122.9),
    meter(H100, "uksouth", "ND96isrH100v5 Low Priority", 24.58),
    # Two spot meters: the market's price is the higher one. And a spot meter that is none.
    meter(H100, "uksouth", "ND96isrH100v5 Spot", 18.1),
    meter(H100, "uksouth", "ND96isrH100v5 Spot", 22.7119),
    meter(H200, "polandcentral", "ND96isrH200v5", 130.592),
    meter(H200, "polandcentral", "ND96isrH200v5 Spot", 130.592),
    meter(H200, "westus2", "ND96isrH200v5", 0.0),
]
AZURE_STORAGE = [
    meter("", "eastus", "Hot LRS Data Stored", usd, "General Block Blob v2", tierMinimumUnits=start, serviceName="Storage")
    for start, usd in ((0.0, 0.0208), (51200.0, 0.019968), (512000.0, 0.019136))
]  # fmt: skip
AZURE_TRAFFIC = [
    meter("", "eastus", "Standard Data Transfer Out", usd, "Rtn Preference: MGN", tierMinimumUnits=start)
    for start, usd in ((0.0, 0.0), (100.0, 0.087), (10335.0, 0.083))
] + [meter("", "eastus", "Standard Inter-Region Data Transfer", 0.02, "Bandwidth Inter-Region")]


def product(
    attributes: dict[str, str], *steps: tuple[str, str], unit: str = "Hrs", currency: str = "USD"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A product and its on-demand term as a price list file has them; steps: (from amount, dollars)."""
    dimensions = {
        f"S.T.{number}": {
            "beginRange": start,
            "endRange": "Inf",
            "unit": unit,
            "pricePerUnit": {currency: usd},
        }
        for number, (start, usd) in enumerate(steps)
    }
    return {"productFamily": "ML Instance", "attributes": attributes}, {
        "S.T": {"priceDimensions": dimensions}
    }


def offer(*products: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """A price list file."""
    return {
        "formatVersion": "v1.0", "publicationDate": "2026-09-01T00:00:00Z",
        "products": {f"SKU{number}": {"sku": f"SKU{number}", **p} for number, (p, _) in enumerate(products)},
        "terms": {"OnDemand": {f"SKU{number}": term for number, (_, term) in enumerate(products)}},
    }  # fmt: skip


def training(sku: str, usd: str, **over: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A training machine's product."""
    attributes = {
        "instanceName": sku, "instanceType": f"{sku}-Training", "component": "Training", "platoinstancetype": "Training",
        "regionCode": "us-west-2", "usagetype": f"USW2-Train:{sku}", **over,
    }  # fmt: skip
    return product(attributes, ("0", usd))


AWS_FILES: dict[str, dict[str, Any]] = {
    "AmazonSageMaker": offer(
        training("ml.p4d.24xlarge", "25.2512860000"),
        training("ml.p4d.24xlarge", "27.0000000000", component="Hosting", platoinstancetype="Hosting"),
        training("ml.p4de.24xlarge", "31.5000000000", instanceName=""),
        training("ml.g5.xlarge", "0.0000000000"),
        training("ml.m5.xlarge", "0.2300000000"),
        training("ml.p5.48xlarge", "63.2960000000"),
    ),
    "AmazonS3": offer(
        product({"volumeType": "Standard", "usagetype": "USW2-TimedStorage-ByteHrs"}, ("0", "0.0230000000"), ("51200", "0.0220000000"), unit="GB-Mo"),
        product({"volumeType": "Standard - Infrequent Access", "usagetype": "USW2-TimedStorage-SIA-ByteHrs"}, ("0", "0.0125"), unit="GB-Mo"),
    ),
    "AWSDataTransfer": offer(
        product({"transferType": "AWS Outbound", "fromRegionCode": "us-west-2", "toLocation": "External"}, ("0", "0"), ("100", "0.0900000000"), unit="GB"),
        product({"transferType": "InterRegion Outbound", "fromRegionCode": "us-west-2", "toRegionCode": "us-east-1"}, ("0", "0.0200000000"), unit="GB"),
        product({"transferType": "InterRegion Inbound", "fromRegionCode": "us-east-1", "toRegionCode": "us-west-2"}, ("0", "0"), unit="GB"),
    ),
}  # fmt: skip

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class PriceServer:
    """What the server answers, and what it was asked.

    Args:
        trouble: called with the number of the request (from 1) and its path; an answer of its own instead of the true
            one, or None.
    """

    url: str = ""
    requests: list[str] = field(default_factory=list)
    azure: list[dict[str, Any]] = field(default_factory=lambda: AZURE_ITEMS + AZURE_STORAGE + AZURE_TRAFFIC)
    aws: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(AWS_FILES))
    trouble: Callable[[int, str], Answer | None] = lambda number, path: None

    def answer(self, path: str) -> Answer:
        """The true answer to a path."""
        parts = urlsplit(path)
        if parts.path == "/api/retail/prices":
            return 200, {}, json.dumps(self._page(parse_qs(parts.query))).encode()
        for service, document in self.aws.items():
            base = f"/offers/v1.0/aws/{service}"
            if parts.path == f"{base}/current/region_index.json":
                version = f"{base}/20260901000000/us-west-2/index.json"
                regions = {"us-west-2": {"regionCode": "us-west-2", "currentVersionUrl": version}}
                return 200, {}, json.dumps({"regions": regions}).encode()
            if parts.path == f"{base}/20260901000000/us-west-2/index.json":
                return 200, {}, json.dumps(document).encode()
        return 404, {}, b"no such thing"

    def _page(self, query: dict[str, list[str]]) -> dict[str, Any]:
        wanted = query["$filter"][0]
        clauses = dict(clause.split(" eq ") for clause in wanted.split(" and "))
        names = {"armSkuName": "armSkuName", "meterName": "meterName", "serviceName": "serviceName"}
        items = self.azure
        if clauses.get("serviceName") == "'Bandwidth'":
            items = [item for item in items if "Transfer" in item["meterName"]]
            names.pop("serviceName")
        for clause, name in names.items():
            if clause in clauses:
                items = [item for item in items if item[name] == clauses[clause].strip("'")]
        start = int(query.get("$skip", ["0"])[0])
        more = None
        if start + PAGE < len(items):
            more = f"{self.url}/api/retail/prices?currencyCode=USD&$filter={wanted.replace(' ', '%20')}&$skip={start + PAGE}"
        return {
            "BillingCurrency": "USD",
            "Items": items[start : start + PAGE],
            "NextPageLink": more,
            "Count": PAGE,
        }


@contextmanager
def price_server() -> Iterator[PriceServer]:
    """A running server."""
    state = PriceServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append(self.path)
            status, headers, body = state.trouble(len(state.requests), self.path) or state.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
