"""Comparing every offer of both clouds: on the package's own snapshot, and on made-up ones where the answer is known."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.catalog import Catalog, Price, Rate, load_catalog
from isthmus.cost.compare import Comparison, Wish, compare
from isthmus.cost.compare_page import comparison_json, comparison_page, comparison_text
from isthmus.cost.lines import Dataset
from isthmus.cost.measured import Measurement, StageSpeed, speed_key
from isthmus.errors import UsageError

ND, H100, P4D, P4DE = (
    "Standard_ND96amsr_A100_v4",
    "Standard_ND96isr_H100_v5",
    "ml.p4d.24xlarge",
    "ml.p4de.24xlarge",
)


def price(usd: float | None, **changes: Any) -> Price:
    values: dict[str, Any] = {
        "backend": "azure", "service": "a cloud", "sku": ND, "gpu": "a100-80gb", "gpus": 8, "region": "eastus",
        "tier": "on_demand", "usd_per_hour": usd, "currency": "USD", "unit": "hour", "source": "a test", "as_of": "2026-11-01",
    }  # fmt: skip
    return Price(**values | changes)


CATALOG = Catalog(
    prices=(
        price(32.0),
        price(30.0, region="swedencentral"),
        price(90.0, sku=H100, gpu="h100-80gb"),
        price(None, region="italynorth"),
        price(25.0, backend="sagemaker", sku=P4D, gpu="a100-40gb", region="us-west-2"),
        price(None, backend="sagemaker", sku=P4DE, region="us-east-1"),
        price(3.0, sku="Standard_NC24ads_A100_v4", gpus=1),
        price(20.0, backend="sagemaker", sku="ml.g5.48xlarge", gpu="a10g-24gb", region="us-west-2"),
        price(50.0, backend="ec2", sku="p5.48xlarge", gpu="h100-80gb", region="us-east-1"),
    )
)


def sdxl(*overrides: str) -> Recipe:
    return load_recipe("sdxl-progressive", ["compute.offers=[]", *overrides]).recipe


def labels(found: Comparison) -> list[tuple[str, str, str]]:
    return [(row.place.sku, row.place.region, row.place.tier) for row in found.rows]


def test_every_machine_that_fits_is_there_and_no_other() -> None:
    found = compare(sdxl(), CATALOG)
    assert sorted(labels(found)) == sorted(
        [
            (ND, "eastus", "on_demand"), (ND, "swedencentral", "on_demand"), (ND, "italynorth", "on_demand"),
            (H100, "eastus", "on_demand"), (P4D, "us-west-2", "on_demand"), (P4DE, "us-east-1", "on_demand"),
            ("ml.g5.48xlarge", "us-west-2", "on_demand"),
        ]
    )  # fmt: skip
    assert all(row.place.nodes == 16 for row in found.rows)
    # Not EC2, whose prices are not SageMaker's; not machines of another number of GPUs.
    assert {row.place.backend for row in found.rows} == {"azure", "sagemaker"}


def test_priced_offers_come_first_the_cheapest_before_the_others() -> None:
    found = compare(sdxl(), CATALOG)
    usd = [row.estimate.usd for row in found.rows]
    known = [value for value in usd if value is not None]
    assert usd == [*sorted(known), None, None]
    assert [row.cheapest for row in found.rows] == [True] + [False] * 6
    fastest = min(row.estimate.hours for row in found.rows)
    assert [row.estimate.hours for row in found.rows if row.fastest] == [fastest]


def test_the_pareto_front_is_what_nothing_beats_in_both() -> None:
    found = compare(sdxl(), CATALOG)
    priced = [row for row in found.rows if row.estimate.usd is not None]
    for row in priced:
        beaten = [
            other
            for other in priced
            if (other.estimate.usd or 0) < (row.estimate.usd or 0)
            and other.estimate.hours < row.estimate.hours
        ]
        assert row.pareto == (not beaten)
    assert not any(row.pareto for row in found.rows if row.estimate.usd is None)


def test_a_model_that_does_not_fit_leaves_a_gpu_out_and_says_how_it_would() -> None:
    found = compare(sdxl("parallel.strategy=ddp"), CATALOG)
    assert "a10g-24gb" not in {row.place.gpu for row in found.rows}
    assert sum(text.startswith("a100-40gb: stage 256px needs 5") for text in found.left_out) == 1
    assert any("fits with parallel.strategy=fsdp" in text for text in found.left_out)
    with pytest.raises(UsageError, match="no offer has enough memory"):
        compare(sdxl("parallel.strategy=ddp"), CATALOG, Wish(gpus=("a10g-24gb",)))


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        (Wish(regions=("eu",)), {"swedencentral", "italynorth"}),
        (Wish(regions=("us",), backends=("sagemaker",)), {"us-west-2", "us-east-1"}),
        (Wish(regions=("eastus",)), {"eastus"}),
        (Wish(gpus=("h100-80gb",)), {"eastus"}),
        (Wish(tiers=("on_demand",), gpus=("a100-40gb",)), {"us-west-2"}),
    ],
)
def test_filters(wish: Wish, wanted: set[str]) -> None:
    assert {row.place.region for row in compare(sdxl(), CATALOG, wish).rows} == wanted


def test_caps_leave_out_what_is_over_them_and_never_what_nobody_prices() -> None:
    everything = compare(sdxl(), CATALOG)
    middle = everything.rows[2].estimate
    assert middle.usd is not None
    found = compare(sdxl(), CATALOG, Wish(max_usd=middle.usd))
    assert len(found.rows) == 3 + 2
    assert found.left_out == ("2 offers cost more than " + f"${middle.usd:,.0f}",)
    quick = compare(sdxl(), CATALOG, Wish(deadline_h=everything.rows[0].estimate.hours))
    assert all(row.estimate.hours <= everything.rows[0].estimate.hours for row in quick.rows)


def test_the_table_is_not_filled_by_what_nobody_prices() -> None:
    regions = [f"region{at:02}" for at in range(12)]
    catalog = Catalog(prices=(*CATALOG.prices, *(price(None, region=region) for region in regions)))
    recipe = sdxl("compute.offers=[{backend: azure, region: region11, tier: on_demand}]")
    found = compare(recipe, catalog, Wish(max_usd=1e9))
    unpriced = sum(row.estimate.usd is None for row in found.rows)
    assert unpriced == 14
    text = comparison_text(found, 20)
    assert text.count("  unpriced  ") == 6
    assert "region11" in text
    assert "region10" not in text
    assert "shown 6 of 14 offers that nobody prices" in text
    assert comparison_text(found).count("  unpriced  ") == 14
    alone = comparison_text(compare(sdxl(), Catalog(prices=(price(None), *catalog.prices[-12:])), Wish()), 20)
    assert alone.count("  unpriced  ") == 13
    assert "shown" not in alone


def test_a_place_that_is_asked_for_by_name_is_there_without_a_price() -> None:
    found = compare(sdxl(), CATALOG, Wish(regions=("norwayeast",)))
    assert {(row.place.sku, row.estimate.usd) for row in found.rows} == {(ND, None), (H100, None)}
    named = "compute.offers=[{backend: azure, region: norwayeast, tier: spot}]"
    offered = compare(sdxl(named), CATALOG)
    assert (ND, "norwayeast", "spot") in labels(offered)


def test_an_offer_is_not_the_cheapest_because_nobody_prices_its_storage() -> None:
    storage = Rate(
        backend="azure", kind="storage", region="eastus", to="", from_gb=0.0, usd=100.0, currency="USD", unit="GB-month",
        source="a test", as_of="2026-11-01",
    )  # fmt: skip
    two = Catalog(prices=(price(32.0), price(33.0, region="westus2")), rates=(storage,))
    found = compare(sdxl(), two)
    assert (found.rows[0].estimate.usd or 0) > (found.rows[1].estimate.usd or 0)
    assert [row.place.region for row in found.rows] == ["eastus", "westus2"]
    assert [row.cheapest for row in found.rows] == [True, False]
    assert found.rows[1].incomplete == ("storage",)
    text = comparison_text(found)
    assert "+ without storage, which nobody prices there; offers are ranked without storage" in text


def test_moving_the_data_makes_the_other_cloud_dearer() -> None:
    egress = Rate(
        backend="azure", kind="egress", region="eastus", to="internet", from_gb=0.0, usd=0.08, currency="USD", unit="GB",
        source="a test", as_of="2026-11-01",
    )  # fmt: skip
    catalog = replace(CATALOG, rates=(egress,))
    plain = compare(sdxl(), catalog, Wish(gpus=("a100-40gb",)))
    moved = compare(
        sdxl(),
        catalog,
        Wish(gpus=("a100-40gb",)),
        data=Dataset(gigabytes=10_000, lies_in=("azure", "eastus")),
    )
    assert (moved.rows[0].estimate.usd or 0) - (plain.rows[0].estimate.usd or 0) == pytest.approx(800)


def test_a_measured_speed_replaces_the_estimated_one_on_the_same_machines_only() -> None:
    recipe = sdxl()
    stages = tuple(
        StageSpeed(
            stage=index, resolution=stage.resolution, global_batch_size=stage.global_batch_size,
            images_per_s=1e4, low=9e3, high=1.1e4, steps=20,
        )
        for index, stage in enumerate(recipe.stages)
    )  # fmt: skip
    known = Measurement(
        key=speed_key(recipe), recipe=recipe.name, backend="azure", region="eastus", sku=ND, nodes=16, gpus_per_node=8,
        gpu="a100-80gb", stages=stages, start_s=100, checkpoint_stall_s=1, first_validation_s=30, validation_s=20, end_s=60,
        seconds=600, time=0.0, run_uri="there",
    )  # fmt: skip
    found = compare(recipe, CATALOG, measured=[known])
    told = {row.place.sku: row.estimate.measured is not None for row in found.rows}
    assert told == {ND: True, H100: False, P4D: False, P4DE: False, "ml.g5.48xlarge": False}
    assert "measured" in comparison_text(found)


def test_the_case_studies_own_case_is_one_table() -> None:
    """16 nodes of 8 A100-80GB: Italy North, the US and Europe on Azure; ml.p4de and p4d on SageMaker."""
    recipe = load_recipe("sdxl-progressive").recipe
    found = compare(recipe, load_catalog(), Wish(gpus=("a100-80gb", "a100-40gb")))
    places = {(row.place.backend, row.place.sku, row.place.region, row.place.tier) for row in found.rows}
    assert ("azure", ND, "italynorth", "on_demand") in places
    assert ("azure", ND, "italynorth", "spot") in places
    assert ("azure", ND, "eastus", "on_demand") in places
    assert {sku for _, sku, _, _ in places} >= {ND, P4D, P4DE}
    regions = {region for backend, sku, region, _ in places if backend == "azure" and sku == ND}
    assert len(regions & {"swedencentral", "westeurope", "francecentral", "uksouth"}) >= 2
    text = comparison_text(found)
    italy = [line for line in text.splitlines() if "italynorth" in line]
    assert italy
    for line in italy:
        # Priced with its source some day, or unpriced; never without a word.
        assert "unpriced" in line or "$" in line
    if any("unpriced" in line for line in italy):
        assert "give --prices FILE with a row: backend" in text
    eastus = next(row for row in found.rows if (row.place.sku, row.place.region) == (ND, "eastus"))
    assert eastus.place.price is not None
    assert eastus.place.price.source
    assert eastus.place.price.as_of


def test_all_offers_take_less_than_a_second_and_come_out_the_same() -> None:
    recipe, catalog = load_recipe("sdxl-progressive").recipe, load_catalog()
    compare(recipe, catalog, Wish(regions=("us",)))  # files are read, modules imported
    begun = time.perf_counter()
    first = compare(recipe, catalog)
    assert time.perf_counter() - begun < 1
    assert len(first.rows) > 30
    again = compare(load_recipe("sdxl-progressive").recipe, load_catalog())
    assert json.dumps(comparison_json(first)) == json.dumps(comparison_json(again))


def test_the_page_needs_nothing_else_and_escapes(tmp_path: Path) -> None:
    hostile = replace(CATALOG.prices[0], source="<script>alert(1)</script>")
    found = compare(sdxl(), replace(CATALOG, prices=(hostile, *CATALOG.prices[1:])))
    page = comparison_page(found, written="2026-11-30")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "default-src 'none'" in page
    assert page.count("<circle") >= 5
    assert page.count("<tr") == 1 + len(found.rows)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (Wish(regions=("italynort",)), "no region 'italynort' (did you mean italynorth?)"),
        (Wish(gpus=("a100",)), "--gpu: no GPU 'a100'"),
        (Wish(regions=("africa",)), "no cloud offers a machine with 8 GPUs that fits these filters"),
    ],
)
def test_wishes_that_cannot_be_are_one_clear_line(wish: Wish, message: str) -> None:
    with pytest.raises(UsageError) as error:
        compare(sdxl(), CATALOG, wish)
    assert message in str(error.value)


def isthmus(folder: Path, *words: str) -> tuple[int, str, str]:
    """The command in a process of its own, with no state and no prices of ours."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "isthmus", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_the_commands_print_tables_json_charts_and_a_page(tmp_path: Path) -> None:
    where = ("--backend", "azure", "--region", "eastus", "--tier", "on_demand")
    code, out, _ = isthmus(tmp_path, "cost", "sdxl-progressive", *where, "--chart", "costs.svg")
    assert code == 0
    assert "total  $" in out
    assert "per million images" in out
    assert (tmp_path / "costs.svg").read_text().startswith("<svg")
    code, out, _ = isthmus(tmp_path, "cost", "sdxl-progressive", *where, "--json", "--chart", "costs.png")
    assert json.loads(out)["prices"][0]["sku"] == ND
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = isthmus(
        tmp_path, "compare", "sdxl-progressive", "--region", "eu", "--json", "--html", "page.html"
    )
    assert code == 0
    assert {offer["priced"] for offer in json.loads(out)["offers"]} == {True, False}
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_unpriced_machines_exit_with_2_and_say_how_to_price_them(tmp_path: Path) -> None:
    where = ("--backend", "sagemaker", "--sku", P4DE, "--region", "us-east-1", "--tier", "on_demand")
    code, out, err = isthmus(tmp_path, "cost", "sdxl-progressive", *where)
    assert code == 2
    assert "total  unpriced" in out
    assert err.splitlines()[-2].endswith("unpriced")
    assert f"sku {P4DE}, region us-east-1, tier on_demand, usd_per_hour" in err
    own = tmp_path / "own.csv"
    own.write_text(
        "backend,sku,gpu,gpus,region,tier,usd_per_hour,currency,unit\n"
        f"sagemaker,{P4DE},a100-80gb,8,us-east-1,on_demand,30.5,USD,hour\n"
    )
    code, out, err = isthmus(tmp_path, "cost", "sdxl-progressive", *where, "--prices", "own.csv", "--json")
    assert code == 0, err
    assert json.loads(out)["usd_per_hour"] == 16 * 30.5
    assert "own.csv" in json.loads(out)["prices"][0]["source"]


def test_the_recipes_own_price_is_read_as_at_a_launch(tmp_path: Path) -> None:
    own = ("--set", "backends.sagemaker.usd_per_hour=500", "--set", "compute.offers=[]")
    place = ("--set", "backends.sagemaker.region=us-east-1", "--set", f"backends.sagemaker.sku={P4DE}")
    where = ("--backend", "sagemaker", "--sku", P4DE, "--region", "us-east-1")
    code, out, err = isthmus(tmp_path, "cost", "sdxl-progressive", *where, *own, *place, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["usd_per_hour"] == 500
    assert told["prices"][0]["source"] == "backends.sagemaker.usd_per_hour"
    # Of other machines, or another number of them, nobody said it.
    for other in (("--nodes", "8"), ("--tier", "spot"), ("--region", "us-west-2")):
        assert isthmus(tmp_path, "cost", "sdxl-progressive", *where, *own, *place, *other)[0] == 2, other
    code, out, err = isthmus(
        tmp_path, "compare", "sdxl-progressive", *own, *place, "--backend", "sagemaker", "--json"
    )
    assert code == 0, err
    priced = [
        (row["sku"], row["region"], row["tier"])
        for row in json.loads(out)["offers"]
        if row["usd_per_hour"] == 500
    ]
    assert priced == [(P4DE, "us-east-1", "on_demand")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cost", "sdxl-progressive", "--region", "italynort"), "no region 'italynort'"),
        (("cost", "sdxl-progressive", "--set", "compute.gpu=b200-180gb", "--backend", "azure"), "nobody prices a machine"),
        (("cost", "sdxl-progressive", "--tier", "cheap"), "--tier: no tier 'cheap'"),
        (("cost", "sdxl-progressive", "--chart", "costs.pdf", "--region", "eastus"), "costs.pdf: cannot draw a .pdf"),
        (("cost", "sdxl-progressive", "--prices", "nowhere.csv"), "nowhere.csv"),
        (("cost", "quickstart"), "compute.gpu: the speed of a CPU is not estimated"),
        (("compare", "quickstart"), "compute.gpu: trains on CPU"),
        (("compare", "sdxl-progressive", "--deadline", "soon"), "--deadline: 'soon'"),
        (("compare", "sdxl-progressive", "--max-usd", "-5"), "--max-usd: -5 cannot be"),
        (("compare", "sdxl-progressive", "--backend", "gcp"), "--backend: no cloud 'gcp'"),
        (("compare", "sdxl-progressive", "--steps", "9"), "--steps: has no effect without --measure"),
        (("compare", "sdxl-progressive", "--data-in", "azure:eastus"), "no effect without --with-data-move"),
        (("compare", "sdxl-progressive", "--with-data-move", "--data-in", "eastus"), "--data-in: 'eastus' is no place"),
        (("compare", "quickstart", "--measure", "--html", "x.html"), "--html: has no effect with --measure"),
        (("compare", "quickstart", "--measure", "--steps", "2"), "--steps: 2 steps tell nothing"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line_and_exit_2(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from isthmus.cli.app import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) <= 1
    assert message in err


def test_an_unknown_model_family_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.cli.app import main

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = [
        "compare",
        "sdxl-progressive",
        "--set",
        "model={family: ours, config: {width: 8}}",
        "--set",
        "code=./none",
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert err.count("error: ") == 1
    assert "ours" in err
