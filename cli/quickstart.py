"""``isthmus quickstart``: the whole job on this machine, on real pictures."""

from __future__ import annotations

import sys

import typer

from isthmus.cli.output import emit


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("quickstart")(quickstart)


def quickstart(
    run_dir: str = typer.Option(
        "./quickstart", "--run-dir", metavar="DIR", help="Everything is written here."
    ),
    minutes: float = typer.Option(
        6.0, "--minutes", min=0.05, help="Training ends within this time, with fewer steps if need be."
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Of pictures, weights, noise and samples."),
    overrides: list[str] = typer.Option([], "--set", hidden=True),  # noqa: B008
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document; progress goes to stderr."),
) -> None:
    """Encode captioned pictures, train on two processes, sample, and say how many samples match their captions.

    Interrupted with Ctrl-C, the same command goes on from where it was.

    Example: isthmus quickstart --minutes 3
    """
    from pathlib import Path

    from isthmus.cli.quickstart_run import Settings
    from isthmus.cli.quickstart_run import quickstart as run

    def say(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    settings = Settings(folder=Path(run_dir), seed=seed, minutes=minutes, overrides=tuple(overrides))
    result = run(settings, say)
    if as_json:
        emit(result, as_json=True, text="")
