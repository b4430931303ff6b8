"""Whether a place feeds a recipe's GPUs: the arithmetic, its limits and remedies, and real ranks that read together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data, write_recipe

from isthmus.cli.app import main
from isthmus.cli.data_bench_ranks import Task, run_ranks
from isthmus.cli.data_bench_setup import setup_of
from isthmus.cli.data_bench_verdict import _limits
from isthmus.core.recipe import load_recipe
from isthmus.cost.feeding import (
    AZURE_REQUESTS_PER_S,
    S3_GETS_PER_S,
    SHARE,
    Delivered,
    judge,
    need,
    network_limit,
    store_limits,
)
from isthmus.cost.throughput import estimate_throughput
from isthmus.errors import UsageError
from isthmus.storage.shards import AutoencoderSpec, DatasetSpec, EncoderSpec
from isthmus.storage.shards.sample_check import verify_sample
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream.depth import usable_cores

ROW = 335_000.0
SDXL = load_recipe("sdxl-progressive").recipe
NEED = need(SDXL, 0, ROW)
assert NEED is not None
GOT = Delivered(
    processes=8, rank_bytes_per_s=400e6, bytes_per_s=3.2e9, bottleneck="store",
    block_bytes=5e6, depth=16, access="stream", local=False,
)  # fmt: skip
QUICK = ["--seconds", "0.05", "--batch-size", "8", "--lanes", "4", "--window", "16", "--depth", "auto"]


def test_the_need_is_the_estimated_speed_times_the_bytes_of_a_row() -> None:
    assert NEED is not None
    stage, compute = SDXL.stages[0], SDXL.compute
    told = estimate_throughput(
        model=SDXL.model, gpu="a100-80gb", gpus=128, gpus_per_node=8, global_batch_size=stage.global_batch_size,
        resolution=256, precision=SDXL.parallel.precision, strategy=SDXL.parallel.strategy,
        activation_checkpointing=bool(SDXL.parallel.activation_checkpointing),
    )  # fmt: skip
    assert (NEED.gpus, compute.nodes) == (128, 16)
    assert NEED.images_per_s == told.images_per_s
    assert NEED.bytes_per_s == pytest.approx(told.images_per_s * ROW)
    assert NEED.gpu_bytes_per_s == pytest.approx(NEED.bytes_per_s / 128)
    assert NEED.node_bytes_per_s == pytest.approx(NEED.bytes_per_s / 16)
    later = need(SDXL, 2, ROW)
    assert later is not None
    assert later.images_per_s < NEED.images_per_s / 5, "larger pictures take longer"
    assert need(load_recipe("quickstart").recipe, 0, ROW) is None, "it names no GPU"


def test_a_place_that_gives_enough_feeds_all_gpus_and_names_the_tightest_limit() -> None:
    assert NEED is not None
    store = store_limits(NEED, requests_per_row=2 / 30, account_shares=[1.0], account_bytes_per_s=50e9 / 8)
    limits = (*store, network_limit(NEED, "Standard_ND96amsr_A100_v4", 24e9 / 8))
    found = judge(NEED, GOT, limits)
    assert found.feeds
    assert found.gpus == min(128, limits[0].gpus(128), limits[1].gpus(128), limits[2].gpus(128))
    assert found.sentence.startswith("feeds 128 x a100-80gb: they take ")
    assert "tightest: egress of 1 storage account" in found.sentence
    assert found.reasons == found.remedies == found.caveats == ()
    assert json.loads(json.dumps(found.to_json()))["limits"][0]["source"].startswith("Microsoft")


def test_an_account_that_is_too_small_starves_them_and_the_number_that_would_do_is_said() -> None:
    assert NEED is not None
    per_account = NEED.bytes_per_s / 2.5
    limits = store_limits(NEED, requests_per_row=0.01, account_shares=[1.0], account_bytes_per_s=per_account)
    found = judge(NEED, GOT, limits)
    assert not found.feeds
    # 2.5 accounts' worth at 90 % of what an account gives.
    assert found.sentence.startswith("starves 128 x a100-80gb: needs 3 accounts (a list in `uri`). They take")
    assert found.gpus == int(128 * SHARE / 2.5)
    three = store_limits(
        NEED, requests_per_row=0.01, account_shares=[1 / 3] * 3, account_bytes_per_s=per_account
    )
    assert judge(NEED, GOT, three).feeds
    uneven = store_limits(
        NEED, requests_per_row=0.01, account_shares=[0.8, 0.1, 0.1], account_bytes_per_s=per_account
    )
    assert judge(NEED, GOT, uneven).remedies == ("accounts with equal shares of the data (a list in `uri`)",)


def test_small_row_groups_run_into_the_requests_of_a_prefix_or_an_account() -> None:
    assert NEED is not None
    requests = NEED.images_per_s * 2  # a row a block, of two files
    (limit,) = store_limits(NEED, requests_per_row=2, prefix_shares=[1.0])
    assert (limit.needs, limit.gives) == (requests, SHARE * S3_GETS_PER_S)
    found = judge(NEED, GOT, [limit])
    assert not found.feeds
    prefixes = -(-requests // (SHARE * S3_GETS_PER_S))
    assert found.remedies == (f"{prefixes:.0f} prefixes (a list in `uri`), or larger row groups",)
    (_, blob) = store_limits(NEED, requests_per_row=4, account_shares=[1.0], account_bytes_per_s=1e12)
    assert blob.gives == SHARE * AZURE_REQUESTS_PER_S
    assert "or larger row groups" in judge(NEED, GOT, [blob]).remedies[0]
    (few,) = store_limits(NEED, requests_per_row=2 / 30, prefix_shares=[1.0])
    assert judge(NEED, GOT, [few]).feeds


def test_a_node_whose_network_is_too_slow_is_said() -> None:
    assert NEED is not None
    found = judge(NEED, GOT, [network_limit(NEED, "ml.g5.48xlarge", NEED.node_bytes_per_s / 2)])
    assert not found.feeds
    assert "network of a ml.g5.48xlarge" in found.reasons[0]
    assert "at most 3 ranks" in found.remedies[0]


@pytest.mark.parametrize(
    ("bottleneck", "changed", "remedy"),
    [
        ("latency", {"depth": 16}, "more reads in flight than 16"),
        ("latency", {"depth": 64}, "row groups of 10 MB instead of 5 MB"),
        ("latency", {"depth": 64}, "mount or download instead of stream"),
        ("throttling", {}, "2 times as many accounts or prefixes"),
        ("store", {}, "2 times as many accounts or prefixes"),
        ("cpu", {}, "more cores a rank"),
        ("process", {}, "larger row groups"),
        ("errors", {}, "does not fail"),
        ("disk", {"access": "mount", "local": True}, "a faster disk"),
    ],
)
def test_what_helps_a_rank_depends_on_what_limits_it(
    bottleneck: str, changed: dict[str, Any], remedy: str
) -> None:
    assert NEED is not None
    half = replace(GOT, rank_bytes_per_s=NEED.gpu_bytes_per_s / 2, bottleneck=bottleneck, **changed)
    found = judge(NEED, half, [])
    assert not found.feeds
    assert found.gpus == 64
    assert any(remedy in one for one in found.remedies), found.remedies
    assert ("instead of stream" in found.sentence) == (not half.local)


def test_a_node_counts_when_all_its_ranks_read_and_is_a_caveat_when_fewer_did() -> None:
    assert NEED is not None
    together = replace(GOT, rank_bytes_per_s=NEED.gpu_bytes_per_s, bytes_per_s=0.9 * NEED.node_bytes_per_s)
    assert "a node's 8 ranks get" in judge(NEED, together, []).reasons[0]
    two = replace(
        GOT, processes=2, rank_bytes_per_s=NEED.gpu_bytes_per_s, bytes_per_s=2 * NEED.gpu_bytes_per_s
    )
    found = judge(NEED, two, [])
    assert found.feeds
    assert found.caveats == ("of a node's 8 ranks 2 read here: run it on a node with --ranks 8",)
    assert "--ranks 8" in found.sentence
    plenty = replace(two, bytes_per_s=NEED.node_bytes_per_s)
    assert judge(NEED, plenty, []).caveats == ()


def task(**told: Any) -> Task:
    settings: dict[str, Any] = {
        "recipe": "", "overrides": [], "backend": "local", "roots": [], "stage": 0, "access": "", "resolution": 0,
        "batch_size": 8, "lanes": 4, "window": 16, "memory_limit": "1 GB", "ranks": 1, "depth": 1, "seconds": 0.05,
        "start_step": 0,
    }  # fmt: skip
    return Task(**settings | told)


def bench(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["data", "bench", *map(str, arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured.err
    return captured


def test_two_ranks_read_at_once_each_in_a_process_its_own_part(
    latents: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.storage.stream import depth as module

    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    found = json.loads(bench(capsys, latents["dit"], *QUICK, "--ranks", "3", "--json").out)
    ranks = found["ranks"]
    assert (ranks["asked"], ranks["processes"], found["world_size"]) == (3, 2, 3)
    assert len(ranks["each"]) == 2
    assert ranks["samples_per_s"] == pytest.approx(sum(one["samples_per_s"] for one in ranks["each"]))
    assert ranks["slowest_samples_per_s"] == min(one["samples_per_s"] for one in ranks["each"])
    assert ranks["latency_s"]["p99"] >= ranks["latency_s"]["p50"] > 0
    assert all(one["requests"] > 0 for one in ranks["each"])
    assert "2 ranks of 3, one a core, together: " in found["sentence"]


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few rows of random values, of the shapes that the recipe says."""
    encoders = SDXL.encoders
    spec = DatasetSpec(
        autoencoder=AutoencoderSpec(encoders.autoencoder.kind, "synthetic", 4, 8, 0.13025),
        text=tuple(EncoderSpec(e.name, e.max_tokens, e.width, e.pooled_width) for e in encoders.text),
        resolutions=tuple(sorted({stage.resolution for stage in SDXL.stages})),
    )
    place = str(tmp_path_factory.mktemp("sdxl"))
    write_synthetic(place, 24, spec)
    return place


def test_the_last_line_is_the_verdict_on_a_recipe_with_gpus(
    sdxl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [sdxl, "--recipe", "sdxl-progressive", "--seconds", "0.05", "--depth", "2"]
    out = bench(capsys, *told).out
    assert out.splitlines()[-1].startswith(("feeds 128 x a100-80gb", "starves 128 x a100-80gb"))
    found = json.loads(bench(capsys, *told, "--json").out)
    verdict = found["verdict"]
    assert found["row_bytes"] == pytest.approx(ROW, rel=0.05)
    assert verdict["need"]["gpus"] == 128
    assert verdict["need"]["rank_bytes_per_s"] == pytest.approx(
        verdict["need"]["images_per_s"] / 128 * found["row_bytes"]
    )
    assert verdict["limits"] == [], "a folder here has no published limit"
    assert verdict["feeds"] == (
        verdict["delivered"]["rank_bytes_per_s"] >= verdict["need"]["rank_bytes_per_s"]
    )


def test_the_limits_of_accounts_prefixes_and_machines_are_those_of_the_places_that_are_read(
    sdxl: str,
) -> None:
    """The places are names here; nothing is asked of them."""
    setup = setup_of(task(recipe="sdxl-progressive", roots=[sdxl]))
    assert NEED is not None
    assert setup.recipe is not None

    def limits(*roots: str, region: str | None = None) -> dict[str, float]:
        setup.datasets = (replace(setup.datasets[0], roots=roots),)
        return {one.name: one.gives / SHARE for one in _limits(setup, setup.recipe, NEED, region)}

    azure = limits(
        "az://data@one.blob.core.windows.net/x", "az://data@two.blob.core.windows.net/x", region="italynorth"
    )
    assert azure["egress of 2 storage accounts"] == pytest.approx(50e9 / 8)
    assert azure["network of a Standard_ND96amsr_A100_v4"] == pytest.approx(24e9 / 8)
    large = limits("az://data@one.blob.core.windows.net/x", region="westeurope")
    assert large["egress of 1 storage account"] == pytest.approx(200e9 / 8)
    s3 = limits("s3://a/x", "s3://a/y")
    assert s3 == {
        "requests to 2 S3 prefixes": pytest.approx(5500),
        "network of a ml.p4de.24xlarge": pytest.approx(400e9 / 8),
    }


@pytest.mark.parametrize("name", ["s3", "blob"])
def test_ranks_read_together_from_both_stores_and_a_sample_is_checked_there(
    name: str, latents: dict[str, str], capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue(name)
    for path in Path(latents["dit"]).iterdir():
        if path.is_file():
            store.put(path.name, path.read_bytes())
    found = json.loads(bench(capsys, store.root, *QUICK, "--ranks", "2", "--json").out)
    assert len(found["ranks"]["each"]) == min(2, usable_cores())
    assert all(one["bytes"] > 0 for one in found["ranks"]["each"])
    report = verify_sample(store.root, 10)
    assert report.ok, report.problems
    assert 10 <= report.rows < report.row_groups_of * 48
    store.put("part-00000.text.parquet", b"cut")
    assert any(
        "part-00000.text.parquet: it has 3 bytes" in str(p) for p in verify_sample(store.root, 10).problems
    )


def test_more_ranks_than_the_recipe_has_are_refused(
    latents: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(tmp_path, recipe_data(latents["dit"]))
    said = bench(capsys, "--recipe", path, "--ranks", "3", code=2).err
    assert "--ranks 3: the recipe's world has 2" in said


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rank 0: no latent dataset here"):
        run_ranks(task(roots=[str(tmp_path)]), 1)
