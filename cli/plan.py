"""The plan that is shown before a launch: what will run, where, on what data, where it is written, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.backends.prepare import Launch
    from isthmus.core.recipe import Recipe


def plan_text(launch: Launch, prices: str = "") -> str:
    """A few lines for people.

    Args:
        prices: a file of the user's own prices.
    """
    from isthmus.backends.places import uris
    from isthmus.core.recipe.summary import summary, summary_text

    job, compute = launch.job, launch.job.recipe.compute
    kind = "process" if compute.gpu == "none" else compute.gpu
    plural = "es" if kind == "process" and compute.gpus_per_node > 1 else ""
    places = [place for source in job.recipe.data.sources for place in uris(source)]
    again = f", attempt {job.attempt}" if job.attempt > 1 else ""
    nodes = f"{compute.nodes} node{'s' if compute.nodes > 1 else ''}"
    lines = [
        f"run {job.run_id}{again}",
        f"  where   {_where(launch)}{nodes} x {compute.gpus_per_node} {kind}{plural}, world size {job.world_size}",
        *(
            encoding_lines(job.recipe)
            or [summary_text(summary(job.recipe)), f"  data    {', '.join(places)}"]
        ),
        f"  output  {job.run_uri}",
    ]
    if len(launch.destinations) > 1:
        told = [f"{number}. {place}" for number, place in enumerate(launch.destinations, 1)]
        lines.append(f"  offers  {'; '.join(told)}; this is {launch.choice + 1}")
    lines += _cost(launch, prices)
    lines += [
        f"  changed {path}: {before} -> {now}" for path, (before, now) in (launch.changes or {}).items()
    ]
    return "\n".join(lines)


def encoding_lines(recipe: Recipe) -> list[str]:
    """What an encode job reads, makes and writes; nothing of a training run."""
    section = recipe.encode
    if section is None:
        return []
    encoders = ", ".join([recipe.encoders.autoencoder.source, *(one.source for one in recipe.encoders.text)])
    resolutions = ", ".join(str(size) for size in sorted({stage.resolution for stage in recipe.stages}))
    return [
        f"  source  {section.source}" + (f", by {section.access}" if section.access != "stream" else ""),
        f"  encode  {resolutions} px with {encoders}, {section.precision}, {section.batch_size} pictures at once",
        f"  dataset {section.dest}",
    ]


def _where(launch: Launch) -> str:
    offer = launch.offer
    if offer is None or launch.backend.name == "local":
        return f"{launch.backend.name}, "
    words = [launch.backend.name, offer.region, offer.sku, offer.tier.replace("_", "-")]
    return ", ".join(word for word in words if word) + ", "


def _cost(launch: Launch, prices: str) -> list[str]:
    price = launch.usd_per_hour
    budget = launch.job.recipe.budget
    caps = [f"at most {budget.max_hours:g} h"] if budget.max_hours is not None else []
    caps += [f"at most ${budget.max_usd:,.2f}"] if budget.max_usd is not None else []
    capped = f" ({', '.join(caps)})" if caps else ""
    if price is None:
        return [f"  budget  {', '.join(caps)}"] if caps else []
    return [f"  price   ${price:,.2f} an hour{total_text(launch, prices)}{capped}"]


def total_text(launch: Launch, prices: str = "") -> str:
    """What the whole run is estimated at, where the estimator knows the model and the machine; else nothing."""
    from isthmus.cli.budgeting import estimate_of
    from isthmus.errors import IsthmusError

    if launch.job.recipe.encode is not None:
        from isthmus.cli.encode_job import encode_total

        return encode_total(launch)
    offer = launch.offer
    if offer is None or launch.backend.name == "local":
        return ""
    try:
        found = estimate_of(launch, prices)
    except IsthmusError:
        return ""
    hours = f"{found.hours:,.1f} h"
    if found.usd is None or found.usd_interval is None:
        return f", about {hours}"
    low, high = found.usd_interval
    return f", about ${found.usd:,.0f} in all (${low:,.0f} to ${high:,.0f}), {hours}; see `isthmus cost`"
