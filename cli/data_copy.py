"""``isthmus data copy``: files from place to place, resumable and verified."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from isthmus.errors import UsageError
    from isthmus.storage.transfer.copy import Copied, Options
    from isthmus.storage.transfer.estimate import Estimate, Price
    from isthmus.storage.transfer.plan import Plan
    from isthmus.storage.transfer.work import Progress


def register(group: typer.Typer) -> None:
    """Add the command to `isthmus data`."""
    group.command("copy")(copy)


def copy(
    source: str = typer.Argument(help="A folder, s3://bucket/prefix, az://container@account.../prefix."),
    target: str = typer.Argument(help="Where to; the same kinds."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Say what would be copied, with requests, hours and dollars."
    ),
    bandwidth: str = typer.Option("", "--bandwidth", help="At most so much a second, such as 200MB/s."),
    memory: str = typer.Option("1 GiB", "--memory", help="Of all buffers together."),
    parallel: int | None = typer.Option(
        None,
        "--parallel",
        min=1,
        max=512,
        help="Parts on the way at the same time; default: 16, into a folder here two a core, 4 to 16.",
    ),
    delete: bool = typer.Option(
        False, "--delete", help="Remove what only the destination has; a dataset there may be replaced."
    ),
    checksum: bool = typer.Option(
        False,
        "--checksum",
        help="Compare files of the same size by reading both; read back what was written.",
    ),
    through_here: bool = typer.Option(
        False, "--through-here", help="Let no store fetch files by itself: all bytes pass this machine."
    ),
    source_region: str = typer.Option("", "--source-region", help="Of the source, for its prices."),
    target_region: str = typer.Option("", "--target-region", help="Of the destination, for its prices."),
    command: str = typer.Option(
        "", "--command", help="Print the command of azcopy, rclone or s5cmd that does it instead."
    ),
    yes: bool = typer.Option(False, "--yes", help="Do not ask before files are removed."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Copy what differs, in parallel parts, each checked; after a kill, the same command goes on where it was.

    A dataset's manifest.json is written last, so a half-copied dataset is none. Nothing is removed without --delete.

    Example: isthmus data copy s3://bucket/latents az://data@account.blob.core.windows.net/latents --dry-run
    """
    from isthmus.storage.transfer.copy import Copy, Options
    from isthmus.storage.transfer.estimate import estimate

    for region, where in ((source_region, "--source-region"), (target_region, "--target-region")):
        if region and not dry_run:
            raise _only_dry(where)
    rate = _size(bandwidth.removesuffix("/s"), "--bandwidth") if bandwidth else None
    options = Options(
        parallel=parallel,
        memory=1 << 30 if memory == "1 GiB" else _size(memory, "--memory"),
        bandwidth=rate,
        delete=delete,
        checksum=checksum,
        by_service=not through_here,
    )
    if command:
        _print_command(command, source, target, options, as_json)
        return
    with Copy(source, target, options, _state_folder(), dry=dry_run) as one:
        plan = one.plan()
        facts = _facts(plan, delete)
        if dry_run:
            ends = _ends(source, target, source_region, target_region)
            takes = estimate(plan, *ends, rate, _price())
            facts |= {"hours": takes.hours, "usd": takes.usd, "lines": [asdict(line) for line in takes.lines]}
            emit(facts, as_json=as_json, text=lambda: _describe(plan, takes, delete))
            return
        if delete:
            _confirm(plan, yes=yes)
        with _Progress(plan, quiet=as_json) as shown:
            done = one.run(plan, shown)
    emit({**facts, "copied": asdict(done)}, as_json=as_json, text=lambda: _said(done, plan))


def _state_folder() -> Path:
    """Where journals are kept: with the rest of this machine's state, see `backends/runs.py`, which is slow to load."""
    import os

    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "isthmus" / "copies"


def _print_command(tool: str, source: str, target: str, options: Options, as_json: bool) -> None:
    import os

    from isthmus.storage.transfer.commands import commands

    text = commands(
        tool,
        source,
        target,
        environment=os.environ,
        parallel=options.parts_at_once(target),
        bandwidth=options.bandwidth,
        delete=options.delete,
        manifest=_has_manifest(source),
    )
    emit({"tool": tool, "command": text}, as_json=as_json, text=text)


def _has_manifest(source: str) -> bool:
    """Whether a manifest is to be written last; where that cannot be looked up, it is as if there were one."""
    from isthmus.errors import IsthmusError
    from isthmus.storage.filesystems import filesystem, join, storage_errors
    from isthmus.storage.transfer.plan import MANIFEST

    try:
        store, path = filesystem(source)
        with storage_errors("look", join(source, MANIFEST)):
            return bool(store.exists(f"{path.rstrip('/')}/{MANIFEST}"))
    except (IsthmusError, FileNotFoundError):
        return True


def _only_dry(where: str) -> UsageError:
    from isthmus.errors import UsageError

    return UsageError("a region is for the prices of --dry-run", where=where, hint="add --dry-run")


def _size(text: str, where: str) -> int:
    from isthmus.core.recipe.units import parse_size
    from isthmus.errors import UsageError

    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not {error}", where=where) from None


def _ends(source: str, target: str, source_region: str, target_region: str) -> tuple[Any, Any]:
    from isthmus.cost.regions import check_region
    from isthmus.storage.ranges.settings import S3
    from isthmus.storage.transfer.estimate import end_of

    found = []
    for uri, region, where in (
        (source, source_region, "--source-region"),
        (target, target_region, "--target-region"),
    ):
        end = end_of(uri, region)
        if region and end.cloud:
            check_region(end.cloud, region, where=where)
        if end.cloud == "sagemaker" and not region:
            end = end_of(uri, S3.of().region or "")
        found.append(end)
    return found[0], found[1]


def _price() -> Price:
    """Dollars by the catalog of prices."""

    def usd(kind: str, cloud: str, region: str, to: str, amount: float) -> float | None:
        from isthmus.cost.catalog import load_catalog
        from isthmus.cost.lines import tiered_usd

        rates = load_catalog().rate(cloud, kind, region, to)
        if kind.endswith("_requests"):
            first = rates[0].usd if rates else None
            return None if first is None else first * amount / 10_000
        return tiered_usd(amount, rates) if rates else None

    return usd


def _facts(plan: Plan, delete: bool) -> dict[str, Any]:
    reasons: dict[str, int] = {}
    for item in plan.items:
        reasons[item.why] = reasons.get(item.why, 0) + 1
    same: dict[str, int] = {}
    for _, _, why in plan.same:
        same[why] = same.get(why, 0) + 1
    return {
        "from": plan.source,
        "to": plan.target,
        "files": len(plan.items),
        "bytes": plan.bytes,
        "bytes_there": plan.bytes_there,
        "why": reasons,
        "same": same,
        "only_there": len(plan.extra),
        "to_delete": len(plan.extra) if delete else 0,
        "left_out": plan.left_out,
        "part_bytes": plan.part_bytes,
        "requests": plan.requests(),
    }


def _describe(plan: Plan, takes: Estimate, delete: bool) -> str:
    facts = _facts(plan, delete)
    why = ", ".join(f"{count} {reason}" for reason, count in facts["why"].items()) or "none"
    same = ", ".join(f"{count} by {reason}" for reason, count in facts["same"].items())
    lines = [
        f"from      {plan.source}",
        f"to        {plan.target}",
        f"copy      {amount(plan.bytes)} in {counted(len(plan.items), 'file')} ({why})"
        + (f"; {amount(plan.bytes_there)} of it arrived before" if plan.bytes_there else ""),
    ]
    if same:
        lines.append(f"same      {counted(len(plan.same), 'file')}: {same}")
    if plan.extra:
        lines.append(
            f"only there {counted(len(plan.extra), 'file')}, {'to be removed' if delete else 'kept'}"
        )
    lines += [f"left out  {count}: {reason}" for reason, count in plan.left_out.items()]
    lines.append("requests  " + ", ".join(f"{count:,} {kind}" for kind, count in takes.requests.items()))
    hours = "say --bandwidth to know" if takes.hours is None else f"{takes.hours:.2f} at that bandwidth"
    lines.append(f"hours     {hours}")
    for line in takes.lines:
        usd = "unknown" if line.usd is None else f"${line.usd:,.2f}"
        lines.append(f"dollars   {usd:>9}  {line.name}, {line.amount:,.10g} {line.unit}; {line.note}")
    total = "unknown: a part of it has no price" if takes.usd is None else f"${takes.usd:,.2f}"
    lines.append(f"in all    {total}")
    return "\n".join(lines)


def _confirm(plan: Plan, *, yes: bool) -> None:
    from isthmus.errors import UsageError

    if yes or not plan.extra:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"{counted(len(plan.extra), 'file')} would be removed from {plan.target}",
            where="--delete",
            hint="look at them with --dry-run, and say --yes",
        )
    if not typer.confirm(f"Remove {counted(len(plan.extra), 'file')} from {plan.target}?"):
        raise typer.Exit(0)


EVERY_S, EVERY_S_IN_A_LOG = 1.0, 30.0
"""Between lines of progress, the first one likewise."""


class _Progress:
    """A line now and then: on a terminal over the last one. Who was told of a beginning is told of the end, in a line of its own."""

    def __init__(self, plan: Plan, *, quiet: bool) -> None:
        self._total = plan.bytes - plan.bytes_there
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._began = self._told = time.monotonic()
        self._last: Progress | None = None
        self._said = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._said and self._last is not None:
            # With or without an error behind it: what arrived, and how fast.
            self._say(self._last, f"in {_minutes(time.monotonic() - self._began)}", end="\n")

    def __call__(self, progress: Progress) -> None:
        self._last, now = progress, time.monotonic()
        if self._quiet or now - self._told < (EVERY_S if self._terminal else EVERY_S_IN_A_LOG):
            return
        self._told, self._said = now, True
        rate = progress.bytes / max(now - self._began, 1e-6)
        left = max(self._total - progress.bytes, 0) / rate if rate else 0.0
        self._say(progress, f"{_minutes(left)} left", end="" if self._terminal else "\n")

    def _say(self, progress: Progress, rest: str, *, end: str) -> None:
        rate = progress.bytes / max(time.monotonic() - self._began, 1e-6)
        text = (
            f"{amount(progress.bytes)} of {amount(self._total)}, {counted(progress.files, 'file')}, "
            f"{amount(int(rate))}/s, {rest}"
        )
        print(f"\r{text:<78}" if self._terminal else text, end=end, file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _said(done: Copied, plan: Plan) -> str:
    checked = ", ".join(f"{count} by {how}" for how, count in done.checked.items())
    parts = [f"copied {amount(done.bytes)} in {counted(done.files, 'file')}"]
    if checked:
        parts.append(f"checked: {checked}")
    if done.same:
        parts.append(f"{done.same} were there")
    if done.parts_there:
        parts.append(f"{counted(done.parts_there, 'part')} had arrived before")
    if done.deleted:
        parts.append(f"{done.deleted} removed")
    elif plan.extra:
        parts.append(f"{counted(len(plan.extra), 'file is', 'files are')} only there")
    return "; ".join(parts)


def amount(size: int) -> str:
    """Bytes as people read them."""
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
