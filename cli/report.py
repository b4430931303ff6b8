"""``isthmus report``: a run's page."""

from __future__ import annotations

import typer

from isthmus.cli.output import emit


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("report")(report)


def report(
    run: str = typer.Argument(metavar="RUN", help="A run's id, or its directory (a path or URI)."),
    out: str | None = typer.Option(
        None, "--out", metavar="FILE", help="Where to write it; default report.html in the run directory."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Write a run's report: one HTML page with its curves, samples, events and environment.

    Example: isthmus report RUN --out report.html
    """
    from isthmus.backends.runs import find
    from isthmus.core.report import write_report

    uri = find(run).run_uri
    page = write_report(uri, out)
    emit({"run": uri, "report": page}, as_json=as_json, text=page)
