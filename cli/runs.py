"""``isthmus runs list``, ``status``, ``logs``, ``stop``, ``resume``: follow runs that were launched."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.carrying import copy_run
from isthmus.cli.cost_recipe import PRICES
from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.backends.prepare import Launch
    from isthmus.backends.runs import Record

_AS_JSON = typer.Option(False, "--json", help="Print JSON.")
_RUN = typer.Argument(metavar="RUN", help="A run's id, the start of it, or its directory (a path or URI).")

_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Change a field, as in stages.0.steps=500. May be repeated."
)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    group.callback()(_runs)
    group.command("list")(list_runs)
    group.command("copy")(copy_run)
    app.add_typer(group, name="runs", help="List the runs, carry one elsewhere.")
    app.command("status")(status)
    app.command("logs")(logs)
    app.command("stop")(stop)
    app.command("resume")(resume)


def _runs() -> None:
    """Runs that were launched from this machine, or that the clouds know."""


def list_runs(
    folder: str = typer.Argument(
        "", metavar="[PLACE]", help="Also the runs in this place, such as a recipe's run_directory."
    ),
    cloud: bool = typer.Option(
        False, "--cloud", help="Also the runs whose jobs the clouds list by tag, whoever launched them."
    ),
    backend: str = typer.Option(
        "", "--backend", metavar="NAME[,NAME...]", help="Whose clouds to ask; default: all that can tell."
    ),
    recipe: str = typer.Option(
        "", "--recipe", metavar="RECIPE", help="Its sections say which region and workspace to ask."
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """List runs with their state, the newest first.

    Example: isthmus runs list --cloud --recipe my.yaml
    """
    from isthmus.backends.following import overview

    rows = overview(folder or None)
    if cloud or backend or recipe:
        rows = _with_clouds(rows, backend, recipe)
    width = max([len(row["run"]) for row in rows], default=0)
    lines = [f"{row['run']:{width}}  {row['state']:10}  {row['backend']:9}  {row['run_uri']}" for row in rows]
    emit(rows, as_json=as_json, text="\n".join(lines) or "no runs yet; start one: isthmus quickstart")


def _with_clouds(rows: list[dict[str, Any]], backend: str, recipe: str) -> list[dict[str, Any]]:
    """The rows, and those of the clouds' runs that are not among them."""
    from isthmus.backends.discover import cloud_runs
    from isthmus.cli.launch import named
    from isthmus.core.recipe import load_recipe

    found = cloud_runs(
        named(backend),
        load_recipe(recipe) if recipe else None,
        say=lambda text: print(f"warning: {text}", file=sys.stderr),
    )
    known = {row["run_uri"].rstrip("/") for row in rows}
    rows = rows + [row for row in found if row["run_uri"].rstrip("/") not in known]
    return sorted(rows, key=lambda row: float(row["created"]), reverse=True)


def status(run: str = _RUN, as_json: bool = _AS_JSON) -> None:
    """Say how a run is: its state, progress and newest checkpoint.

    Example: isthmus status quickstart
    """
    from isthmus.backends.following import describe
    from isthmus.backends.runs import find_current

    facts = describe(find_current(run))
    emit(facts, as_json=as_json, text=lambda: _status_text(facts))


def _status_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['run']}  {facts['state']}" + (f": {facts['cause']}" if facts["cause"] else "")]
    if facts["detail"]:
        lines.append(f"  detail      {facts['detail']}")
    if facts["attempt"]:
        lines.append(f"  attempt     {facts['attempt']}")
    if facts["step"] is not None:
        line = f"  step        {facts['step']}/{facts['total_steps']}"
        if facts["loss"] is not None:
            line += f"  loss {facts['loss']:.4f}"
        if facts["samples_per_s"] is not None:
            line += f"  {facts['samples_per_s']:.4g} samples/s"
        lines.append(line)
    if facts["encode"]:
        lines += _encode_lines(facts["encode"])
    if facts["checkpoints"]:
        lines.append(f"  checkpoint  step {facts['checkpoints'][-1]}")
    lines += [f"  alarm       {alarm}" for alarm in facts["alarms"]]
    lines.append(f"  directory   {facts['run_uri']}")
    return "\n".join(lines)


def _encode_lines(told: dict[str, Any]) -> list[str]:
    """Of an encode job: where it reads and writes, and how far it is."""
    lines = [f"  source      {told.get('source')}", f"  dataset     {told.get('dest')}"]
    if told.get("pictures") is not None:
        line = f"  pictures    {told['pictures']}" + (f"/{told['expected']}" if told["expected"] else "")
        line += f"  {told['images_per_s']:.4g} images/s  {told['rejected']} rejected"
        if told["seconds_left"]:
            line += f"  {told['seconds_left'] / 60:.1f} min left"
        if told["usd"] is not None:
            line += f"  ${told['usd']:,.2f} so far"
        lines.append(line)
    return lines


def logs(
    run: str = _RUN,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on until the run ends."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object for each line."),
) -> None:
    """Print what a run printed, on all nodes and attempts.

    Example: isthmus logs -f quickstart
    """
    from json import dumps

    from isthmus.backends.following import run_logs, shown
    from isthmus.backends.runs import find_current

    try:
        for line in run_logs(find_current(run), follow):
            row = {"node": line.node, "time": line.time, "text": line.text}
            print(dumps(row, ensure_ascii=False) if as_json else shown(line), flush=True)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None  # of the following, not of the run


def stop(run: str = _RUN, as_json: bool = _AS_JSON) -> None:
    """Have a run write a checkpoint and end; it is not restarted by itself.

    Example: isthmus stop quickstart
    """
    from isthmus.backends.stopping import stop as stop_run

    facts = stop_run(run)
    if facts["state"] in ("pending", "running", "restarting", "unknown"):
        text = f"{facts['run']} was asked to stop; it ends after a checkpoint: isthmus status {facts['run']}"
        emit(facts, as_json=as_json, text=text)
        return
    word = f"was {facts['state']} already" if facts["was"] == facts["state"] else facts["state"]
    emit(facts, as_json=as_json, text=f"{facts['run']} {word}")


def resume(
    run: str = _RUN,
    overrides: list[str] = _OVERRIDES,
    backend: str = typer.Option(
        "", "--backend", metavar="NAME[,NAME...]", help="Where to go on; default: where it was."
    ),
    follow: bool = typer.Option(
        False, "--follow", help="Stay with a job that goes on by itself: its log, and `isthmus supervise`."
    ),
    detach: bool = typer.Option(False, "--detach", help="Return at once; the run goes on."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask, even when there are warnings."),
    prices: str = PRICES,
    as_json: bool = typer.Option(False, "--json", help="Print JSON; the log goes to stderr."),
) -> None:
    """Go on with a run from its newest checkpoint, also with another world size, batch or length.

    Model, encoders, seed, lanes and sources stay what they were. Exit codes: those of launch.

    Example: isthmus resume quickstart --set stages.0.steps=4000
    """
    from pathlib import Path

    from isthmus.backends.destinations import destinations
    from isthmus.backends.prepare import prepare_resume
    from isthmus.backends.runs import find_current
    from isthmus.backends.supervisor import recipe_of
    from isthmus.cli.following import run_launch
    from isthmus.cli.launch import named
    from isthmus.cli.pricing import price_function
    from isthmus.storage.rundir import RunDirectory

    record: Record = find_current(run)
    names, price = named(backend), price_function(prices)
    recipe = recipe_of(RunDirectory.open(record.run_uri).read_run_json())
    count = len(destinations(recipe, names)) if names else 1

    def make(choice: int) -> Launch:
        # Without names it goes on where it was; a supervisor may move it later.
        return prepare_resume(
            record, overrides, backends=names, choice=choice if names else None, detach=detach, price=price,
            keep_price=not prices,
        )  # fmt: skip

    run_launch(make, count, Path.cwd(), yes=yes, as_json=as_json, follow=follow, by="resume", prices=prices)
