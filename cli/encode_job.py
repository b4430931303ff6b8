"""``isthmus data encode --backend``: the encoding as a job, with the launch's own path, plan and exit codes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.backends.prepare import Launch
    from isthmus.core.recipe import LoadedRecipe


def job_recipe(
    recipe: str,
    overrides: Sequence[str],
    section: dict[str, Any],
    *,
    nodes: int | None,
    here: int | None,
) -> LoadedRecipe:
    """The recipe of an encode job: the user's, with `encode`, and a name that says so.

    Args:
        section: of `encode`.
        nodes: instead of compute.nodes.
        here: processes, on this machine; None: another machine's, as the recipe's compute says.
    """
    from dataclasses import replace
    from json import dumps

    from isthmus.core.recipe import load_recipe

    own = [f"encode={dumps(section, ensure_ascii=False)}"]
    if nodes is not None:
        own.append(f"compute.nodes={nodes}")
    if here is not None:
        from isthmus.backends.local.checks import cuda_devices

        own += ["compute.nodes=1", f"compute.gpus_per_node={here}"]
        if not cuda_devices():
            own.append("compute.gpu=none")
    loaded = load_recipe(recipe, [*overrides, *own])
    name = f"{loaded.recipe.name[:41].rstrip('-')}-encode"
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"name": name}))


def run_job(
    loaded: LoadedRecipe,
    backend: str,
    *,
    run_id: str,
    dry_run: bool,
    format: str,
    detach: bool,
    follow: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Launches it; as `isthmus launch` does from there on."""
    from isthmus.backends.destinations import destinations
    from isthmus.backends.prepare import launch_folder, prepare
    from isthmus.cli.following import run_launch
    from isthmus.cli.launch import named, show
    from isthmus.cli.pricing import price_function
    from isthmus.errors import UsageError

    names, price = named(backend), price_function()

    def make(choice: int) -> Launch:
        return prepare(
            loaded, backends=names, choice=choice, run_id=run_id or None, detach=detach, price=price,
            offline=dry_run,
        )  # fmt: skip

    count = len(destinations(loaded.recipe, names))
    if dry_run:
        show(make, count, format, as_json=as_json)
        return
    if format != "text":
        raise UsageError("--format belongs to --dry-run", hint="--json prints what a launch did")
    run_launch(make, count, launch_folder(loaded), yes=yes, as_json=as_json, follow=follow)


def encode_total(launch: Launch) -> str:
    """What an encode job is estimated at, where its pictures can be counted from here and its encoders are known."""
    from isthmus.core.encode.sources import open_source
    from isthmus.cost.encoding import encode_estimate
    from isthmus.errors import IsthmusError

    recipe = launch.job.recipe
    section = recipe.encode
    assert section is not None
    if launch.usd_per_hour is None or encode_estimate(recipe, 1, gpus=1, usd_per_hour=None) is None:
        return ""
    try:
        survey = open_source(str(section.source), recipe.data.pictures).survey()
    except (IsthmusError, ImportError):
        return ""  # no pillow here, or a store that serves the job alone
    pictures = survey.sizes.total() if survey.pictures is None else survey.pictures
    found = encode_estimate(recipe, pictures, gpus=launch.job.world_size, usd_per_hour=launch.usd_per_hour)
    assert found is not None
    assert found.usd is not None
    assert found.usd_interval is not None
    low, high = found.usd_interval
    return (
        f", about ${found.usd:,.2f} in all (${low:,.2f} to ${high:,.2f}) and {found.hours:,.1f} h for about "
        f"{pictures:,} pictures, {found.images_per_s:,.0f} images/s: {found.basis}"
    )
