"""``isthmus data order``: which rows of which shards a step holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from isthmus.core.train.describing import OrderView
    from isthmus.storage.stream.describe import StepDescription

_RECIPE = typer.Argument("", metavar="[RECIPE]", help="A file, or a name from `isthmus recipes list`.")
_OVERRIDES = typer.Option(
    [],
    "--set",
    metavar="PATH=VALUE",
    help="Override a field, as in data.sources.0.uri=./data. May be repeated.",
)


def register(group: typer.Typer) -> None:
    """Add the command to `isthmus data`."""
    group.command("order")(order)


def order(
    recipe: str = _RECIPE,
    run: str = typer.Option("", "--run", help="Instead of a recipe: a run, whose rewinds and skips count."),
    step: int = typer.Option(..., "--step", help="Global step, 0 for the first: `step` - 1 of the metrics."),
    steps: int = typer.Option(1, "--steps", help="So many steps from there on."),
    rank: int | None = typer.Option(None, "--rank", help="Only this rank's part of the global batch."),
    world_size: int | None = typer.Option(
        None, "--world-size", help="Ranks; default: the recipe's or the run's."
    ),
    keys: bool = typer.Option(False, "--keys", help="Read the samples' keys from the shards, too."),
    backend: str = typer.Option(
        "local", "--backend", help="Whose places of the recipe to read the index from."
    ),
    overrides: list[str] = _OVERRIDES,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Say which rows of which shards a step holds, from the index alone: nothing is read ahead, nothing is trained.

    Example: isthmus data order my.yaml --step 1200 --rank 3
    """
    from isthmus.errors import UsageError

    if bool(recipe) == bool(run):
        raise UsageError("name a recipe, or a run with --run", hint="isthmus data order my.yaml --step 0")
    if world_size is not None and rank is None:
        raise UsageError(
            "--world-size is of a rank's part", hint="add --rank, or leave it out for the global batch"
        )
    view = _of_run(run, overrides) if run else _of_recipe(recipe, overrides, backend)
    found = view.steps(step, steps, rank=rank, world_size=world_size)
    ranks = (world_size or view.world_size) if rank is not None else None
    described = [_step(view, one, view.describer.keys(one) if keys else None) for one in found]
    result = {"rank": rank, "world_size": ranks, "steps": described, "mix": view.mix(found)}
    emit(result, as_json=as_json, text=lambda: _text(result))


def _of_recipe(recipe: str, overrides: list[str], backend: str) -> OrderView:
    from isthmus.core.recipe import load_recipe, resolve
    from isthmus.core.train.describing import view_recipe

    return view_recipe(resolve(load_recipe(recipe, overrides).recipe, backend))


def _of_run(run: str, overrides: list[str]) -> OrderView:
    from isthmus.backends.runs import find
    from isthmus.core.train.describing import view_run
    from isthmus.storage.rundir import RunDirectory

    return view_run(RunDirectory.open(find(run).run_uri), overrides)


def _step(view: OrderView, one: StepDescription, keys: list[str] | None) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [asdict(row) for row in one.rows]
    for row, key in zip(rows, keys or [], strict=False):
        row["key"] = key
    return {
        "step": one.step,
        "metrics_step": one.step + 1,
        "stage": one.stage,
        "stage_name": view.recipe.stages[one.stage].name,
        "resolution": one.resolution,
        "bucket": one.bucket,
        "global_batch_size": one.segment.global_batch_size,
        "segment": one.segment.to_json(),
        "rows": rows,
    }


def _text(result: dict[str, Any]) -> str:
    lines = []
    for step in result["steps"]:
        where = "" if result["rank"] is None else f", rank {result['rank']} of {result['world_size']}"
        lines.append(
            f"step {step['step']} (row {step['metrics_step']} of the metrics), stage {step['stage_name']} at"
            f" {step['resolution']} px, bucket {step['bucket']}{where}:"
            f" {len(step['rows'])} of {step['global_batch_size']} samples"
        )
        names = ["position", "shard", "row_group", "row", "epoch", "appearance", "caption"]
        names += ["key"] if step["rows"] and "key" in step["rows"][0] else []
        names += ["source"] if len(result["mix"]) > 1 else []
        cells = [[name.replace("_", " ") for name in names]]
        cells += [[str(row[name]) for name in names] for row in step["rows"]]
        text = {"shard", "key", "source"}
        widths = [max(len(row[at]) for row in cells) for at in range(len(names))]
        lines += [
            "  "
            + "  ".join(
                f"{cell:<{width}}" if name in text else f"{cell:>{width}}"
                for name, cell, width in zip(names, row, widths, strict=True)
            ).rstrip()
            for row in cells
        ]
    lines += [
        f"source {part['source']}: {counted(part['rows'], 'row')}, {100 * part['share']:.1f} %; in the run so far"
        f" {100 * part['share_so_far']:.1f} % (repeat {part['repeat']}: {100 * part['share_by_repeat']:.1f} %)"
        for part in result["mix"]
    ]
    return "\n".join(lines)
