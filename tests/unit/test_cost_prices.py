"""The snapshot of prices: what it holds, what it refuses, a team's own rows over it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from isthmus.cost.catalog import Catalog, Price, Rate, load_catalog
from isthmus.cost.integrity import as_date, price_problems, rate_problems
from isthmus.cost.skus import GPU_USD_PER_HOUR, SKUS
from isthmus.errors import UsageError

TODAY = date(2026, 12, 1)


@pytest.fixture(autouse=True)
def _no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ISTHMUS_PRICES", raising=False)


@pytest.fixture
def catalog() -> Catalog:
    return load_catalog(today=TODAY)


def test_the_snapshot_is_in_order(catalog: Catalog) -> None:
    assert price_problems(catalog.prices, TODAY) == []
    assert rate_problems(catalog.rates, TODAY) == []
    assert len(catalog.prices) > 150
    for price in catalog.prices:
        assert price.currency == "USD"
        assert as_date(price.as_of)
        assert price.gpu in GPU_USD_PER_HOUR
        # What has a figure says where it is from; what has none says so.
        assert (price.source == "none") <= (price.usd_per_hour is None)
        assert price.usd_per_hour is not None or price.note


def test_the_machines_of_the_issue_are_all_there(catalog: Catalog) -> None:
    skus = {price.sku for price in catalog.prices}
    for sku in (
        "Standard_ND96amsr_A100_v4", "Standard_ND96asr_v4", "Standard_NC96ads_A100_v4", "Standard_ND96isr_H100_v5",
        "Standard_ND96isr_H200_v5", "ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.48xlarge", "ml.p5e.48xlarge",
        "ml.p5en.48xlarge", "ml.p6-b200.48xlarge", "ml.g5.48xlarge", "ml.g6.48xlarge", "ml.g6e.48xlarge",
    ):  # fmt: skip
        assert sku in skus, sku
    tiers = {price.tier for price in catalog.prices}
    assert tiers == {"on_demand", "spot", "low_priority", "reserved"}
    kinds = {"storage", "egress", "inter_region", "read_requests", "write_requests"}
    assert {rate.kind for rate in catalog.rates} == kinds


def test_the_backends_have_the_same_machines() -> None:
    """Their tables and this one are written apart: each GPU and count must agree."""
    from isthmus.backends.azure.skus import SKUS as AZURE
    from isthmus.backends.sagemaker.skus import SKUS as SAGEMAKER

    tables = [*(AZURE.values() if isinstance(AZURE, dict) else AZURE)]
    tables += [*(SAGEMAKER.values() if isinstance(SAGEMAKER, dict) else SAGEMAKER)]
    checked = 0
    for sku in tables:
        if sku.name in SKUS and sku.gpu != "none":
            assert SKUS[sku.name] == (sku.gpu, sku.gpus), sku.name
            checked += 1
    assert checked >= 15


def test_what_nobody_prices_is_a_row_and_never_a_guess(catalog: Catalog) -> None:
    italy = catalog.find("azure", "Standard_ND96amsr_A100_v4", "italynorth")
    assert italy is not None
    assert italy.usd_per_hour is None
    assert "refresh" in italy.note
    p4de = catalog.find("sagemaker", "ml.p4de.24xlarge", "us-west-2")
    assert p4de is not None
    assert p4de.usd_per_hour is None
    assert "EC2" in p4de.note
    assert catalog.find("azure", "Standard_ND96amsr_A100_v4", "atlantis") is None
    offers = catalog.offers("a100-80gb", 8)
    assert offers[-1].usd_per_hour is None
    priced = [price.usd_per_hour for price in offers if price.usd_per_hour is not None]
    assert priced == sorted(priced)
    assert catalog.offers("a100-80gb", 3) == []


def test_prices_that_are_known(catalog: Catalog) -> None:
    for backend, sku, region, usd in (
        ("azure", "Standard_ND96amsr_A100_v4", "eastus", 32.77),
        ("azure", "Standard_ND96isr_H100_v5", "uksouth", 122.9),
        ("sagemaker", "ml.p4d.24xlarge", "us-west-2", 25.251286),
        ("ec2", "p5.48xlarge", "us-east-1", 55.04),
    ):
        found = catalog.find(backend, sku, region)
        assert found is not None
        assert found.usd_per_hour == usd
    egress = catalog.rate("azure", "egress", "eastus", "internet")
    assert [rate.from_gb for rate in egress] == sorted(rate.from_gb for rate in egress)
    assert (egress[0].usd, egress[1].usd) == (0, 0.087)
    assert catalog.rate("azure", "egress", "atlantis") == []


def test_old_rows_say_how_old(catalog: Catalog) -> None:
    old = catalog.find("azure", "Standard_ND96amsr_A100_v4", "eastus")
    assert old is not None
    assert "27 months old (2024-09)" in (old.stale(TODAY) or "")
    fresh = catalog.find("sagemaker", "ml.p5.48xlarge", "us-west-2")
    assert fresh is not None
    assert fresh.stale(TODAY) is None
    assert fresh.age_days(TODAY) == 91


GOOD = Price(
    backend="azure", service="VM", sku="Standard_ND96isr_H100_v5", gpu="h100-80gb", gpus=8, region="eastus",
    tier="on_demand", usd_per_hour=98.32, currency="USD", unit="hour", source="a list", as_of="2026-09-16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"usd_per_hour": 0.0}, "a price of 0 dollars"),
        ({"usd_per_hour": -3.0}, "a price of -3 dollars"),
        ({"usd_per_hour": float("nan")}, "a price of nan dollars"),
        ({"gpus": 12}, "says 12 x h100-80gb; the machine has 8 x h100-80gb"),
        ({"gpus": 0}, "0 GPUs"),
        ({"usd_per_hour": 1.0}, "0.125 dollars for one h100-80gb and hour is not between 0.5 and 35"),
        ({"usd_per_hour": 9832.0}, "is not between"),
        (
            {"sku": "x", "gpu": "none", "gpus": 0, "usd_per_hour": 200.0},
            "200 dollars for a machine without GPUs",
        ),
        ({"currency": "EUR"}, "currency is EUR"),
        ({"as_of": "2027-01-01"}, "as_of 2027-01-01 is in the future"),
        ({"as_of": "last week"}, "is no date"),
        ({"source": ""}, "needs a source"),
        ({"tier": "cheap"}, "tier `cheap` is none of"),
        ({"unit": "month"}, "unit `month` is not hour"),
        ({"region": ""}, "needs a sku and a region"),
        ({"backend": "gcp"}, "backend `gcp` is none of"),
    ],
)
def test_what_public_catalogs_get_wrong_is_refused(change: dict[str, object], message: str) -> None:
    assert price_problems([GOOD], TODAY) == []
    found, *_ = price_problems([replace(GOOD, **change)], TODAY)  # type: ignore[arg-type]
    assert message in found


def test_a_machine_without_gpus_may_be_priced() -> None:
    assert (
        price_problems([replace(GOOD, sku="Standard_D4ds_v5", gpu="none", gpus=0, usd_per_hour=0.3)], TODAY)
        == []
    )


def test_spot_must_be_below_on_demand_and_rows_unique() -> None:
    same = replace(GOOD, tier="spot")
    (found,) = price_problems([GOOD, same], TODAY)
    assert "98.32 is not below on-demand's 98.32" in found
    assert price_problems([GOOD, replace(same, usd_per_hour=None)], TODAY) == []
    (twice,) = price_problems([GOOD, GOOD], TODAY)
    assert "two rows" in twice


def test_rates_may_begin_free_but_not_end_so() -> None:
    rate = Rate(
        backend="azure", kind="egress", region="eastus", to="internet", from_gb=0, usd=0.0, currency="USD", unit="GB",
        source="a list", as_of="2026-09",
    )  # fmt: skip
    assert rate_problems([rate], TODAY) == []
    assert "free beyond" in rate_problems([replace(rate, from_gb=100)], TODAY)[0]
    assert "kind `lunch`" in rate_problems([replace(rate, kind="lunch")], TODAY)[0]
    assert "-1 dollars" in rate_problems([replace(rate, usd=-1.0)], TODAY)[0]


OWN_YAML = """\
prices:
  - {backend: azure, sku: Standard_ND96amsr_A100_v4, region: italynorth, usd_per_hour: 27.5, note: agreement}
  - {backend: azure, sku: Standard_ND96amsr_A100_v4, region: eastus, usd_per_hour: 20}
  - {backend: azure, kind: egress, region: italynorth, to: internet, usd: 0.05}
"""


def test_own_rows_replace_and_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(OWN_YAML, "utf-8")
    for found in (load_catalog(own, today=TODAY), _by_variable(own, monkeypatch)):
        italy = found.find("azure", "Standard_ND96amsr_A100_v4", "italynorth")
        assert italy is not None
        assert (italy.usd_per_hour, italy.gpus, italy.gpu) == (27.5, 8, "a100-80gb")
        assert italy.source == "own prices (own.yaml)"
        eastus = found.find("azure", "Standard_ND96amsr_A100_v4", "eastus")
        assert eastus is not None
        assert eastus.usd_per_hour == 20
        assert found.find("azure", "Standard_ND96amsr_A100_v4", "southcentralus") is not None
        (rate,) = found.rate("azure", "egress", "italynorth")
        assert rate.usd == 0.05
        assert found.warnings == (f"3 rows are from {own}",)


def _by_variable(path: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    monkeypatch.setenv("ISTHMUS_PRICES", str(path))
    return load_catalog(today=TODAY)


def test_own_rows_may_be_csv(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text(
        "backend,sku,region,tier,usd_per_hour\nsagemaker,ml.p4de.24xlarge,us-west-2,reserved,22.5\n", "utf-8"
    )
    found = load_catalog(own, today=TODAY).find("sagemaker", "ml.p4de.24xlarge", "us-west-2", "reserved")
    assert found is not None
    assert found.usd_per_hour == 22.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: 3", "must be a list of rows"),
        ("[{backend: azure", "is no YAML"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, region: eastus, usd_per_hour: -5}", "a price of -5 dollars"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, region: eastus, usd_per_hour: cheap}", "`cheap` is no number"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, region: eastus, usd_per_hour: 5, curency: USD}", "no field `curency`"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, region: eastus, usd_per_hour: 20, currency: EUR}", "currency is EUR"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, usd_per_hour: 20}", "needs `region`"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, region: eastus, usd_per_hour: 20, as_of: 2030-01-01}", "in the future"),
        ("- {backend: azure, sku: Standard_Huge, region: eastus, usd_per_hour: 20}", "gpus must be a whole number"),
        ("- {backend: azure, sku: Standard_ND96asr_v4, region: eastus, tier: spot, usd_per_hour: 30}", "not below on-demand"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_own_prices_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=message) as caught:
        load_catalog(own, today=TODAY)
    assert "own.yaml" in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file of prices"):
        load_catalog(tmp_path / "nowhere.csv")


def test_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from isthmus.cli.prices import check, show

    show(gpu="a100-80gb", region="italy", backend=None, traffic=False, prices=None, as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["usd_per_hour"] is None
    show(gpu="h100-80gb", region=None, backend="azure", traffic=False, prices=None, as_json=False)
    shown = capsys.readouterr().out
    assert "unpriced" in shown
    assert "(old)" in shown
    show(gpu=None, region="eastus", backend="azure", traffic=True, prices=None, as_json=False)
    assert "egress to internet from 100 GB: $0.087 a GB" in capsys.readouterr().out
    check(prices=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["wrong"] == []
    for over, message in (
        ({"gpu": "v5p"}, "nobody prices the GPU `v5p`"),
        ({"region": "mars"}, "no row is like that"),
    ):
        with pytest.raises(UsageError, match=message):
            show(
                **{
                    "gpu": None,
                    "region": None,
                    "backend": None,
                    "traffic": False,
                    "prices": None,
                    "as_json": False,
                    **over,
                }
            )  # type: ignore[arg-type]
