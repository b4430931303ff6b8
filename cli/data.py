"""``isthmus data``: encode, stats, verify, order, bench."""

from __future__ import annotations

from typing import Any

import typer

from isthmus.cli import data_bench, data_copy, data_index, data_order, encode
from isthmus.cli.output import emit

_AS_JSON = typer.Option(False, "--json", help="Print one JSON document.")
_ROOTS = typer.Argument(help="A dataset's folder or URI; its roots, when its shards are spread over several.")

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
encode.register(data_app)
data_order.register(data_app)
data_index.register(data_app)
data_bench.register(data_app)
data_copy.register(data_app)


def register(app: typer.Typer) -> None:
    """Add the command group to the application."""
    app.add_typer(data_app, name="data", help="Make latent datasets and check them.")


@data_app.command("stats")
def stats(roots: list[str] = _ROOTS, as_json: bool = _AS_JSON) -> None:
    """Say what a dataset holds: samples, buckets, resolutions, encoders, sizes.

    Example: isthmus data stats ./data
    """
    from isthmus.storage.shards.verify import stats as collect

    found = collect(roots)
    emit(found, as_json=as_json, text=lambda: _describe(found))


@data_app.command("verify")
def verify(roots: list[str] = _ROOTS, as_json: bool = _AS_JSON) -> None:
    """Check every checksum and every row's shape, dtype and finiteness. Exit code 1 when anything is wrong.

    Example: isthmus data verify ./data
    """
    from dataclasses import asdict

    from isthmus.storage.shards.verify import Problem
    from isthmus.storage.shards.verify import verify as check

    def show(problem: Problem) -> None:
        if not as_json:
            print(problem, flush=True)

    report = check(roots, on_problem=show)
    emit(
        {"ok": report.ok, **asdict(report)},
        as_json=as_json,
        text=(
            f"{report.rows} rows in {report.files} files, {report.size / 1e6:.1f} MB: "
            + ("all as written" if report.ok else f"{len(report.problems)} problems")
        ),
    )
    if not report.ok:
        raise typer.Exit(1)


def _describe(found: dict[str, Any]) -> str:
    lines = [
        f"{found['samples']} samples in {found['shards']} shards, {found['bytes'] / 1e6:.1f} MB, "
        f"{found['rejected']} images rejected",
        f"fingerprint  {found['fingerprint']}",
        f"source       {found['source'] or 'not told'}",
        f"blocks       {found['blocks']} of {found['rows_per_block']['least']} to "
        f"{found['rows_per_block']['most']} rows",
        f"captions     {found['captions']} a sample; {found['prompts']} validation prompts",
    ]
    lines += [
        f"{resolution + ' px':<12} {entry['samples']} samples, {entry['bytes'] / 1e6:.1f} MB of latents"
        for resolution, entry in found["resolutions"].items()
    ]
    lines += [
        f"bucket {bucket:<5} {entry['samples']} samples; latents "
        + ", ".join(f"{shape} at {resolution} px" for resolution, shape in entry["latents"].items())
        for bucket, entry in found["buckets"].items()
    ]
    lines += [
        f"text         {name}: {entry['max_tokens']} tokens of {entry['width']}, pooled {entry['pooled_width']}"
        for name, entry in found["text"].items()
    ]
    autoencoder = found["autoencoder"]
    lines.append(
        f"autoencoder  {autoencoder['kind']}, {autoencoder['latent_channels']} channels, "
        f"factor {autoencoder['factor']}"
    )
    return "\n".join(lines)
