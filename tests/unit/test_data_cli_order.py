"""`isthmus data order`: what a step holds, from the index alone, and what the loader then delivers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import pyarrow as pa
import pytest
from training import make_latents, recipe_data, write_recipe

from isthmus.cli.app import main
from isthmus.core.recipe import load_recipe, resolve
from isthmus.core.recipe.dump import dump_recipe
from isthmus.core.train.describing import view_recipe, view_run
from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.stream import Loader, Plan, Segment
from isthmus.storage.stream.describe import Describer

STAGES = [
    {"name": "a", "resolution": 16, "steps": 6, "global_batch_size": 8, "micro_batch_size": 4, "learning_rate": 1e-2},
    {"name": "b", "resolution": 32, "steps": 6, "global_batch_size": 16, "micro_batch_size": 4, "learning_rate": 1e-2},
]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of 48 samples."""
    root = tmp_path_factory.mktemp("sources")
    return [make_latents(root / name, seed=seed) for seed, name in enumerate(("one", "two"))]


def recipe_file(folder: Path, sources: list[str]) -> Path:
    """Two stages over two sources, the second half as often."""
    named = [{"uri": sources[0]}, {"uri": sources[1], "repeat": "1/2"}]
    return write_recipe(folder, recipe_data("", data__sources=named, stages=STAGES))


def order(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What the command prints as JSON."""
    with pytest.raises(SystemExit) as ended:
        main(["data", "order", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert ended.value.code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def loader_of(path: Path, plan: Plan, **more: Any) -> Loader:
    """The trainer's loader over the same recipe."""
    recipe = resolve(load_recipe(str(path)).recipe, "local")
    return Loader(
        [open_dataset(source.uri) for source in recipe.data.sources],  # type: ignore[arg-type]
        [source.repeat for source in recipe.data.sources],
        seed=recipe.seed,
        lanes=recipe.data.lanes,
        shuffle_window=recipe.data.shuffle_window,
        stages=[stage.resolution for stage in recipe.stages],
        plan=plan,
        **more,
    )


def test_it_says_what_the_loader_delivers_key_by_key_on_every_rank(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_file(tmp_path, sources)
    plan = view_recipe(resolve(load_recipe(str(path)).recipe, "local")).describer.plan
    whole = order(capsys, path, "--step", 0, "--steps", 12, "--keys")["steps"]
    for rank in range(2):
        with loader_of(path, plan, rank=rank, world_size=2) as loader:
            part = order(capsys, path, "--step", 0, "--steps", 12, "--keys", "--rank", rank)
            assert (part["rank"], part["world_size"]) == (rank, 2)
            for step, (described, batch) in enumerate(zip(part["steps"], loader, strict=False)):
                keys = [row["key"] for row in described["rows"]]
                assert keys == batch.keys
                assert [row["position"] for row in described["rows"]] == batch.positions.tolist()
                assert (described["bucket"], described["stage"]) == (batch.bucket, batch.stage)
                half = len(keys)
                assert keys == [row["key"] for row in whole[step]["rows"]][rank * half : (rank + 1) * half]
    with loader_of(path, plan) as loader:
        for step in (0, 5, 6, 11):
            told = [vars_of(place) for place in loader.describe(step)]
            assert told == [{k: v for k, v in row.items() if k != "key"} for row in whole[step]["rows"]]
    assert [step["metrics_step"] for step in whole] == list(range(1, 13))


def vars_of(place: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(place)


def test_it_reads_no_shard_starts_no_thread_and_imports_no_torch(sources: list[str], tmp_path: Path) -> None:
    copies = [shutil.copytree(source, tmp_path / Path(source).name) for source in sources]
    path = recipe_file(tmp_path, [str(copy) for copy in copies])
    for shard in tmp_path.rglob("*.parquet"):
        if shard.name.startswith("part-"):
            shard.unlink()
    code = f"""
import atexit, sys, threading
from isthmus.cli.app import main
atexit.register(lambda: print("torch" in sys.modules, threading.active_count()))
main(["data", "order", {str(path)!r}, "--step", "7", *sys.argv[1:]])
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False 1"
    assert "stage b at 32 px" in done.stdout
    done = subprocess.run([*command, "--keys"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "the file is missing" in done.stderr
    assert "row group" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_mix_of_sources_is_counted_and_set_beside_what_the_repeats_ask_for(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = order(capsys, recipe_file(tmp_path, sources), "--step", 0, "--steps", 12)
    one, two = found["mix"]
    counted = [row["source"] for step in found["steps"] for row in step["rows"]]
    assert [one["rows"], two["rows"]] == [counted.count(source) for source in sources]
    assert one["rows"] + two["rows"] == 6 * 8 + 6 * 16
    assert [one["rows_so_far"], two["rows_so_far"]] == [one["rows"], two["rows"]], (
        "these are all of its steps"
    )
    later = order(capsys, recipe_file(tmp_path, sources), "--step", 11, "--rank", 1)["mix"]
    assert [part["rows_so_far"] for part in later] == [one["rows"], two["rows"]]
    assert sum(part["rows"] for part in later) == 8
    assert (one["share_by_repeat"], two["share_by_repeat"]) == pytest.approx((2 / 3, 1 / 3))
    assert two["repeat"] == "1/2"


def test_a_run_is_told_with_its_rewinds_and_skips(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_file(tmp_path, sources)
    recipe = resolve(load_recipe(str(path)).recipe, "local")
    run = RunDirectory(tmp_path / "run")
    run.create(dump_recipe(recipe), {"id": "run", "name": "tiny", "backend": "local", "recipe_hash": "x"})
    before = order(capsys, "--run", run.uri, "--step", 4)
    assert before == order(capsys, path, "--step", 4), "a run that has no plan yet follows its recipe"

    fresh = view_recipe(recipe).describer.plan
    run.append_segment(fresh.segments[0].to_json())
    # Back to step 3, jumping over what steps 3 and 4 held.
    rewound = Plan(fresh.segments[:1])
    segment = rewound.next_segment(3, stage=0, global_batch_size=8, skipped=[(24, 40)])
    run.append_segment(segment.to_json())
    run.update_run_json(world_size=4, dataset_fingerprints=list(view_recipe(recipe).sources.fingerprints))
    after = order(capsys, "--run", run.uri, "--step", 3)
    assert after["steps"][0]["rows"] != order(capsys, path, "--step", 3)["steps"][0]["rows"]
    assert after["steps"][0]["segment"]["skipped"] == [[24, 40]]
    with loader_of(path, rewound.append(segment), start_step=3) as loader:
        keys = [
            row["key"] for row in order(capsys, "--run", run.uri, "--step", 3, "--keys")["steps"][0]["rows"]
        ]
        assert keys == next(loader).keys
    assert len(order(capsys, "--run", run.uri, "--step", 3, "--rank", 1)["steps"][0]["rows"]) == 2

    moved = shutil.copytree(sources[0], tmp_path / "moved")
    told = order(capsys, "--run", run.uri, "--step", 3, "--set", f"data.sources.0.uri={moved}")
    assert {row["source"] for row in told["steps"][0]["rows"]} <= {str(moved), sources[1]}
    with pytest.raises(DatasetMismatch, match="not the run's"):
        view_run(run, [f"data.sources.0.uri={make_latents(tmp_path / 'other', samples=40)}"])
    with pytest.raises(UsageError, match="order is its own"):
        view_run(run, ["seed=4"])


@pytest.mark.parametrize("key", ["id", None])
def test_rows_of_files_that_others_made_are_named_by_their_own_files(tmp_path: Path, key: str | None) -> None:
    files = tmp_path / "theirs"
    for number in range(3):
        rows = foreign.samples(20, first=20 * number)
        foreign.write(
            files / f"deep/{number}.parquet", foreign.table(rows, id=pa.array(range(number, 20 + number)))
        )
    settings = parse_settings(foreign.mapped(**{"columns.key": key}))
    index_files([str(files)], None, settings)
    dataset = open_dataset(str(files))
    plan = Plan((Segment(0, 0, 0, 8),))
    order = {"seed": 3, "lanes": 4, "shuffle_window": 16, "stages": [64], "plan": plan}
    describer = Describer([dataset], [1], **order)  # type: ignore[arg-type]
    with Loader([dataset], [1], **order) as loader:  # type: ignore[arg-type]
        for step in range(6):
            described = describer.step(step)
            assert describer.keys(described) == next(loader).keys
            assert {place.shard for place in described.rows} <= {
                f"deep/{number}.parquet" for number in range(3)
            }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--step", "0"], "name a recipe, or a run with --run"),
        (["{recipe}", "--step", "12"], "its steps are 0 to 11"),
        (["{recipe}", "--step", "-1"], "its steps are 0 to 11"),
        (["{recipe}", "--step", "8", "--steps", "5"], "no steps 8 to 12"),
        (["{recipe}", "--step", "0", "--rank", "2"], "no rank 2 of 2"),
        (["{recipe}", "--step", "0", "--rank", "0", "--world-size", "3"], "world sizes that do: 1, 2, 4"),
        (["{recipe}", "--step", "0", "--world-size", "2"], "add --rank"),
        (["{recipe}", "--step", "0", "--set", "data.sources.0.uri=/nowhere"], "no latent dataset here"),
    ],
)
def test_mistakes_are_one_line_with_a_hint(
    sources: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    path = recipe_file(tmp_path, sources)
    with pytest.raises(SystemExit) as ended:
        main(["data", "order", *(str(path) if a == "{recipe}" else a for a in arguments)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_text_for_people_names_step_rank_shard_and_source(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_file(tmp_path, sources)
    with pytest.raises(SystemExit):
        main(["data", "order", str(path), "--step", "6", "--rank", "1", "--keys"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 6 (row 7 of the metrics), stage b at 32 px, bucket ")
    assert lines[0].endswith("rank 1 of 2: 8 of 16 samples")
    assert lines[1].split()[:3] == ["position", "shard", "row"]
    assert len(lines) == 2 + 8 + 2
    assert ".32px.parquet" in lines[2]
    assert "sample-" in lines[2]
    assert lines[-1].startswith(f"source {sources[1]}: ")
