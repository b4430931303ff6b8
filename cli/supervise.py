"""``isthmus supervise``: bring a run to its end, wherever its jobs are."""

from __future__ import annotations

import typer

from isthmus.cli.cost_recipe import PRICES
from isthmus.cli.output import emit


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("supervise")(supervise)


def supervise(
    run: str = typer.Argument(
        metavar="RUN", help="A run's id, the start of it, or its directory (a path or URI)."
    ),
    once: bool = typer.Option(
        False, "--once", help="Look once and do what is to be done: for cron or a CI schedule."
    ),
    interval: float = typer.Option(30.0, "--interval", metavar="SECONDS", min=0.1, help="Between two looks."),
    no_log: bool = typer.Option(False, "--no-log", help="Do not show the log of its jobs."),
    prices: str = PRICES,
    as_json: bool = typer.Option(False, "--json", help="Print JSON; the log goes to stderr."),
) -> None:
    """Look after a run: complete its submission, resubmit what was preempted, fail over, keep its budget.

    Nothing is kept between two looks, and two supervisors do no harm: run it here, from cron, or from a CI schedule.
    Exit codes: those of launch; of `--once` 0 while there is more to come.

    Example: isthmus supervise my-run-20260102-030405-abcdef --once
    """
    import sys

    from isthmus.backends.runs import find
    from isthmus.backends.supervisor import Supervisor
    from isthmus.cli.following import look_after
    from isthmus.cli.pricing import price_function

    record = find(run)
    if not once:
        facts: dict[str, object] = {"run": record.id, "run_uri": record.run_uri}
        look_after(
            record.run_uri, record.id, facts, as_json=as_json, interval=interval, log=not no_log, prices=prices
        )  # fmt: skip
    look = Supervisor(
        record.run_uri,
        price=price_function(prices),
        keep_prices=not prices,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    ).look()
    why = f" ({look.why})" if look.why else ""
    emit(look.to_json(), as_json=as_json, text=f"{record.id} {look.status.state}: {look.did}{why}")
    if look.did == "done" and look.status.exit_code:
        raise typer.Exit(look.status.exit_code)
