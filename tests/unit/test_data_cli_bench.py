"""`isthmus data bench`: real reads of a folder and of an object store, and what the figures are said to mean."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyServer, Request, late, slow_down
from training import recipe_data, write_recipe

from isthmus.cli.app import main
from isthmus.cli.data_bench_verdict import read_again
from isthmus.storage.shards import open_dataset
from isthmus.storage.stream.bench import Measurement, row_bytes, verdict

QUICK = ["--seconds", "0.05", "--batch-size", "8", "--lanes", "4", "--window", "16"]


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints as JSON."""
    with pytest.raises(SystemExit) as ended:
        main(["data", "bench", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_every_depth_is_measured_and_the_last_sentence_says_what_limits(
    latents: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(capsys, latents["dit"], *QUICK, "--depth", "1,4,auto")
    assert [row["depth"] for row in found["depths"]] == [1, 4, None]
    for row in found["depths"]:
        assert row["samples"] >= 8
        assert row["samples_per_s"] > 0
        assert row["bytes"] > 0
        assert row["megabytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e6)
        assert 0 < row["latency_s"]["p50"] <= row["latency_s"]["p99"] <= row["latency_s"]["max"]
        assert row["cpu_s_per_gb"] > 0
        assert row["first_batch_s"] > 0
    assert [row["depth_reached"] for row in found["depths"][:2]] == [1, 4]
    assert (found["resolution"], found["batch_size"], found["lanes"]) == (32, 8, 4)
    assert found["sentence"].endswith(".")
    assert "limits" in found["sentence"]
    assert "`auto` reaches" in found["sentence"]
    assert (found["verdict"], found["ranks"]) == (None, None)
    best = max(found["depths"], key=lambda row: row["samples_per_s"])
    factor = best["bytes"] / best["samples"] / found["row_bytes"]
    assert found["bytes_read_per_byte"] == pytest.approx(factor)
    dataset = open_dataset(latents["dit"])
    # Two fp16 latents of 4 x 8 x 8 or 4 x 8 x 16, and 5 x 24 of text; headers and small columns beside them.
    assert 1024 + 240 < row_bytes(dataset, 32) == found["row_bytes"] < 2048 + 240 + 1000


def test_an_object_store_is_benched_as_well(
    latents: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(latents["dit"], f"/{tmp_path.name}/data", recursive=True)
    found = bench(capsys, f"memory://{tmp_path.name}/data", *QUICK, "--depth", "2", "--resolution", "16")
    assert found["depths"][0]["bytes"] > 0
    assert found["resolution"] == 16
    assert found["limit"] != "disk"


def test_over_http_the_bench_finds_that_latency_limits_and_that_requests_failed(
    latents: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--batch-size", "8", "--lanes", "4", "--window", "16", "--resolution", "16", "--seconds", "1.2"]
    with FaultyServer(Path(latents["dit"])) as server:
        server.fail(late(0.04), times=10**9, match="part-")
        found = bench(capsys, server.url, *few, "--depth", "1,4")
        one, four = found["depths"]
        assert one["latency_s"]["p50"] >= 0.04
        assert four["samples_per_s"] > 1.5 * one["samples_per_s"]
        assert found["limit"] == "latency"
        server.forgive()
        server.fail(slow_down(), times=10**9, match="part-", when=every_fifth())
        throttled = bench(capsys, server.url, *few, "--depth", "4")
        assert throttled["depths"][0]["throttled"] > 0
        assert throttled["limit"] == "throttling"


def every_fifth() -> Callable[[Request], bool]:
    """True for each fifth request."""
    counted = itertools.count(1)
    return lambda _: next(counted) % 5 == 0


def test_with_a_recipe_its_order_and_settings_are_read_and_roots_take_the_place_of_its_sources(
    latents: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_recipe(
        tmp_path, recipe_data(latents["dit"], data__checksums=False, data__memory_limit=10**9, data__lanes=8)
    )
    found = bench(capsys, "--recipe", path, "--seconds", "0.05", "--depth", "1")
    assert (found["world_size"], found["batch_size"], found["lanes"], found["resolution"]) == (2, 4, 4, 16)
    assert (found["checksums"], found["memory_limit_bytes"], found["shuffle_window"]) == (False, 10**9, 16)
    assert found["verdict"] is None
    assert found["sentence"].endswith("No verdict on the recipe: it names no GPU.")
    moved = bench(
        capsys, latents["dit"], "--recipe", path, "--set", "data.sources.0.uri=/nowhere", "--seconds", "0.05",
        "--depth", "1",
    )  # fmt: skip
    assert moved["roots"] == [[latents["dit"]]]


def test_people_get_a_table_line_by_line(latents: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "bench", latents["dit"], *QUICK, "--depth", "1,auto"])
    head, names, one, adaptive, sentence, *more = capsys.readouterr().out.splitlines()
    assert "32 px" in head
    assert names.split()[:3] == ["depth", "MB/s", "samples/s"]
    assert one.split()[0] == "1"
    assert adaptive.split()[0] == "auto:"
    assert "limits" in sentence
    assert all(line.startswith("MB/s are bytes read, ") for line in more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a dataset, or a recipe with --recipe"),
        (["/nowhere"], "no latent dataset here"),
        (["{data}", "--depth", "0"], "'0' is neither a number from 1 to 256 nor auto"),
        (["{data}", "--depth", "1,,2"], "'' is neither a number"),
        (["{data}", "--batch-size", "10"], "--batch-size 10 is not a multiple of --lanes 8"),
        (["{data}", "--resolution", "64"], "no latents at 64 px"),
        (["{data}", "--memory-limit", "lots"], "--memory-limit lots: a size such as"),
        (["{data}", "--memory-limit", "1 KB"], "needs"),
        (["{data}", "--set", "seed=1"], "--set is of a recipe"),
        (["{data}", "--access", "download it"], "access is stream, mount or download"),
        (["{data}", "--seconds", "0"], "a time above zero"),
        (["--recipe", "quickstart", "--stage", "1"], "no stage 1"),
    ],
)
def test_mistakes_are_one_line(
    latents: dict[str, str], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data", "bench", *(latents["dit"] if a == "{data}" else a for a in arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == 2, captured.err
    assert words in captured.err
    assert "Traceback" not in captured.err


def measured(depth: int | None, samples_per_s: float, **more: Any) -> Measurement:
    figures: dict[str, Any] = {
        "depth_reached": depth or 8, "first_batch_s": 0.1, "seconds": 1.0, "samples": int(samples_per_s),
        "bytes": int(samples_per_s) * 1000, "megabytes_per_s": samples_per_s / 1000, "cpu_s_per_gb": 1.0,
        "latency_s": {"p50": 0.02, "p90": 0.03, "p99": 0.1, "max": 0.2}, "cores_busy": 0.3, "resident_bytes": 1,
        "retries": 0, "throttled": 0, "hedged": 0, "cache_hits": 0, "cache_misses": 0,
    }  # fmt: skip
    return Measurement(depth=depth, samples_per_s=samples_per_s, **(figures | more))


@pytest.mark.parametrize(
    ("runs", "limit", "words"),
    [
        (
            [measured(1, 100), measured(32, 3000)],
            "latency",
            "32 reads in flight still gave 2900 % more than 1",
        ),
        (
            [measured(8, 950), measured(16, 1000)],
            "store",
            "8 reads in flight reach 1 MB/s and 950 samples/s, 95 %",
        ),
        (
            [measured(8, 950, cores_busy=1.9), measured(16, 1000, cores_busy=1.9)],
            "cpu",
            "1.9 of 2 cores were busy",
        ),
        (
            [measured(8, 950), measured(16, 1000, throttled=7, retries=7)],
            "throttling",
            "it throttled 7 requests",
        ),
        (
            [measured(8, 950), measured(16, 1000, retries=7)],
            "errors",
            "7 requests failed and were tried again",
        ),
        ([measured(1, 950, cores_busy=1.0), measured(2, 900)], "process", "kept 1.0 of 2 cores busy"),
        ([measured(4, 1000), measured(None, 900)], "store", "`auto` reaches 90 % with 8"),
        ([measured(None, 900)], "store", "the best is 1 MB/s and 900 samples/s"),
    ],
)
def test_what_limits_is_read_off_the_figures(runs: list[Measurement], limit: str, words: str) -> None:
    found = verdict(runs, local=False, cores=2)
    assert found["limit"] == limit
    assert words in found["sentence"]


def test_bytes_that_are_not_those_of_the_samples_are_explained() -> None:
    few = measured(4, 4800, bytes=12_000_000)
    factor, why = read_again(few, 1122)
    assert factor == pytest.approx(12e6 / 4800 / 1122)
    assert why is not None
    assert why.startswith(
        "MB/s are bytes read, 2.2 times the 5.39 MB/s of the samples: a block is read whole"
    )
    factor, why = read_again(few, 5000)
    assert factor == 0.5
    assert why is not None
    assert "read ahead before the clock started" in why
    assert read_again(few, 2500) == (1.0, None)
