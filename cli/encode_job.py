"""``isthmus data encode --backend``: the encoding as a job, with the launch's own path, plan and exit codes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.backends.prepare import Launch
    from isthmus.backends.spec import Finding
    from isthmus.core.recipe import LoadedRecipe
    from isthmus.cost.encoding import EncodeEstimate


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
    from isthmus.errors import IsthmusError

    try:
        found = encode_estimate_of(launch)
    except IsthmusError:
        return ""
    if found.usd is None or found.usd_interval is None:
        return ""
    low, high = found.usd_interval
    return (
        f", about ${found.usd:,.2f} in all (${low:,.2f} to ${high:,.2f}) and {found.hours:,.1f} h for about "
        f"{found.pictures:,} pictures, {found.images_per_s:,.0f} images/s: {found.basis}"
    )


def encode_estimate_of(launch: Launch, *, offline: bool = False) -> EncodeEstimate:
    """Of the whole encoding, at the price that the launch counts with.

    Args:
        offline: count only pictures that lie on this machine.

    Raises:
        UsageError: nobody has measured these encoders or machines; IsthmusError: the pictures cannot be counted from here.
    """
    from isthmus.cost.encoding import encode_estimate
    from isthmus.errors import UsageError
    from isthmus.storage.filesystems import is_local

    recipe, gpus, price = launch.job.recipe, launch.job.world_size, launch.usd_per_hour
    section = recipe.encode
    assert section is not None
    source = str(section.source)
    if encode_estimate(recipe, 1, gpus=gpus, usd_per_hour=price) is None:
        raise UsageError(
            f"nobody has measured how fast {recipe.compute.gpu} runs these encoders; the job itself keeps the caps"
        )
    if offline and source != "emoji" and not is_local(source):
        raise UsageError(f"a dry run does not count the pictures of {source}; the launch does")
    pictures = _pictures(source, recipe.data.pictures.model_dump_json())
    found = encode_estimate(recipe, pictures, gpus=gpus, usd_per_hour=price)
    assert found is not None
    return found


@lru_cache(maxsize=8)
def _pictures(source: str, columns: str) -> int:
    """How many there are, about: looked at once, though plan, budget and run directory each want it."""
    from isthmus.core.encode.sources import open_source
    from isthmus.core.recipe.pictures import Pictures
    from isthmus.errors import UsageError

    try:
        survey = open_source(source, Pictures.model_validate_json(columns)).survey()
    except ImportError:
        raise UsageError(f"without pillow the pictures of {source} are not counted here") from None
    return survey.sizes.total() if survey.pictures is None else survey.pictures


def encode_budget(launch: Launch, *, offline: bool) -> list[Finding]:
    """What the estimate says of the caps. Raises IsthmusError where there is none."""
    from isthmus.cost.budget import encode_findings

    found = encode_estimate_of(launch, offline=offline)
    return encode_findings(launch.job.source.budget, found, _where(launch))


def encode_record(launch: Launch) -> dict[str, Any]:
    """What of the estimate is kept with the run, to be held against what it has cost. Raises IsthmusError."""
    found, offer = encode_estimate_of(launch), launch.offer
    return {
        "backend": launch.backend.name,
        **({"region": offer.region, "tier": offer.tier, "sku": offer.sku} if offer is not None else {}),
        "nodes": launch.job.recipe.compute.nodes,
        "usd": found.usd,
        "usd_interval": found.usd_interval,
        "hours": found.hours,
        "hours_interval": found.hours_interval,
        "pictures": found.pictures,
        "images_per_s": found.images_per_s,
        "usd_per_hour": launch.usd_per_hour,
        "basis": found.basis,
    }


def _where(launch: Launch) -> str:
    compute, offer = launch.job.recipe.compute, launch.offer
    told = [offer.region, offer.tier, f"{compute.nodes} x {offer.sku}"] if offer is not None else []
    return " ".join([launch.backend.name, *(word for word in told if word)])
