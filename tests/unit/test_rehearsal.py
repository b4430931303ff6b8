"""What a rehearsal makes of a recipe, and what it says of what happened; the rehearsal itself: tests/e2e/test_rehearse.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.core.recipe import Recipe, load_recipe, parse_recipe
from isthmus.core.recipe.dump import yaml_text
from isthmus.errors import UsageError
from isthmus.rehearsal.clouds import check_installed, roots
from isthmus.rehearsal.course import Wishes, planned
from isthmus.rehearsal.latents import make
from isthmus.rehearsal.report import Report, Strike, judge
from isthmus.rehearsal.shrink import Place, shrink
from isthmus.rehearsal.trainer import Course

SHIPPED = ("pixart-512", "quickstart", "sd3-medium", "sdxl-progressive")
FAMILIES = ("dit", "unet", "mmdit", "sana", "flux")


def place(recipe: Recipe) -> Place:
    """Somewhere in S3."""
    return Place(
        sources=tuple(f"s3://bucket/data{n}" for n in range(len(recipe.data.sources))),
        held_out=tuple(f"s3://bucket/held{n}" for n in range(len(recipe.validation.sources))),
        runs="s3://bucket/runs",
        settings={"region": "us-east-1"},
        offer={"backend": "sagemaker", "region": "us-east-1", "tier": "spot"},
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_made_small(name: str) -> None:
    recipe = load_recipe(name).recipe
    small = shrink(recipe, place(recipe), steps=24)
    made = small.recipe
    assert small.steps == 24
    assert made.model.family == recipe.model.family
    assert [stage.name for stage in made.stages] == [stage.name for stage in recipe.stages]
    assert [stage.objective for stage in made.stages] == [stage.objective for stage in recipe.stages]
    assert made.data.access == recipe.data.access
    assert made.compute.gpu == "none"
    assert made.compute.nodes * made.compute.gpus_per_node == 2
    assert [one.width for one in made.encoders.text] == [one.width for one in recipe.encoders.text]
    assert len({stage.resolution for stage in made.stages}) == len({s.resolution for s in recipe.stages})
    assert any("random latents" in change for change in small.changes)


@pytest.mark.parametrize("name", SHIPPED)
def test_its_latents_fit_it(name: str, tmp_path: Path) -> None:
    from isthmus.backends.preflight import check_data

    recipe = load_recipe(name).recipe
    here = [str(tmp_path / f"data{n}") for n in range(len(recipe.data.sources))]
    held = [str(tmp_path / f"held{n}") for n in range(len(recipe.validation.sources))]
    there = Place(
        sources=tuple(here), held_out=tuple(held), runs="runs", settings={}, offer={"backend": "sagemaker"}
    )
    small = shrink(recipe, there).recipe
    for number, folder in enumerate([*here, *held]):
        make(small, folder, number=number, samples=16)
    check_data(small, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_can_be_built_and_is_small(family: str) -> None:
    from isthmus.core.models.families import build_denoiser

    recipe = parse_recipe(yaml_text(recipe_data("data", family)), filename="x").recipe
    denoiser = build_denoiser(shrink(recipe, place(recipe)).recipe.model, 0)
    assert sum(parameter.numel() for parameter in denoiser.parameters()) < 2_000_000


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_that_was_made_small_can_be_built(name: str) -> None:
    from isthmus.core.models.families import build_denoiser

    recipe = load_recipe(name).recipe
    denoiser = build_denoiser(shrink(recipe, place(recipe)).recipe.model, 0)
    assert sum(parameter.numel() for parameter in denoiser.parameters()) < 5_000_000


def test_a_model_whose_configuration_comes_with_weights_is_refused() -> None:
    data = recipe_data("data", "dit")
    data["model"] = {"family": "dit", "init_from": "s3://bucket/pixart"}
    recipe = parse_recipe(yaml_text(data), filename="x").recipe
    with pytest.raises(UsageError, match=r"model\.init_from.*name model\.preset"):
        shrink(recipe, place(recipe))


def test_places_of_a_backend() -> None:
    recipe = load_recipe("sdxl-progressive").recipe
    assert roots(recipe, "sagemaker", "data")[0] == "s3://example-bucket/latents/photos-v3"
    assert roots(recipe, "azure", "runs") == ["az://runs@exampleaccount.blob.core.windows.net/sdxl"]
    assert roots(load_recipe("quickstart").recipe, "azure", "validation") == ["./quickstart/heldout"]


def test_what_is_planned() -> None:
    loaded = load_recipe("sdxl-progressive")
    steps, plans = planned(loaded, Wishes(backend="azure"))
    assert (steps, [(plan.kind, plan.step) for plan in plans]) == (24, [("evict", 8)])
    steps, plans = planned(loaded, Wishes(backend="azure", evict_at=30, kill_node=1))
    assert (steps, [(plan.kind, plan.step) for plan in plans]) == (42, [("evict", 30), ("kill-node", 34)])
    steps, plans = planned(loaded, Wishes(backend="azure", kill_node=0))
    assert [(plan.kind, plan.step) for plan in plans] == [("kill-node", 12)]
    with pytest.raises(
        UsageError, match=r"--kill-node: there is no node 2 \(the rehearsal has nodes 0 and 1"
    ):
        planned(loaded, Wishes(backend="azure", kill_node=2))
    with pytest.raises(UsageError, match="--evict-at"):
        planned(loaded, Wishes(backend="azure", evict_at=-1))
    with pytest.raises(UsageError, match="local cannot be rehearsed"):
        check_installed("local")


def test_a_course_survives_its_environment() -> None:
    course = Course(folder=Path("/somewhere"), pace=0.5, hold=(3, 9))
    assert Course.of(course.to_json()) == course


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from isthmus.cli.app import main
main(["rehearse", "quickstart", "--backend", {backend!r}])
"""


@pytest.mark.parametrize(
    ("backend", "module", "extras"),
    [
        ("sagemaker", "moto", "rehearse"),
        ("azure", "cryptography", "rehearse"),
        ("azure", "adlfs", "rehearse,azure"),
    ],
)
def test_a_missing_extra_is_one_line(backend: str, module: str, extras: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(module=module, backend=backend)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        f"error: a rehearsal on {backend} needs {module}, which is not installed",
        f"hint: pip install 'isthmus[{extras}]'",
    ]


def rows(*steps: int, loss: float = 1.0, start: float = 0.0) -> list[dict[str, Any]]:
    """Rows of the train metrics, a second each."""
    return [
        {"step": step, "loss": loss + step, "grad_norm": 1.0, "time": start + index}
        for index, step in enumerate(steps)
    ]


def report(strikes: list[Strike], events: list[dict[str, Any]], found: list[dict[str, Any]]) -> Report:
    """Of a run of four steps."""
    return judge(
        state="finished", cause=None, steps=4, events=events, rows=found, strikes=strikes, planned=1,
        backend="azure", run_id="r", jobs=("r-01", "r-02"), seconds=9.0,
    )  # fmt: skip


def event(type: str, time: float, **more: Any) -> dict[str, Any]:
    """An event of the run directory."""
    return {"type": type, "time": time, **more}


def test_an_eviction_that_is_survived() -> None:
    strike = Strike(kind="evict", step=2, job="r-01", at=2.5)
    events = [
        event("started", 0), event("checkpoint-committed", 3.0, step=2), event("started", 5),
        event("resumed", 6.0, step=2), event("finished", 9),
    ]  # fmt: skip
    found = report([strike], events, [*rows(1, 2), *rows(3, 4, start=7)])
    assert found.good
    assert (found.attempts, found.missing, found.repeated) == (2, (), ())
    (struck,) = found.struck
    assert (struck.checkpoint, struck.saved_s, struck.back_s, struck.redone) == (2, 0.5, 3.5, 0)
    assert "evicted after step 2: back from the checkpoint of step 2, committed 0.5 s after" in str(found)


def test_what_is_not_good() -> None:
    strike = Strike(kind="evict", step=2, job="r-01", at=2.5)
    resumed = event("resumed", 6.0, step=1)
    repeats = report([strike], [resumed], [*rows(1, 2), *rows(2, 3, 4, start=7)])
    assert (repeats.good, repeats.repeated) == (False, (2,))
    lost = report([strike], [resumed], rows(1, 2, 4))
    assert (lost.good, lost.missing) == (False, (3,))
    assert not report([], [], rows(1, 2, 3, 4)).good, "nothing was struck"
    assert not report([strike], [], rows(1, 2, 3, 4)).good, "it did not come back from a checkpoint"


def test_a_killed_node_takes_steps_with_it_which_must_be_the_same_again() -> None:
    strike = Strike(kind="kill-node", step=3, job="r-01", at=3.5, node=1)
    resumed = event("resumed", 6.0, step=1)
    found = report([strike], [resumed], [*rows(1, 2, 3), *rows(2, 3, 4, start=7)])
    assert found.good
    assert found.struck[0].redone == 2
    other = report([strike], [resumed], [*rows(1, 2, 3), *rows(2, 3, 4, start=7, loss=1.5)])
    assert (other.good, other.unequal) == (False, (2, 3))
