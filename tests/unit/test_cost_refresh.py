"""Refreshing prices against a local server that pages, throttles and lies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from price_server import AZURE_ITEMS, H100, Answer, PriceServer, meter, offer, price_server, product, training

from isthmus.cost import refresh_aws, refresh_azure
from isthmus.cost.catalog import Price, Rate, load_catalog, snapshot
from isthmus.cost.refresh import Http, RefreshFailed, merge, write

TODAY = date(2026, 12, 1)


@pytest.fixture
def server() -> Iterator[PriceServer]:
    with price_server() as found:
        yield found


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def http(waits: list[float]) -> Http:
    return Http(sleep=waits.append)


def azure(http: Http, server: PriceServer, **over: Any) -> tuple[list[Price], list[Rate]]:
    return refresh_azure.fetch(http, TODAY, endpoint=f"{server.url}/api/retail/prices", **over)


def aws(http: Http, server: PriceServer) -> tuple[list[Price], list[Rate]]:
    return refresh_aws.fetch(http, TODAY, endpoint=server.url, regions=["us-west-2"])


def usd(prices: list[Price]) -> dict[tuple[str, str, str], float | None]:
    return {(price.sku, price.region, price.tier): price.usd_per_hour for price in prices}


def test_azure_s_pages_become_rows(server: PriceServer, http: Http) -> None:
    prices, rates = azure(http, server)
    assert usd(prices) == {
        (H100, "eastus", "on_demand"): 98.32,
        (H100, "eastus", "spot"): 18.169536,
        (H100, "uksouth", "on_demand"): 122.9,
        (H100, "uksouth", "spot"): 22.7119,
        (H100, "uksouth", "low_priority"): 24.58,
        # No spot where it repeats on-demand, nothing where the meter is of zero dollars.
        ("Standard_ND96isr_H200_v5", "polandcentral", "on_demand"): 130.592,
    }
    assert all((price.gpus, price.as_of) == (8, "2026-12-01") for price in prices)
    assert sum("skip" in request for request in server.requests) >= 3
    steps = {(rate.kind, rate.from_gb): rate.usd for rate in rates}
    assert steps[("storage", 512000)] == 0.019136
    assert (steps[("egress", 0)], steps[("egress", 100)], steps[("inter_region", 0)]) == (0, 0.087, 0.02)
    only, _ = azure(http, server, regions=["uksouth"])
    assert {price.region for price in only} == {"uksouth"}


def test_aws_s_files_become_rows(server: PriceServer, http: Http) -> None:
    prices, rates = aws(http, server)
    # Hosting's price is not training's; zero is a placeholder; a machine nobody knows is no row.
    assert usd(prices) == {
        ("ml.p4d.24xlarge", "us-west-2", "on_demand"): 25.251286,
        ("ml.p4de.24xlarge", "us-west-2", "on_demand"): 31.5,
        ("ml.p5.48xlarge", "us-west-2", "on_demand"): 63.296,
    }
    assert {(rate.kind, rate.to, rate.from_gb, rate.usd) for rate in rates} == {
        ("storage", "", 0, 0.023),
        ("storage", "", 51200, 0.022),
        ("egress", "internet", 0, 0),
        ("egress", "internet", 100, 0.09),
        ("inter_region", "us-east-1", 0, 0.02),
    }


def test_throttling_is_waited_out_as_asked(server: PriceServer, http: Http, waits: list[float]) -> None:
    def trouble(number: int, path: str) -> Answer | None:
        if number == 2:
            return 429, {"x-ms-ratelimit-retailprices-retry-after": "60"}, b"too many"
        return (503, {"Retry-After": "7"}, b"busy") if number == 5 else None

    quiet = usd(azure(http, server)[0])
    server.requests.clear()
    server.trouble = trouble
    assert usd(azure(http, server)[0]) == quiet
    assert waits == [60, 7]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((429, {}, b"too many"), "answered 429 .*, 5 times"),
        ((404, {}, b"gone"), "answered 404"),
        ((200, {}, b"<html>sign in</html>"), "the answer is no JSON"),
        ((200, {}, b'{"Elements": []}'), "a page has no `Items`"),
        (
            (200, {}, b'{"Items": [], "NextPageLink": "http://elsewhere.example/api"}'),
            "next page is on another host",
        ),
        ((200, {"Content-Length": "5000"}, b'{"Items": []'), "times"),
    ],
)
def test_a_broken_answer_ends_it_in_one_line(
    server: PriceServer, http: Http, answer: Answer, message: str
) -> None:
    server.trouble = lambda number, path: answer if number >= 4 else None
    with pytest.raises(RefreshFailed, match=message) as caught:
        azure(http, server)
    assert "\n" not in str(caught.value)


def test_pages_that_go_round_in_a_circle_end(server: PriceServer, http: Http) -> None:
    def trouble(number: int, path: str) -> Answer:
        return 200, {}, json.dumps({"Items": AZURE_ITEMS[:1], "NextPageLink": server.url + path}).encode()

    server.trouble = trouble
    with pytest.raises(RefreshFailed, match="round in a circle"):
        azure(http, server)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (
            meter(H100, "eastus", "ND96isrH100v5", 90.0, currencyCode="EUR"),
            "is in EUR for 1 Hour, not in USD",
        ),
        (meter(H100, "eastus", "ND96isrH100v5", 90.0, unitOfMeasure="1 Month"), "for 1 Month"),
        (meter(H100, "eastus", "ND96isrH100v5", "ask us"), "`ask us`, no number"),  # type: ignore[arg-type]
    ],
)
def test_azure_s_lies_are_refused(
    server: PriceServer, http: Http, item: dict[str, Any], message: str
) -> None:
    server.azure = [*server.azure, item]
    with pytest.raises(RefreshFailed, match=message):
        azure(http, server)


@pytest.mark.parametrize(
    ("sagemaker", "message"),
    [
        ({"formatVersion": "v2"}, "has no `products`"),
        (offer(product({"instanceName": "ml.p5.48xlarge", "component": "Training"}, ("0", "9"), currency="CNY")), "is in CNY"),
        (offer(product({"instanceName": "ml.p5.48xlarge", "component": "Training"}, ("0", "9"), ("0", "10"))), "has 2 prices"),
        (offer(product({"instanceName": "ml.p5.48xlarge", "component": "Training"}, ("0", "call"))), "is no number"),
    ],
)  # fmt: skip
def test_aws_s_lies_are_refused(
    server: PriceServer, http: Http, sagemaker: dict[str, Any], message: str
) -> None:
    server.aws = {**server.aws, "AmazonSageMaker": sagemaker}
    with pytest.raises(RefreshFailed, match=message):
        aws(http, server)


def test_a_price_that_cannot_be_right_is_refused(server: PriceServer, http: Http) -> None:
    server.aws = {**server.aws, "AmazonSageMaker": offer(training("ml.p5.48xlarge", "6329.6"))}
    with pytest.raises(
        RefreshFailed, match=r"1 rows cannot be right, the first: .* 791.2 dollars for one h100-80gb"
    ):
        merge(snapshot(), aws(http, server), TODAY)
    with pytest.raises(RefreshFailed, match="none of the machines"):
        merge(snapshot(), ([], []), TODAY)


def test_new_rows_replace_old_ones_and_the_rest_stays(
    server: PriceServer, http: Http, tmp_path: Path
) -> None:
    old = snapshot(tmp_path)
    prices, rates = merge(old, azure(http, server), TODAY)
    found = {price.key: price for price in prices}
    assert found["azure", H100, "eastus", "on_demand"].as_of == "2026-12-01"
    assert found["azure", "Standard_ND96amsr_A100_v4", "eastus", "on_demand"].as_of == "2024-09"
    # The new list's steps of an amount, not a mixture with the old ones.
    assert [rate.from_gb for rate in rates if rate.key[:3] == ("azure", "egress", "eastus")] == [
        0,
        100,
        10335,
    ]
    write(prices, Price, tmp_path / "prices.csv")
    write(rates, Rate, tmp_path / "traffic.csv")
    again = snapshot(tmp_path)
    assert {price.key: price for price in again[0]} == found
    assert again[1] == rates


def refresh(server: PriceServer, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "isthmus", "prices", "refresh", "--to", str(folder), "--region", "us-west-2",
               "--region", "eastus", "--azure-endpoint", f"{server.url}/api/retail/prices",
               "--aws-endpoint", server.url, *more]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_refresh_that_fails_half_way_leaves_what_was_there(server: PriceServer, tmp_path: Path) -> None:
    done = refresh(server, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prices"] == 5
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"prices.csv", "traffic.csv"}
    # Azure answers in full, AWS not: neither is kept.
    server.azure = [{**item, "retailPrice": item["retailPrice"] * 1.01} for item in server.azure]
    server.trouble = lambda number, path: (403, {}, b"no") if "AWSDataTransfer" in path else None
    failed = refresh(server, tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[0].endswith("answered 403 Forbidden")
    assert "Traceback" not in failed.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_estimates_read_what_was_refreshed(
    server: PriceServer, http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "isthmus" / "prices"
    prices, rates = merge(snapshot(), aws(http, server), TODAY)
    write(prices, Price, folder / "prices.csv")
    write(rates, Rate, folder / "traffic.csv")
    found = load_catalog(today=TODAY).find("sagemaker", "ml.p4de.24xlarge", "us-west-2")
    assert found is not None
    assert found.usd_per_hour == 31.5


def test_an_unknown_cloud_is_refused(server: PriceServer, tmp_path: Path) -> None:
    done = refresh(server, tmp_path, "--cloud", "gcp")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no price list of `gcp`")
