"""The case studies' own job on both emulated clouds: 16 nodes of 8 A100-80GB, three stages; checked, planned, and refused for want of quota."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from two_clouds import BUCKET, IMAGE, Clouds, Laptop, open_clouds

from isthmus.core.recipe import load_recipe
from isthmus.rehearsal import latents
from isthmus.storage import copying

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
OFFERS = [
    {"backend": "azure", "region": "italynorth", "tier": "spot"},
    {"backend": "azure", "region": "italynorth", "tier": "on_demand"},
    {"backend": "sagemaker", "region": "us-east-1", "tier": "spot"},
    {"backend": "sagemaker", "region": "us-east-1", "tier": "on_demand"},
]


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clouds]:
    """Both, with latents of the recipe's three resolutions and clusters that scale to zero. Slow: Azure's SDK, asked four times."""
    recipe = load_recipe("sdxl-progressive").recipe
    with (
        pytest.MonkeyPatch.context() as patch,
        open_clouds(tmp_path_factory.mktemp("clouds"), patch, privileges="processes") as found,
    ):
        for name, priority in (("a100", False), ("a100-low", True)):
            found.azure.add_compute(name, "Standard_ND96amsr_A100_v4", nodes=16, low_priority=priority)
        for number, place in enumerate(places(found), 1):
            folder = str(tmp_path_factory.mktemp(f"latents-{number}") / "data")
            latents.make(recipe, folder, number=number, samples=16)
            source = copying.Tree(folder)
            items = [copying.Item(name, size) for name, size in source.sizes().items()]
            for uri in place.values():
                copying.copy(source, copying.Tree(uri), items)
        yield found


def places(clouds: Clouds) -> list[dict[str, str]]:
    """Where the recipe's two datasets lie on both clouds."""
    return [
        {
            "azure": clouds.azure.container_uri("latents", name).rstrip("/"),
            "sagemaker": f"s3://{BUCKET}/{name}",
        }
        for name in ("photos", "illustrations")
    ]


def words(clouds: Clouds) -> list[str]:
    """What a team puts in the recipe's place-holders' stead."""
    found: dict[str, Any] = {
        "run_directory": clouds.runs,
        "backends": {
            "azure": {
                "region": "italynorth", "compute": "a100", "spot_compute": "a100-low", "environment": {"image": IMAGE},
            },
            "sagemaker": {"role_arn": clouds.sagemaker.role, "region": "us-east-1"},
        },
        "compute.offers": OFFERS,
    }  # fmt: skip
    for number, place in enumerate(places(clouds)):
        found[f"data.sources.{number}.uri"] = place
    return [word for path, value in found.items() for word in ("--set", f"{path}={json.dumps(value)}")]


def test_it_is_checked_planned_and_refused_for_want_of_quota(clouds: Clouds, tmp_path: Path) -> None:
    laptop = Laptop(tmp_path)
    code, out, err = laptop.isthmus("doctor", "sdxl-progressive", *words(clouds), "--json")
    assert code == 0, out + err
    report = json.loads(out)
    wrong = [
        (place["backend"], row) for place in report for row in place["checks"] if row["level"] == "error"
    ]
    assert wrong == []
    assert [place["ok"] for place in report] == [True] * 4
    for place in report:
        told = " ".join(row["message"] for row in place["checks"])
        for stage in ("256px", "512px", "1024px"):
            assert f"stage {stage}: " in told, "the arithmetic of its memory"
        assert "preflight.data" in {row["id"] for row in place["checks"] if row["level"] == "ok"}

    # Quota for fifteen nodes, of each kind: every place refuses, and says what it needs.
    clouds.azure.quota["LowPriority"] = clouds.azure.quota["standardNDAMSv4_A100Family"] = 15 * 96
    for tier in ("training job usage", "spot training job usage"):
        clouds.sagemaker.quota[f"ml.p4de.24xlarge for {tier}"] = 15
    code, out, err = laptop.isthmus("launch", "sdxl-progressive", *words(clouds), "--run-id", "case", "--yes")
    assert code == 3, out + err
    assert "need 1536 low priority vCPUs" in err
    assert "need 1536 dedicated vCPUs" in err
    assert err.count("16 x ml.p4de.24xlarge are over the quota of 15") == 2
    assert clouds.azure.jobs() == []
    assert clouds.sagemaker.jobs() == []
    assert not clouds.run("azure", "case").exists()

    # On demand there is room in Italy: that is where it goes, to a cluster that has no node yet.
    del clouds.azure.quota["standardNDAMSv4_A100Family"]
    clouds.azure.capacity["Standard_ND96amsr_A100_v4"] = 0
    code, out, err = laptop.isthmus("launch", "sdxl-progressive", *words(clouds), "--run-id", "case", "--yes")
    assert code == 0, out + err
    assert "note: not azure italynorth spot: " in err
    assert (
        "where   azure, italynorth, Standard_ND96amsr_A100_v4, on-demand, 16 nodes x 8 a100-80gb, world size 128"
        in out
    )
    assert "budget.max_usd $1,000,000 cannot be checked: azure italynorth" in err, "nobody prices it there"
    assert "budget  at most $1,000,000.00" in out
    assert "is 2" in out.partition("  offers  ")[2].partition("\n")[0]
    (job,) = clouds.azure.jobs()
    assert job["properties"]["resources"]["instanceCount"] == 16
    code, out, err = laptop.isthmus("stop", "case")
    assert code == 0, out + err
