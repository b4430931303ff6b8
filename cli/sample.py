"""``isthmus sample`` and ``isthmus export``: pictures from a run's weights, and the weights for diffusers."""

from __future__ import annotations

import typer

from isthmus.cli.output import counted, emit

_RUN = typer.Argument(metavar="RUN", help="A run's id, or its directory (a path or URI).")
_AS_JSON = typer.Option(False, "--json", help="Print one JSON document.")
_PROMPTS = typer.Option(..., "--prompt", help="A caption; may be repeated.")
_STEP = typer.Option(None, "--step", help="Of the checkpoint; default the newest committed one.")


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("sample")(sample)
    app.command("export")(export)


def sample(
    run: str = _RUN,
    prompts: list[str] = _PROMPTS,
    out: str = typer.Option("grid.png", "--out", metavar="FILE", help="The grid, a PNG."),
    count: int = typer.Option(1, "--count", min=1, help="Pictures of each prompt."),
    seed: int = typer.Option(0, "--seed", help="Of the noise that pictures start from."),
    steps: int | None = typer.Option(
        None, "--steps", min=1, help="Denoising steps; default the recipe's validation.sampling_steps."
    ),
    guidance_scale: float | None = typer.Option(
        None, "--guidance-scale", min=1.0, help="1 is none; default the recipe's validation.guidance_scale."
    ),
    resolution: int | None = typer.Option(None, "--resolution", min=1, help="Pixels; default the stage's."),
    step: int | None = _STEP,
    device: str = typer.Option("auto", "--device", help="auto, cpu, cuda, cuda:1."),
    as_json: bool = _AS_JSON,
) -> None:
    """Draw pictures for captions with a run's averaged weights, as one labelled grid.

    Example: isthmus sample my-run --prompt "green heart" --prompt "blue square" --out grid.png
    """
    from pathlib import Path

    from isthmus.backends.runs import find
    from isthmus.core.encode.pretrained import require_torch
    from isthmus.errors import UsageError

    require_torch("sampling")
    from isthmus.core.sample.grids import labelled_grid
    from isthmus.core.sample.load import load_run

    place = Path(out)
    if not place.parent.is_dir():
        # Said before minutes of sampling, not after.
        raise UsageError(
            f"no folder {place.parent} to write the grid into", hint="make it, or choose another --out"
        )
    loaded = load_run(find(run).run_uri, step=step, device=device)
    captions = [prompt for prompt in prompts for _ in range(count)]
    pictures = loaded.sample(
        captions, steps=steps, guidance_scale=guidance_scale, seed=seed, resolution=resolution
    )
    title = f"{loaded.recipe.name}, step {loaded.step}, EMA weights"
    labelled_grid(pictures, captions, columns=count if 1 < count <= 8 else None, title=title).save(place)
    result = {
        "run": loaded.run.uri,
        "step": loaded.step,
        "grid": str(place),
        "prompts": captions,
        "seed": seed,
    }
    emit(
        result,
        as_json=as_json,
        text=f"drew {counted(len(captions), 'picture')} at step {loaded.step}: {place}",
    )


def export(
    run: str = _RUN,
    folder: str = typer.Argument(metavar="DIR", help="An empty or new folder."),
    step: int | None = _STEP,
    as_json: bool = _AS_JSON,
) -> None:
    """Write a run's averaged weights as a folder that diffusers' own classes load.

    Example: isthmus export my-run ./my-pipeline
    """
    from dataclasses import asdict

    from isthmus.backends.runs import find
    from isthmus.core.encode.pretrained import require_torch

    require_torch("exporting")
    from isthmus.core.sample.export import export as write

    written = write(find(run).run_uri, folder, step=step)
    emit({"run": run, **asdict(written)}, as_json=as_json, text=written.describe)
