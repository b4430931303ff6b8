"""``isthmus rehearse``: a recipe on an emulated cloud, evicted, and back again."""

from __future__ import annotations

import sys

import typer

from isthmus.cli.output import emit

_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field, as in stages.0.steps=500. May be repeated."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("rehearse")(rehearse)


def rehearse(
    recipe: str = typer.Argument(metavar="RECIPE", help="A file, or a name from `isthmus recipes list`."),
    backend: str = typer.Option(..., "--backend", metavar="azure|sagemaker", help="Whose cloud is emulated."),
    evict_at: int = typer.Option(
        0,
        "--evict-at",
        metavar="STEP",
        help="Take the spot machines back after that step; default: 8, unless a node is killed.",
    ),
    kill_node: int = typer.Option(
        -1, "--kill-node", metavar="N", help="Kill machine N, from 0, four steps later (or after step 12)."
    ),
    minutes: float = typer.Option(10.0, "--minutes", metavar="M", min=0.1, help="Give up after so long."),
    keep: str = typer.Option("", "--keep", metavar="FOLDER", help="Keep the run directory in this folder."),
    overrides: list[str] = _OVERRIDES,
    as_json: bool = typer.Option(False, "--json", help="Print JSON; what happens goes to stderr."),
) -> None:
    """Run a recipe on an emulated cloud, on this machine: small model, random latents; evict it and see it come back.

    The same code renders, submits and supervises as in a launch; no account is needed, nothing is reached outside, nothing is
    spent. Exit code 0: it came back from its checkpoint, no step lost or repeated, and finished; 1: it did not.

    Example: isthmus rehearse my.yaml --backend azure --evict-at 10
    """
    from pathlib import Path

    from isthmus.cli.following import Screen
    from isthmus.core.recipe import load_recipe
    from isthmus.rehearsal.course import Wishes, rehearse

    screen = Screen(sys.stderr)
    wishes = Wishes(
        backend=backend,
        evict_at=evict_at or None,
        kill_node=kill_node if kill_node >= 0 else None,
        minutes=minutes,
        keep=Path(keep).expanduser() if keep else None,
    )
    report = rehearse(load_recipe(recipe, overrides), wishes, say=screen.say, write=screen.write)
    screen.clear()
    emit(report.to_json(), as_json=as_json, text=lambda: str(report))
    if not report.good:
        raise typer.Exit(1)
