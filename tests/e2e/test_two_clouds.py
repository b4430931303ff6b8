"""One recipe, here and on both emulated clouds: the same figures, the same samples; evicted, and back; from one to the other."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import figures
from two_clouds import BACKENDS, Clouds, Laptop, open_clouds, until

from isthmus.rehearsal.trainer import VARIABLE, Course
from isthmus.storage.rundir import RunDirectory

pytestmark = pytest.mark.timeout(900)
SUPERVISED = ("--interval", "0.5", "--no-log")


@pytest.fixture(scope="module")
def clouds(tmp_path_factory: pytest.TempPathFactory, latents: dict[str, str]) -> Iterator[Clouds]:
    """Both, with the dataset. Slow: every job of this file really trains, in two containers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        open_clouds(tmp_path_factory.mktemp("clouds"), patch) as found,
    ):
        found.upload(latents["dit"])
        yield found


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    return Laptop(tmp_path)


@pytest.fixture(autouse=True)
def usual(clouds: Clouds) -> Iterator[None]:
    """Leaves the clouds as they were."""
    image = dict(clouds.image)
    yield
    clouds.image.clear()
    clouds.image.update(image)
    clouds.azure.quota["LowPriority"] = 1000
    clouds.azure.capacity["Standard_D4ds_v5"] = 1000


def keys_by_step(run: RunDirectory, ranks: int = 2) -> dict[int, list[str]]:
    """The keys of each step in the order of their positions in the global batch, as the ranks were given them."""
    placed: dict[int, dict[int, str]] = defaultdict(dict)
    for rank in range(ranks):
        for row in run.read_metrics(f"keys-rank{rank}", all_attempts=True):
            for position, key in zip(row["positions"], row["keys"], strict=True):
                assert placed[row["step"]].setdefault(position, key) == key
    return {step: [found[position] for position in sorted(found)] for step, found in sorted(placed.items())}


@pytest.mark.slow
def test_the_same_losses_and_samples_here_and_on_both_clouds(
    clouds: Clouds, laptop: Laptop, tmp_path: Path, latents: dict[str, str]
) -> None:
    clouds.image["ISTHMUS_RECORD_KEYS"] = "1"
    recipe = clouds.recipe(tmp_path, latents["dit"], stages__0__steps=12)
    here = ("--set", "compute.nodes=1", "--set", "compute.gpus_per_node=2")
    code, _, err = laptop.isthmus(
        "launch", str(recipe), "--backend", "local", "--run-id", "same-local", *here, ISTHMUS_RECORD_KEYS="1"
    )
    assert code == 0, err
    runs = {"local": RunDirectory(tmp_path / "runs" / "same-local")}
    for backend in BACKENDS:
        name = f"same-{backend}"
        code, out, err = laptop.isthmus(
            "launch", str(recipe), "--backend", backend, "--run-id", name, "--yes", "--follow"
        )
        assert code == 0, out + err
        assert clouds.job_names(backend, name) == [f"{name}-01"]
        runs[backend] = clouds.run(backend, name)
        (started,) = runs[backend].events("started")
        assert (started["nodes"], started["world_size"]) == (2, 2)
    seen = {name: figures(run.read_metrics("train", all_attempts=True)) for name, run in runs.items()}
    assert [step for step, _, _ in seen["local"]] == list(range(1, 13))
    assert seen["azure"] == seen["local"]
    assert seen["sagemaker"] == seen["local"]
    keys = {name: keys_by_step(run) for name, run in runs.items()}
    assert sorted(keys["local"]) == list(range(1, 13))
    assert {len(found) for found in keys["local"].values()} == {8}
    assert keys["azure"] == keys["local"]
    assert keys["sagemaker"] == keys["local"]
    # And what is described without training, from the store of one cloud, is what was delivered in the other.
    words = ("data", "order", "--run", runs["azure"].uri, "--step", "6", "--keys", "--json")
    code, out, err = laptop.isthmus(*words)
    assert code == 0, err
    rows = sorted(json.loads(out)["steps"][0]["rows"], key=lambda row: row["position"])
    assert keys["sagemaker"][7] == [row["key"] for row in rows]


class Evictor:
    """Evicts a run's newest job so many times, at moments that chance chooses."""

    def __init__(self, clouds: Clouds, backend: str, run_id: str, times: int, seed: int) -> None:
        self.clouds, self.backend, self.run_id, self.times = clouds, backend, run_id, times
        self.chance = random.Random(seed)
        self.moments: list[float] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._evict, daemon=True)

    def _evict(self) -> None:
        run = self.clouds.run(self.backend, self.run_id)
        seen = 0
        while len(self.moments) < self.times:
            while (begun := len(run.events("started"))) <= seen:
                if self.over.wait(0.2):
                    return
            longest = 15.0
            if len(self.moments) % 2:
                # Every other one shall meet a training run: the first seconds of a start are imports.
                attempt, deadline = run.events("started")[-1]["attempt"], time.monotonic() + 60
                while not self._trains(run, attempt) and time.monotonic() < deadline:
                    if self.over.wait(0.5):
                        return
                longest = 5.0
            if self.over.wait(self.chance.uniform(0.0, longest)):
                return
            at = time.time()
            if self.clouds.strike(self.backend, self.clouds.job_names(self.backend, self.run_id)[-1]):
                self.moments.append(at)
            seen = begun

    @staticmethod
    def _trains(run: RunDirectory, attempt: int) -> bool:
        """Whether the attempt has begun to train: from a checkpoint it says so, from the first step its figures do."""
        told = any(event["attempt"] == attempt for event in run.events("resumed"))
        return told or any(row["attempt"] == attempt for row in run.read_metrics("train"))

    def __enter__(self) -> Evictor:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(30)


def evicted(
    clouds: Clouds, laptop: Laptop, folder: Path, local: str, backend: str, times: int, steps: int
) -> RunDirectory:
    """A run that is evicted so many times under `supervise`, and ends; nothing is lost or done twice."""
    run_id = f"evicted{times}-{backend}"
    (folder / "course").mkdir()
    clouds.image |= {
        "ISTHMUS_TRAINER_MODULE": "isthmus.rehearsal.trainer",
        VARIABLE: Course(folder=folder / "course", pace=0.1).to_json(),
        # An object for each step and rank, where somebody reads them.
        "ISTHMUS_RECORD_KEYS": str(int(times < 10)),
    }
    recipe = clouds.recipe(folder, local, stages__0__steps=steps, checkpoint__every=1000, checkpoint__keep=2)
    code, out, err = laptop.isthmus("launch", str(recipe), "--backend", backend, "--run-id", run_id, "--yes")
    assert code == 0, out + err
    began, began_at = time.monotonic(), time.time()
    with Evictor(clouds, backend, run_id, times, seed=times) as evictor:
        run = clouds.run(backend, run_id)
        try:
            code, out, err = laptop.isthmus("supervise", run_id, *SUPERVISED, timeout=60 * (times + 5))
        except AssertionError as error:
            told = "\n".join(f"{event['time'] - began_at:8.1f} {event}" for event in run.events()[-25:])
            struck = [f"{at - began_at:.1f}" for at in evictor.moments]
            raise AssertionError(f"{error}\nstruck at {struck}; events:\n{told}") from None
    assert code == 0, (out + err, [event for event in run.events() if event["type"] == "failed"])
    assert len(evictor.moments) == times, f"the run was over after {len(evictor.moments)} evictions"
    rows = run.read_metrics("train", all_attempts=True)
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), "a step was lost or repeated"
    if times < 10:
        assert sorted(keys_by_step(run)) == list(range(1, steps + 1))
    grace = 30 if backend == "azure" else 120
    commits = [event["time"] for event in run.events("checkpoint-committed")]
    starts = [event["time"] for event in run.events("started")]
    taken = []
    for at in evictor.moments:
        following = min((start for start in starts if start > at), default=float("inf"))
        # None where the eviction met a start: there was nothing new to save.
        taken += [commit - at for commit in commits if at <= commit < following][:1]
    preempted = len(run.events("preempted"))
    training = len({event["step"] for event in run.events("resumed")})
    took = time.monotonic() - began
    print(
        f"{backend}: {times} evictions, {training} of them in training, {preempted} said so, {len(run.events('started'))} attempts,"
        f" {len(clouds.job_names(backend, run_id))} jobs, {took:.0f} s; committed after the signal:"
        f" {', '.join(f'{one:.1f}' for one in taken)} s",
        flush=True,
    )
    assert len(taken) >= times // 3, taken
    assert all(seconds < grace for seconds in taken), taken
    return run


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_evictions_in_a_row_lose_and_repeat_no_step(
    clouds: Clouds, laptop: Laptop, tmp_path: Path, latents: dict[str, str], backend: str
) -> None:
    evicted(clouds, laptop, tmp_path, latents["dit"], backend, 3, 400)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("backend", BACKENDS)
def test_twenty_evictions_in_a_row_lose_and_repeat_no_step(
    clouds: Clouds, laptop: Laptop, tmp_path: Path, latents: dict[str, str], backend: str
) -> None:
    evicted(clouds, laptop, tmp_path, latents["dit"], backend, 20, 1600)


@pytest.mark.slow
def test_from_azure_to_sagemaker(
    clouds: Clouds, laptop: Laptop, tmp_path: Path, latents: dict[str, str]
) -> None:
    """Without quota a launch goes elsewhere; a run that lives in Blob stays, says why, and is carried over."""
    recipe = str(clouds.recipe(tmp_path, latents["dit"], stages__0__steps=12))
    both = ("--backend", "azure,sagemaker")
    clouds.azure.quota["LowPriority"] = 0
    code, out, err = laptop.isthmus("launch", recipe, *both, "--run-id", "elsewhere", "--yes", "--follow")
    assert code == 0, out + err
    assert "note: not azure: " in err, err
    assert "quota" in err
    assert clouds.job_names("azure", "elsewhere") == []
    assert clouds.job_names("sagemaker", "elsewhere") == ["elsewhere-01"]

    # Begun on azure; then its quota is gone.
    clouds.azure.quota["LowPriority"] = 1000
    (tmp_path / "course").mkdir()
    course = Course(folder=tmp_path / "course", hold=(5,))
    clouds.image |= {"ISTHMUS_TRAINER_MODULE": "isthmus.rehearsal.trainer", VARIABLE: course.to_json()}
    code, out, err = laptop.isthmus("launch", recipe, *both, "--run-id", "moves", "--yes")
    assert code == 0, err
    assert "note: not later to sagemaker: sagemaker keeps its runs at s3://, this one is at az://" in err
    assert "isthmus runs copy moves --to s3://example-bucket/runs/moves" in err
    until("training holds", lambda: course.at(5).exists())
    assert clouds.strike("azure", "moves-01")
    until("it ended", lambda: clouds.azure.job("moves-01").over)
    course.struck(5).touch()
    # Nothing to be had here, and it cannot go there: it is tried here again, and what speaks against the other is said.
    clouds.azure.capacity["Standard_D4ds_v5"] = 0
    run = clouds.run("azure", "moves")
    assert run.checkpoints()[-1] == 6
    code, out, err = laptop.isthmus("supervise", "moves", "--once")
    assert code == 0, err
    assert clouds.job_names("azure", "moves") == ["moves-01", "moves-02"]
    code, _, err = laptop.isthmus("stop", "moves")
    assert code == 0, err
    target = "s3://example-bucket/runs/moves"
    code, out, err = laptop.isthmus("runs", "copy", "moves", "--to", target, "--dry-run")
    assert code == 0, err
    code, out, err = laptop.isthmus("runs", "copy", "moves", "--to", target)
    assert code == 0, err
    code, out, err = laptop.isthmus("resume", target, "--backend", "sagemaker", "--yes", "--follow")
    assert code == 0, out + err
    rows = RunDirectory(target).read_metrics("train", all_attempts=True)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert figures(rows) == figures(clouds.run("sagemaker", "elsewhere").read_metrics("train"))
