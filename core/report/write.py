"""Puts the page together and writes it."""

from __future__ import annotations

import time
from pathlib import Path

from isthmus import __version__
from isthmus.core.report import sections
from isthmus.core.report.collect import RunData, collect
from isthmus.core.report.encoding import encoding_section
from isthmus.core.report.text import escape, moment
from isthmus.core.report.training import Training
from isthmus.errors import StorageError
from isthmus.storage.rundir import RunDirectory

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Even if something got past the escaping, it could run no script and reach no network."""


def write_report(run_uri: str, out: str | Path | None = None) -> str:
    """Writes a run's report: one HTML file that needs nothing else.

    Args:
        run_uri: the run directory.
        out: a local file; default `report.html` in the run directory.

    Returns:
        The path or URI of the page.

    Raises:
        RunNotFound: there is no run.
        StorageError: the page cannot be written.
    """
    run = RunDirectory.open(run_uri)
    page = render_page(collect(run), written=time.time())
    if out is None:
        return run.write_file("report.html", page.encode())
    path = Path(out).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the report: {error.strerror}", where=str(path)) from error
    return str(path)


def render_page(data: RunData, *, written: float) -> str:
    """The page as HTML.

    Args:
        written: Unix seconds, for the footer.
    """
    training = Training(data)
    of_what = (
        ("encoding", "Encoding", encoding_section(data))
        if data.encodes
        else ("training", "Training", sections.training_section(training))
    )
    parts = [
        of_what,
        ("validation", "Validation", sections.validation_section(data, training)),
        ("samples", "Samples", sections.samples_section(data)),
        ("data", "Data", sections.reading_section(data, training)),
        ("system", "System", sections.system_section(data)),
        ("events", "Events", sections.events_section(data)),
        ("checkpoints", "Checkpoints", sections.checkpoints_section(data)),
        ("recipe", "Recipe", sections.recipe_section(data)),
        ("environment", "Environment", sections.environment_section(data)),
    ]
    shown = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in shown)
    body = "".join(
        f'<section id="{anchor}"><h2>{name}</h2>{content}</section>' for anchor, name, content in shown
    )
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in data.problems[:20])
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(sections.title(data), 120)} · {data.state()}</title><style>{style}</style></head><body><main>"
        + sections.header(data)
        + (
            f'<div class="cause"><strong>Not everything could be read.</strong><ul>{problems}</ul></div>'
            if problems
            else ""
        )
        + sections.tiles(data, training)
        + f"<nav>{links}</nav>"
        + body
        + f"<footer>Written {moment(written)} UTC by isthmus {escape(__version__)}.</footer></main></body></html>\n"
    )
