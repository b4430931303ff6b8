"""Encoding as a job: here and on both emulated clouds the same bytes; evicted half-way, and back; stopped and resumed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from encoding import for_encoders, make_folder, make_models, make_parquet, make_tars, put, tree
from two_clouds import BACKENDS, BUCKET, Clouds, Laptop, open_clouds, until

from isthmus.storage.filesystems import filesystem
from isthmus.storage.rundir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CHANGES: dict[str, Any] = {
    "stages__0__resolution": 32,
    "data__buckets": {"step": 8, "min_ratio": 0.5, "max_ratio": 2.0},
    "validation": {"prompts": ["a red heart", "a dog"]},
}


class World:
    """Both clouds with the pictures and models in each one's store."""

    def __init__(self, clouds: Clouds, folder: Path) -> None:
        self.clouds, self.folder = clouds, folder
        self.roots = {
            "sagemaker": f"s3://{BUCKET}/encode",
            "azure": clouds.azure.container_uri("encode", "all").rstrip("/"),
            "local": str(folder / "here"),
        }
        make_models(folder / "here" / "models")
        make_tars(folder / "here" / "tars", 12, 16)
        make_parquet(folder / "here" / "parquet", 3, 12)
        make_folder(folder / "here" / "pictures", 20)
        for backend in BACKENDS:
            put(folder / "here", self.roots[backend])

    def words(self, backend: str, source: str, dest: str, recipe: Path, run_id: str, *more: str) -> list[str]:
        root = self.roots[backend]
        words = ["data", "encode", f"{root}/{source}", f"{root}/{dest}", "--recipe", str(recipe)]
        words += ["--backend", backend, "--run-id", run_id, "--unit", "1 KB", "--batch-size", "8", "--yes"]
        words += ["--ranks", "2"] if backend == "local" else []
        return [*words, *for_encoders(f"{root}/models"), *more]

    def tree(self, backend: str, dest: str) -> dict[str, bytes]:
        return tree(f"{self.roots[backend]}/{dest}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("encode-jobs")
    with pytest.MonkeyPatch.context() as patch, open_clouds(folder, patch) as clouds:
        clouds.image |= {"ISTHMUS_LOOK_EVERY_S": "0.5", "HF_HUB_OFFLINE": "1"}
        yield World(clouds, folder)


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    return Laptop(tmp_path)


@pytest.fixture(scope="module")
def here(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """What each source becomes on this machine, by two processes."""
    folder = tmp_path_factory.mktemp("laptop")
    laptop, recipe = Laptop(folder), world.clouds.recipe(folder, "unused", **CHANGES)
    for source in ("tars", "parquet", "pictures"):
        words = world.words("local", source, f"latents-{source}", recipe, f"local-{source}")
        code, out, err = laptop.isthmus(*words, OMP_NUM_THREADS="1", ISTHMUS_LOOK_EVERY_S="0.2")
        assert code == 0, out + err
        assert "images/s" in out
        assert f"next: isthmus data verify {world.roots['local']}/latents-{source}" in out
    found = {source: world.tree("local", f"latents-{source}") for source in ("tars", "parquet", "pictures")}
    assert json.loads(found["tars"]["manifest.json"])["samples"] == 12 * 16 - 14
    assert json.loads(found["parquet"]["manifest.json"])["samples"] == 36 - 2
    assert json.loads(found["pictures"]["manifest.json"])["samples"] == 20 - 1
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_kind_of_source_gives_the_bytes_of_this_machine(
    world: World, here: dict[str, dict[str, bytes]], laptop: Laptop, tmp_path: Path, backend: str
) -> None:
    recipe = world.clouds.recipe(tmp_path, "unused", **CHANGES)
    for source in here:
        run_id = f"{backend}-{source}"
        words = world.words(backend, source, f"latents-{source}", recipe, run_id, "--follow")
        code, out, err = laptop.isthmus(*words)
        assert code == 0, out + err
        assert f"source  {world.roots[backend]}/{source}" in out
        assert world.tree(backend, f"latents-{source}") == here[source], source
    code, out, _ = laptop.isthmus("status", f"{backend}-tars", "--json")
    told = json.loads(out)
    assert (code, told["state"]) == (0, "finished")
    assert told["encode"]["written"] == 12 * 16 - 14
    assert told["encode"]["reasons"] == {"unreadable": 14}
    run = world.clouds.run(backend, f"{backend}-tars")
    assert len(run.read_run_json()["dataset_fingerprints"]) == 1
    # The same run again has nothing to do; another run is refused before anything is submitted.
    words = world.words(backend, "tars", "latents-tars", recipe, f"{backend}-other")
    code, _, err = laptop.isthmus(*words)
    assert (code, "holds a dataset already" in err) == (3, True), err


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_source_that_is_an_input_of_the_job_gives_the_same_bytes(
    world: World, here: dict[str, dict[str, bytes]], laptop: Laptop, tmp_path: Path, backend: str
) -> None:
    recipe = world.clouds.recipe(tmp_path, "unused", **CHANGES)
    for source, access in (("tars", "mount"), ("pictures", "mount"), ("parquet", "download")):
        run_id, dest = f"{backend}-{access}-{source}", f"latents-{access}-{source}"
        code, out, err = laptop.isthmus(
            *world.words(backend, source, dest, recipe, run_id, "--access", access, "--follow")
        )
        assert code == 0, out + err
        assert world.tree(backend, dest) == here[source], source
        section = json.loads(
            json.dumps(world.clouds.run(backend, run_id).read_run_json()["recipe"]["encode"])
        )
        assert (section["access"], section["source"]) == (access, f"{world.roots[backend]}/{source}")
    if backend == "sagemaker":
        return
    # A copy that is made anew for each attempt goes on where the one before ended.
    run_id, dest = "evicted-download", "latents-evicted-download"
    code, out, err = laptop.isthmus(
        *world.words(backend, "tars", dest, recipe, run_id, "--access", "download")
    )
    assert code == 0, out + err
    supervisor = laptop.start("supervise", run_id, "--interval", "0.5", "--no-log")
    try:
        until("a unit is done", lambda: _done(f"{world.roots[backend]}/{dest}"), every_s=0.02)
        assert world.clouds.strike(backend, world.clouds.job_names(backend, run_id)[0])
        out, err = supervisor.communicate(timeout=300)
    finally:
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.communicate()
    assert supervisor.returncode == 0, out + err
    assert world.tree(backend, dest) == here["tars"]
    _went_on(world.clouds.run(backend, run_id))


@pytest.mark.parametrize("backend", BACKENDS)
def test_evicted_half_way_it_comes_back_to_the_same_bytes(
    world: World, here: dict[str, dict[str, bytes]], laptop: Laptop, tmp_path: Path, backend: str
) -> None:
    clouds, run_id, dest = world.clouds, f"evicted-{backend}", "latents-evicted"
    recipe = clouds.recipe(tmp_path, "unused", **CHANGES)
    code, out, err = laptop.isthmus(*world.words(backend, "tars", dest, recipe, run_id))
    assert code == 0, out + err
    supervisor = laptop.start("supervise", run_id, "--interval", "0.5", "--no-log")
    try:
        done = until("a unit is done", lambda: _done(f"{world.roots[backend]}/{dest}"), every_s=0.02)
        assert clouds.strike(backend, clouds.job_names(backend, run_id)[0])
        out, err = supervisor.communicate(timeout=300)
    finally:
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.communicate()
    assert supervisor.returncode == 0, out + err
    assert world.tree(backend, dest) == here["tars"]
    run = clouds.run(backend, run_id)
    kinds = [event["type"] for event in run.events() if event["type"] not in ("note", "metered")]
    assert kinds.count("started") == 2, kinds
    assert kinds[-1] == "finished", kinds
    assert 0 < done < 12
    _went_on(run)


def test_stopped_here_and_resumed_it_ends_in_the_same_bytes(
    world: World, here: dict[str, dict[str, bytes]], laptop: Laptop, tmp_path: Path
) -> None:
    recipe, dest = world.clouds.recipe(tmp_path, "unused", **CHANGES), "latents-stopped"
    words = world.words("local", "tars", dest, recipe, "stopped", "--detach")
    code, out, err = laptop.isthmus(*words, OMP_NUM_THREADS="1")
    assert code == 0, out + err
    until("a unit is done", lambda: _done(f"{world.roots['local']}/{dest}"), every_s=0.02)
    code, out, err = laptop.isthmus("stop", "stopped")
    assert (code, out.strip()) == (0, "stopped stopped"), out + err
    code, out, err = laptop.isthmus("resume", "stopped", "--set", "encode.batch_size=4")
    assert (code, "encode.batch_size" in err) == (2, True), err
    code, out, err = laptop.isthmus("resume", "stopped", "--yes", OMP_NUM_THREADS="1")
    assert code == 0, out + err
    assert world.tree("local", dest) == here["tars"]
    _went_on(RunDirectory(tmp_path / "runs" / "stopped"))


def test_a_budget_ends_it_and_a_killed_rank_is_told(
    world: World, here: dict[str, dict[str, bytes]], laptop: Laptop, tmp_path: Path
) -> None:
    recipe = world.clouds.recipe(tmp_path, "unused", **CHANGES)
    words = world.words("local", "tars", "latents-capped", recipe, "capped", "--set", "budget.max_hours=1e-6")
    code, out, err = laptop.isthmus(*words, OMP_NUM_THREADS="1", ISTHMUS_LOOK_EVERY_S="0.2")
    assert code == 4, out + err
    assert "budget.max_hours" in out + err
    code, out, err = laptop.isthmus("cost", "run", "capped", "--offline")
    assert (code, "step" in out, "capped: " in out) == (0, False, True), out + err
    code, out, err = laptop.isthmus(
        "resume", "capped", "--set", "budget.max_hours=10", "--yes", OMP_NUM_THREADS="1"
    )
    assert code == 0, out + err
    assert world.tree("local", "latents-capped") == here["tars"]
    code, out, err = laptop.isthmus("cost", "run", "capped", "--offline")
    assert (code, "192 pictures of about 192 (100%)" in out) == (0, True), out + err
    words = world.words("local", "tars", "latents-killed", recipe, "killed", "--detach")
    code, out, err = laptop.isthmus(*words, OMP_NUM_THREADS="1")
    assert code == 0, out + err
    until("a unit is done", lambda: _done(f"{world.roots['local']}/latents-killed"), every_s=0.02)
    found = subprocess.run(
        ["pgrep", "-f", f"isthmus.core.encode.rank .*{tmp_path}/runs/killed"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    subprocess.run(["kill", "-9", found[-1]], check=True)
    until("it has ended", lambda: _state(laptop, "killed") not in ("running", "pending"))
    _, out, _ = laptop.isthmus("status", "killed", "--json")
    told = json.loads(out)
    assert told["state"] == "failed"
    assert "was killed by signal 9" in told["cause"]


def _state(laptop: Laptop, run: str) -> str:
    return str(json.loads(laptop.isthmus("status", run, "--json")[1])["state"])


def _done(dest: str) -> int:
    """Units that are done; 0 when the folder is not there (yet)."""
    store, path = filesystem(dest)
    store.invalidate_cache()
    try:
        names = store.ls(f"{path}/_encode", detail=False)
    except FileNotFoundError:
        return 0
    return sum("/unit-" in str(name) for name in names)


def _went_on(run: RunDirectory) -> None:
    """The second attempt did not encode again what was done."""
    rows = run.read_metrics("encode", all_attempts=True)
    last = rows[-1]
    assert last["attempt"] == 2
    assert last["written"] == 12 * 16 - 14
    log = [row for row in rows if row["attempt"] == 2 and row is not last]
    assert all(row["pictures"] - row["written"] - row["rejected"] > 0 for row in log), log
