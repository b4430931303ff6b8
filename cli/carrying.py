"""``isthmus fetch`` and ``isthmus runs copy``: a run directory to here, or to where another cloud can go on with it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from isthmus.backends.copying import Plan
    from isthmus.storage.copying import Item

_RUN = typer.Argument(metavar="RUN", help="A run's id, the start of it, or its directory (a path or URI).")
_AS_JSON = typer.Option(False, "--json", help="Print JSON.")


def register(app: typer.Typer) -> None:
    """Adds `fetch`; `runs copy` is added by the group."""
    app.command("fetch")(fetch)


class _Progress:
    """Says every gigabyte or so what was done, on stderr."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._told = max(1, total), 0, 0.0

    def __call__(self, item: Item, kept: bool) -> None:
        self._done += item.size
        share = self._done / self._total
        if sys.stderr.isatty() or share - self._told >= 0.1:
            self._told = share
            end = "\r" if sys.stderr.isatty() and share < 1 else "\n"
            print(f"{100 * share:3.0f} %  {self._done / 1e9:.2f} GB", end=end, file=sys.stderr, flush=True)


def fetch(
    run: str = _RUN,
    to: str = typer.Option(
        "", "--to", metavar="DIR", help="Where to; default: a folder of the run's id here."
    ),
    only: str = typer.Option(
        "",
        "--only",
        metavar="PATTERN",
        help="Of the files' names, as in 'samples/*' or 'checkpoints/step-00001000/*'.",
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Bring a run's directory here, checked by sizes and hashes; the same command again goes on where it ended.

    Example: isthmus fetch my-run-20260102-030405-abcdef --only 'samples/*'
    """
    from pathlib import Path

    from isthmus.backends.fetch import fetch as fetch_run
    from isthmus.backends.runs import find
    from isthmus.storage.rundir import RunDirectory

    record = find(run)
    folder = Path(to or record.id).expanduser()
    done = fetch_run(RunDirectory.open(record.run_uri), folder, only=only or None)
    facts = {
        "run": record.id,
        "run_uri": record.run_uri,
        "folder": str(folder),
        "files": done.files,
        "bytes": done.bytes,
        "copied_files": done.copied.files,
        "copied_bytes": done.copied.bytes,
        "gone": list(done.copied.gone),
    }
    text = f"{folder}: {counted(done.files, 'file')}, {_size(done.bytes)}; {done.copied.files} copied, {done.copied.kept} were here"
    if done.copied.gone:
        text += (
            f"\n{len(done.copied.gone)} were removed meanwhile; the same command again brings what is newer"
        )
    emit(facts, as_json=as_json, text=text)


def copy_run(
    run: str = _RUN,
    to: str = typer.Option(
        ..., "--to", metavar="URI", help="The run's new directory, such as s3://bucket/runs/ID."
    ),
    checkpoints: str = typer.Option(
        "newest", "--checkpoints", metavar="newest|all", help="Which are carried over."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be copied and what that costs."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    as_json: bool = _AS_JSON,
) -> None:
    """Copy a run that has ended to another place, checked by hashes, for another cloud to go on with.

    The same command again goes on where it ended. The copy becomes a run with its last file.

    Example: isthmus runs copy my-run-20260102-030405-abcdef --to s3://bucket/runs/my-run-20260102-030405-abcdef
    """
    from isthmus.backends.copying import carry_out, plan_copy
    from isthmus.backends.runs import find_current
    from isthmus.errors import UsageError

    if checkpoints not in ("newest", "all"):
        raise UsageError(f"--checkpoints is newest or all, not {checkpoints!r}")
    record = find_current(run)
    plan = plan_copy(record, to, checkpoints="all" if checkpoints == "all" else "newest")
    usd, price = _price(plan)
    files = len(plan.first) + len(plan.last) + 1
    facts: dict[str, object] = {
        "run": record.id,
        "from": plan.run.uri,
        "to": plan.target.uri,
        "checkpoints": list(plan.steps),
        "files": files,
        "bytes": plan.bytes,
        "bytes_there": plan.there,
        "usd": usd,
    }
    steps = ", ".join(str(step) for step in plan.steps) or "none"
    shown = (
        f"copy {record.id}\n  from    {plan.run.uri}\n  to      {plan.target.uri}\n"
        f"  size    {_size(plan.bytes)} in {counted(files, 'file')}, checkpoints of steps {steps}"
        + (f"; {_size(plan.there)} are there" if plan.there else "")
        + f"\n  price   {price}"
    )
    if dry_run:
        emit(facts, as_json=as_json, text=shown)
        return
    if not as_json:
        print(shown, flush=True)
    if not yes and not as_json and sys.stdin.isatty() and not typer.confirm("Copy?"):
        raise typer.Exit(0)
    done = carry_out(plan, on_file=_Progress(plan.bytes))
    text = f"copied {_size(done.bytes)}, {done.kept} of the files were there\nnext: isthmus resume {plan.target.uri} --backend NAME"
    emit({**facts, "copied_bytes": done.bytes, "kept": done.kept}, as_json=as_json, text=text)


def _price(plan: Plan) -> tuple[float | None, str]:
    """What the transfer costs by the catalog: out of one cloud into another, or unknown."""
    from isthmus.storage.filesystems import scheme_of

    clouds = {"s3": "sagemaker", "az": "azure", "abfs": "azure", "abfss": "azure"}
    source, target = (clouds.get(scheme_of(uri)) for uri in (plan.run.uri, plan.target.uri))
    if source is None:
        return 0.0, "nothing: it comes from this machine" if target else "nothing"
    if source == target:
        return None, "nothing within a region; else the cloud's price between regions"
    from isthmus.cost.catalog import load_catalog
    from isthmus.cost.lines import tiered_usd

    newest = plan.run.submissions().newest()
    region = newest.data["rendered"]["native"].get("region") if newest is not None else None
    rates = load_catalog().rate(source, "egress", str(region)) if region else []
    usd = tiered_usd(plan.bytes / 1e9, rates) if rates else None
    if usd is None:
        return None, f"unknown: what leaves {source}{f' {region}' if region else ''} is not in the price list"
    return usd, f"${usd:,.2f} for what leaves {source} {region}"


def _size(size: int) -> str:
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
