"""What a run has cost, over attempts, places and prices; what the rest would cost."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isthmus.backends.destinations import Destination
from isthmus.backends.spec import Metered, Rendered
from isthmus.backends.submission import put_down
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.dump import recipe_data, recipe_hash
from isthmus.core.recipe.schema import Recipe
from isthmus.cost.catalog import Catalog, Price
from isthmus.cost.estimate import estimate
from isthmus.cost.spent import pace_ratio, remaining, rest, spent, what_if
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory

ND = "Standard_ND96amsr_A100_v4"


def price(usd: float | None, **changes: Any) -> Price:
    values: dict[str, Any] = {
        "backend": "azure", "service": "Azure ML", "sku": ND, "gpu": "a100-80gb", "gpus": 8, "region": "eastus",
        "tier": "on_demand", "usd_per_hour": usd, "currency": "USD", "unit": "hour", "source": "a test", "as_of": "2026-11-01",
    }  # fmt: skip
    return Price(**values | changes)


CATALOG = Catalog(prices=(price(32.0), price(8.0, tier="spot")))


def sdxl() -> Recipe:
    return load_recipe("sdxl-progressive", ["compute.offers=[]"]).recipe


def submission(job: str, usd: float | None, tier: str = "spot", backend: str = "azure") -> dict[str, Any]:
    return {
        "rendered": {"job_id": job, "backend": backend},
        "destination": {
            "backend": backend,
            "offer": {"backend": backend, "region": "eastus", "tier": tier, "sku": ND},
        },
        "usd_per_hour": usd,
    }


def test_each_attempt_counts_at_its_own_price() -> None:
    spans = [("a-01", 7200.0), ("a-02", 3600.0), ("a-02", 1800.0)]
    found = spent(
        sdxl(), spans, [submission("a-01", 128), submission("a-02", 512, "on_demand")], step=450_000
    )
    assert [(one.hours, one.usd) for one in found.attempts] == [(2.0, 256.0), (1.5, 768.0)]
    assert (found.usd, found.hours, found.share) == (1024.0, 3.5, 0.5)


def test_what_the_cloud_tells_goes_before_the_events() -> None:
    def one(
        tier: str, meter: Metered, catalog: Catalog | None = None
    ) -> tuple[str, float, float | None, str]:
        sent = [submission("a-01", 100, tier)]
        (found,) = spent(
            sdxl(), [("a-01", 7200.0)], sent, step=1, metered={"a-01": meter}, catalog=catalog
        ).attempts
        return found.hours_from, found.hours, found.usd, found.price_from

    assert one("on_demand", Metered(seconds=10_000, billable_s=9000)) == ("billed", 2.5, 250.0, "launch")
    assert one("on_demand", Metered(seconds=9000)) == ("cloud", 2.5, 250.0, "launch")
    # Spot's discount is told as fewer billed seconds of the price on demand, which is 16 x 32 here; not twice.
    spot = Metered(seconds=9000, billable_s=3600)
    assert one("spot", spot, CATALOG) == ("billed", 1.0, 512.0, "today")
    # Nobody prices it on demand: the seconds that it ran, at the price of its launch.
    assert one("spot", spot) == ("cloud", 2.5, 250.0, "launch")


def test_an_attempt_without_a_price_is_priced_today_or_makes_the_total_unknown() -> None:
    spans, sent = [("a-01", 3600.0)], [submission("a-01", None)]
    today = spent(sdxl(), spans, sent, step=1, catalog=CATALOG)
    assert (today.usd, today.attempts[0].price_from) == (16 * 8.0, "today")
    unknown = spent(sdxl(), [*spans, ("a-02", 60.0)], [submission("a-01", 5)], step=1)
    assert unknown.attempts[1].price_from == "nobody"
    assert unknown.usd is None


def test_the_rest_is_the_steps_that_are_left_at_the_pace_so_far() -> None:
    recipe = sdxl()
    left = remaining(recipe, 700_000)
    assert left is not None
    assert [(stage.name, stage.total_steps) for stage in left.stages] == [
        ("512px", 100_000),
        ("1024px", 100_000),
    ]
    assert remaining(recipe, 900_000) is None
    where = {"backend": "azure", "region": "eastus", "tier": "on_demand"}
    whole = estimate(recipe, catalog=CATALOG, **where)
    half = spent(recipe, [("a-01", whole.hours * 3600)], [submission("a-01", 512)], step=450_000)
    # Half of the steps took as long as the whole was estimated to take.
    assert pace_ratio(whole, half) == pytest.approx(2)
    slow, told = (rest(recipe, half, CATALOG, here=here, **where) for here in (whole, None))
    assert slow.hours == pytest.approx(2 * told.hours)
    assert slow.usd == pytest.approx(2 * (told.usd or 0))
    done = rest(recipe, replace(half, step=900_000), CATALOG, here=whole, **where)
    assert (done.hours, done.usd) == (0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=many", "a number of machines"),
        ("node=3", "no change"),
        ("tier", "no change"),
        ("nodes=0", "a number"),
    ],
)
def test_changes_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        what_if(text)
    assert what_if("nodes=8, tier=spot") == {"nodes": 8, "tier": "spot"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two attempts, preempted once, half done."""
    recipe = sdxl()
    directory = RunDirectory(tmp_path / "sdxl-1")
    kept = {"usd": 90_000.0, "usd_interval80": [80_000.0, 100_000.0], "hours": 270.0}
    directory.create(
        "",
        {
            "id": "sdxl-1",
            "backend": "azure",
            "recipe": recipe_data(recipe),
            "recipe_hash": recipe_hash(recipe),
        },
    )
    directory.write_file("estimate.json", json.dumps(kept).encode())
    now = time.time()
    for number, (job, usd) in enumerate([("sdxl-1-01", 128.0), ("sdxl-1-02", 512.0)], 1):
        told = submission(job, usd, "spot" if number == 1 else "on_demand")
        rendered = Rendered(
            backend="azure", run_id="sdxl-1", run_uri=directory.uri, job_id=job, request={"name": job}
        )
        put = put_down(
            directory,
            number,
            rendered,
            by="launch",
            destination=Destination.from_json(told["destination"]),
            usd_per_hour=usd,
        )
        assert put is not None
        directory.event("submitted", backend="azure", job_id=job)
        directory.event("started", job=job)
        directory.event("preempted" if number == 1 else "finished")
    # Events carry the time of their writing; two hours and one hour are put into them.
    times = [now, now, now + 7200, now + 7300, now + 7300, now + 10_900]
    for file, moment in zip(sorted((tmp_path / "sdxl-1" / "events").iterdir()), times, strict=True):
        file.write_text(json.dumps({**json.loads(file.read_text()), "time": moment}))
    with directory.metrics("train") as writer:
        writer.write({"step": 450_000, "attempt": 1})
    return directory


def test_the_command_says_what_was_spent_against_the_estimate(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from isthmus.cli.app import main

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.raises(SystemExit) as ended:
        main(["cost", "run", str(run.uri), "--json", "--what-if", "tier=spot"])
    assert not ended.value.code
    facts = json.loads(capsys.readouterr().out)
    assert facts["usd"] == pytest.approx(2 * 128 + 1 * 512, rel=1e-3)
    assert facts["hours"] == pytest.approx(3, rel=1e-3)
    assert [attempt["tier"] for attempt in facts["attempts"]] == ["spot", "on_demand"]
    assert facts["estimate_at_launch"]["usd"] == 90_000
    assert (facts["rest"]["tier"], facts["what_if"]["tier"]) == ("on_demand", "spot")
    with pytest.raises(SystemExit):
        main(["cost", "run", str(run.uri)])
    out = capsys.readouterr().out
    assert "sdxl-1: $768, 3 h, step 450,000 of 900,000 (50%)" in out
    assert "estimate at launch: $90,000 ($80,000 to $100,000), 270 h" in out
    assert "together: " in out
