"""The estimate of a whole run: its lines add up, it behaves as costs do, and what is not known is said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.arithmetic import run_hours, run_usd
from isthmus.cost.assumptions import Assumptions, assumptions
from isthmus.cost.budget import budget_findings, launch_record
from isthmus.cost.catalog import Catalog, Price, Rate
from isthmus.cost.estimate import Estimate, estimate, usd_per_hour
from isthmus.cost.lines import Dataset, tiered_usd
from isthmus.cost.placing import Place
from isthmus.cost.table import estimate_json, estimate_text
from isthmus.cost.times import checkpoint_bytes, row_bytes
from isthmus.errors import UsageError

ND, P4DE = "Standard_ND96amsr_A100_v4", "ml.p4de.24xlarge"


def price(usd: float | None, **changes: Any) -> Price:
    values: dict[str, Any] = {
        "backend": "azure", "service": "Azure ML", "sku": ND, "gpu": "a100-80gb", "gpus": 8, "region": "eastus",
        "tier": "on_demand", "usd_per_hour": usd, "currency": "USD", "unit": "hour", "source": "a test", "as_of": "2026-11-01",
    }  # fmt: skip
    return Price(**values | changes)


def rate(usd: float, **changes: Any) -> Rate:
    values: dict[str, Any] = {
        "backend": "azure", "kind": "storage", "region": "eastus", "to": "", "from_gb": 0.0, "usd": usd, "currency": "USD", "unit": "GB-month",
        "source": "a test", "as_of": "2026-11-01",
    }  # fmt: skip
    return Rate(**values | changes)


CATALOG = Catalog(
    prices=(
        price(32.0),
        price(8.0, tier="spot"),
        price(None, region="italynorth"),
        price(40.0, backend="sagemaker", sku=P4DE, region="us-east-1"),
    ),
    rates=(
        rate(0.02),
        rate(0.08, kind="egress", to="internet"),
        rate(0.05, kind="egress", to="internet", from_gb=1000.0),
        rate(0.02, kind="inter_region", to="westus"),
        rate(0.023, backend="sagemaker", region="us-east-1"),
    ),
)
MACHINES_ALONE = replace(CATALOG, rates=())
FREE = Assumptions(
    allocation_s=0, image_gb=0, start_s=0, compile_s=0, stall_s=0, host_copy_gb_per_s=1e8, store_gb_per_s=1e8,
    failures=0, idle_s=0, kept_months=0, stream_gb_per_s=1e6, mount_gb_per_s=1e6,
)  # fmt: skip
"""Nothing takes time but training."""


def sdxl(*overrides: str) -> Recipe:
    return load_recipe("sdxl-progressive", ["compute.offers=[]", *overrides]).recipe


def steady(images_per_s: float, spread: float = 1.25) -> Any:
    """A speed that grows with the GPUs of a place as if nothing were lost."""

    def speed(recipe: Recipe, index: int, place: Place) -> tuple[float, float, float, str]:
        of_all = images_per_s * place.nodes * place.gpus_per_node / 128
        return of_all, of_all / spread, of_all * spread, "a test"

    return speed


def on(recipe: Recipe | None = None, **changes: Any) -> Estimate:
    options = {"backend": "azure", "region": "eastus", "catalog": CATALOG, "speed": steady(2000)}
    return estimate(recipe or sdxl(), **options | changes)


def test_training_alone_is_images_over_speed_times_the_price() -> None:
    found = on(sdxl("validation={}"), assume=FREE, catalog=MACHINES_ALONE)
    images = 900_000 * 2048
    hours = run_hours(images, 2000)
    assert found.images == images
    assert found.hours == pytest.approx(hours)
    assert found.usd == pytest.approx(run_usd(hours, 128, 4.0))
    assert found.usd is not None
    assert found.usd_interval == pytest.approx((found.usd / 1.25, found.usd * 1.25))
    assert found.usd_per_million_images == pytest.approx(found.usd / (images / 1e6))


# MosaicML's Stable Diffusion 2 (github.com/mosaicml/diffusion, README): GPUs, images/s at 256 and 512 px, days, dollars.
PUBLISHED = [(8, 1100, 290, 81.33, 31_230), (64, 8530, 2340, 10.14, 31_146), (128, 11600, 4590, 5.51, 33_874)]


@pytest.mark.parametrize(("gpus", "at_256", "at_512", "days", "usd"), PUBLISHED)
def test_the_published_runs_come_out_of_the_whole_estimate(
    gpus: int, at_256: int, at_512: int, days: float, usd: int
) -> None:
    stages = (
        "stages=[{name: a, resolution: 256, steps: 550000, global_batch_size: 2048, micro_batch_size: 16, learning_rate: 1e-4},"
        "{name: b, resolution: 512, steps: 850000, global_batch_size: 2048, micro_batch_size: 16, learning_rate: 1e-4}]"
    )
    one_node = ["monitor={}", "data.memory_limit=32 GB"]
    recipe = sdxl("validation={}", stages, f"compute.nodes={gpus // 8}", *one_node)
    dollars_a_gpu = Catalog(prices=(price(16.0),))
    speeds = (at_256, at_512)
    found = on(
        recipe,
        catalog=dollars_a_gpu,
        assume=FREE,
        speed=lambda r, i, p: (speeds[i], speeds[i], speeds[i], "read"),
    )
    assert found.hours / 24 == pytest.approx(days, abs=0.01)
    assert found.usd == pytest.approx(usd, abs=1)


def test_the_lines_are_the_total_and_their_node_hours_are_what_is_billed() -> None:
    found = on(data=Dataset(gigabytes=20_000))
    assert found.usd == pytest.approx(math.fsum(line.usd or 0 for line in found.lines))
    nodes = [line for line in found.lines if line.unit == "node-hours"]
    assert sum(line.quantity or 0 for line in nodes) == pytest.approx(16 * found.times.billed_h)
    assert {line.group for line in found.lines} == {
        "compute", "start-up", "validation", "checkpoints", "interruptions", "idle", "storage",
    }  # fmt: skip
    assert found.unpriced == ()


def test_sagemaker_does_not_bill_the_wait_for_nodes_and_azure_does() -> None:
    there = on(backend="sagemaker", region="us-east-1")
    wait = next(line for line in there.lines if line.name == "node allocation")
    assert (wait.usd, wait.note) == (0.0, "not billed")
    billed = math.fsum(line.usd or 0 for line in there.lines if line.unit == "node-hours")
    assert billed == pytest.approx(there.times.billed_h * 16 * 40)
    assert there.times.billed_h < there.hours
    assert on().times.billed_h > on().hours


def test_unpriced_machines_have_hours_and_no_dollars() -> None:
    found = on(region="italynorth")
    assert found.usd is None
    assert found.usd_interval is None
    assert found.hours == pytest.approx(on().hours)
    assert "italynorth" in found.unpriced[0]
    text = estimate_text(found)
    assert "total  unpriced" in text
    assert "$" not in text.split("rests on:")[0]
    assert estimate_json(found)["usd"] is None


def test_a_dataset_of_unknown_size_is_no_free_dataset() -> None:
    found = on()
    line = next(line for line in found.lines if line.name == "dataset")
    assert (line.quantity, line.usd, line.note) == (None, None, "size unknown")
    assert "storage: dataset (size unknown)" in found.unpriced


def test_moving_the_data_out_of_the_other_cloud_is_a_line() -> None:
    moved = on(
        backend="sagemaker", region="us-east-1", data=Dataset(gigabytes=5000, lies_in=("azure", "eastus"))
    )
    line = next(line for line in moved.lines if line.group == "transfer")
    assert line.usd == pytest.approx(1000 * 0.08 + 4000 * 0.05)
    here = on(data=Dataset(gigabytes=5000, lies_in=("azure", "eastus")))
    assert not [line for line in here.lines if line.group == "transfer"]


def test_tiers_of_a_price_apply_to_the_part_above_them() -> None:
    rates = [rate(0.0), rate(0.09, from_gb=100.0), rate(0.05, from_gb=1000.0)]
    assert tiered_usd(50, rates) == 0
    assert tiered_usd(1100, rates) == pytest.approx(900 * 0.09 + 100 * 0.05)
    assert tiered_usd(10, []) is None
    assert tiered_usd(200, [rates[0], replace(rates[1], usd=None)]) is None


def test_without_interruptions_spot_takes_as_long_as_on_demand() -> None:
    calm = assumptions(["spot_interruptions=0", "failures=0"])
    spot, other = on(tier="spot", assume=calm), on(assume=calm)
    assert spot.hours == pytest.approx(other.hours)
    assert spot.times.interruptions == 0
    assert spot.usd is not None
    assert other.usd is not None
    assert spot.usd < other.usd


def test_spot_says_what_interruptions_do_and_when_it_stops_paying() -> None:
    found = on(tier="spot")
    assert found.spot is not None
    assert found.spot.break_even is not None
    at_even = assumptions([f"spot_interruptions={found.spot.break_even}", "failures=0"])
    even = on(tier="spot", assume=at_even)
    # Spot at a quarter of the price breaks even where the run takes four times as long.
    struck = even.times.work_h + even.times.checkpoints_h + even.times.interrupted_h
    assert struck * 8 * 16 == pytest.approx(found.spot.on_demand_usd, rel=0.01)
    assert "Daly 2006" in estimate_text(found)


def test_a_run_that_is_always_interrupted_never_ends() -> None:
    with pytest.raises(UsageError, match="would never end"):
        on(tier="spot", assume=assumptions(["spot_interruptions=5000"]))


@settings(max_examples=40, deadline=None)
@given(few=st.sampled_from([1, 2, 4, 8]), loss=st.floats(0, 0.5), tier=st.sampled_from(["on_demand", "spot"]))
def test_more_nodes_are_never_cheaper_per_image_when_scaling_loses(few: int, loss: float, tier: str) -> None:
    def speed(recipe: Recipe, index: int, place: Place) -> tuple[float, float, float, str]:
        of_all = 15 * place.nodes ** (1 - loss)
        return of_all, of_all, of_all, "a test"

    # Aside from what more nodes do spare: a checkpoint's copy is spread over them, and a shorter run meets fewer failures.
    calm = replace(FREE, spot_interruptions=0.0, spot_interruptions_low=0.0, spot_interruptions_high=0.0)
    recipe = sdxl("monitor={}", "data.memory_limit=32 GB")
    usd = [
        on(
            recipe, tier=tier, nodes=nodes, speed=speed, assume=calm, catalog=MACHINES_ALONE
        ).usd_per_million_images
        for nodes in (few, 2 * few)
    ]
    assert usd[0] is not None
    assert usd[1] is not None
    assert usd[0] <= usd[1] * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(speed=st.floats(100, 1e5), factor=st.floats(1, 10), rate_=st.floats(0, 0.05))
def test_faster_is_never_dearer_and_more_interruptions_never_cheaper(
    speed: float, factor: float, rate_: float
) -> None:
    slow, fast = on(tier="spot", speed=steady(speed)), on(tier="spot", speed=steady(speed * factor))
    assert slow.usd is not None
    assert fast.usd is not None
    assert fast.usd <= slow.usd * (1 + 1e-9)
    calm = on(tier="spot", assume=assumptions([f"spot_interruptions={rate_}"]))
    rough = on(tier="spot", assume=assumptions([f"spot_interruptions={rate_ + 0.01}"]))
    assert (calm.usd or 0) <= (rough.usd or 0) * (1 + 1e-9)
    for found in (slow, fast):
        assert found.usd_interval is not None
        low, high = found.usd_interval
        assert low <= (found.usd or 0) <= high
        assert found.hours_interval[0] <= found.hours <= found.hours_interval[1]


def test_a_storage_path_that_is_too_slow_sets_the_speed_and_says_so() -> None:
    # 16 nodes x 1 GB/s through the mount, rows of some 340 kB at 256 px.
    found = on(speed=steady(200_000))
    stage = found.by_stage[0]
    assert stage.data_limited
    assert stage.images_per_s == pytest.approx(16e9 / row_bytes(sdxl(), 256))
    assert any("limited by its data" in warning for warning in found.warnings)


def test_bytes_of_rows_and_checkpoints() -> None:
    # fp16 mean and log-variance of 4 x 32 x 32, 77 tokens of 768 and 1280, one pooled vector of 1280.
    assert row_bytes(sdxl(), 256) == 2 * 2 * 4 * 32 * 32 + 2 * 77 * (768 + 1280) + 2 * 1280
    from isthmus.core.models.profiles import profile

    known = profile(sdxl().model)
    assert checkpoint_bytes(sdxl(), known) == 16 * 2_567_463_684
    assert checkpoint_bytes(sdxl(), None) is None


def test_a_stage_that_does_not_fit_is_a_warning_with_its_mend() -> None:
    found = on(sdxl("parallel.strategy=ddp", "parallel.activation_checkpointing=false"))
    said = [warning for warning in found.warnings if "does not fit" in warning]
    assert said
    assert "fits with stages.1.micro_batch_size=8" in said[0]


def test_an_old_price_says_its_age() -> None:
    old = Catalog(prices=(price(32.0, as_of="2024-09"),))
    found = on(catalog=old, today=date(2026, 11, 30))
    assert any("months old (2024-09)" in warning for warning in found.warnings)
    assert not on(today=date(2026, 11, 30)).warnings


def test_the_price_of_an_hour_for_the_launcher() -> None:
    recipe = sdxl()
    assert usd_per_hour(recipe, "azure", "eastus", "on_demand", catalog=CATALOG) == 16 * 32
    assert usd_per_hour(recipe, "azure", "eastus", "spot", catalog=CATALOG) == 16 * 8
    assert usd_per_hour(recipe, "azure", "italynorth", catalog=CATALOG) is None
    assert usd_per_hour(recipe, "nowhere", catalog=CATALOG) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"region": "italynort"}, "--region: azure has no region 'italynort' (did you mean italynorth?)"),
        ({"backend": "gcp"}, "--backend: no prices of a backend 'gcp'"),
        (
            {"sku": "Standard_ND96amsr"},
            f"--sku: nobody prices a Standard_ND96amsr on azure (did you mean {ND}?",
        ),
        (
            {"nodes": 3},
            "--nodes: 3 nodes of 8 GPUs cannot share data.lanes 128 and the batches (can be 1, 2, 4, 8, 16)",
        ),
        ({"nodes": 0}, "--nodes: 0 nodes cannot be"),
    ],
)
def test_places_that_cannot_be_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        on(**options)
    assert message in str(error.value)


def test_a_gpu_that_nobody_prices_is_one_clear_line() -> None:
    with pytest.raises(UsageError) as error:
        on(sdxl("compute.gpu=b200-180gb"))
    assert str(error.value).startswith(
        "compute.gpu: nobody prices a machine with 8 x b200-180gb on azure (azure has a100-80gb"
    )
    with pytest.raises(UsageError, match="the speed of a CPU is not estimated") as error:
        on(load_recipe("quickstart").recipe, speed=None)
    assert "--measure --backend azure" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spot_interruption=1", "did you mean spot_interruptions"),
        ("failures=-1", "must not be negative"),
        ("failures=often", "'often' is not a number"),
        ("pull_gb_per_s=0", "cannot be"),
    ],
)
def test_assumptions_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        assumptions([text])
    assert message in str(error.value)
    assert f"--assume {text.split('=')[0]}" in str(error.value)


@pytest.mark.parametrize(("cap", "level"), [(0.5, "error"), (1.0, "warning"), (1.2, "warning"), (2.0, None)])
def test_the_budget_is_held_against_the_intervals_ends(cap: float, level: str | None) -> None:
    found = on()
    assert found.usd is not None
    recipe = sdxl(f"budget={{max_usd: {cap * found.usd}}}")
    assert [finding.level for finding in budget_findings(recipe, found)] == ([level] if level else [])
    hours = sdxl(f"budget={{max_hours: {cap * found.hours}}}")
    assert [finding.level for finding in budget_findings(hours, found)] == ([level] if level else [])


def test_an_unpriced_offer_cannot_keep_a_budget_and_says_so() -> None:
    (finding,) = budget_findings(sdxl("budget={max_usd: 10}"), on(region="italynorth"))
    assert (finding.level, finding.id) == ("warning", "budget.unpriced")
    assert "cannot be checked" in finding.message


def test_what_is_kept_with_a_run_is_json() -> None:
    kept = json.loads(json.dumps(launch_record(on())))
    assert kept["usd_interval80"][0] < kept["usd"] < kept["usd_interval80"][1]
    assert kept["nodes"] == 16
