"""``isthmus data index``: a dataset out of parquet files that others made, which stay as they are."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from isthmus.storage.shards.dataset import Dataset
    from isthmus.storage.shards.foreign_settings import ForeignSettings

_SOURCES = typer.Argument(
    None, metavar="SOURCE...", help="Folder or URI of the files; several roots are one dataset."
)
_MAP = typer.Option(None, "--columns", metavar="MAP", help="The map file, YAML: which column is what.")


def register(data: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    data.command("index")(_index)


def _index(
    sources: list[str] = _SOURCES,
    columns: str | None = _MAP,
    dest: str | None = typer.Option(
        None, "--dest", help="Where the index goes; beside the files (in the first SOURCE) if not told."
    ),
    files: str = typer.Option(
        "*.parquet", "--files", metavar="PATTERN", help="Names of the files that count."
    ),
    like: str | None = typer.Option(
        None,
        "--like",
        metavar="DATASET",
        help="Take autoencoder, text encoders and null embedding from this dataset.",
    ),
    replace: bool = typer.Option(False, "--replace", help="Replace an index that is there."),
    example: bool = typer.Option(False, "--example", help="Print a map file to begin with, and do nothing."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Make a dataset of parquet files that others made, without changing or copying them.

    Reads the files' footers and the first row group of each bucket, checks them against the map, and writes
    _index.parquet, the null embedding and manifest.json. Exit code 2 when files and map do not fit, 1 when a file is
    damaged.

    Example: isthmus data index --example > map.yaml; isthmus data index ./theirs --columns map.yaml --dest ./index
    """
    from isthmus.cli.output import emit
    from isthmus.errors import UsageError
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.shards.foreign_build import describe, index_files
    from isthmus.storage.shards.foreign_settings import EXAMPLE

    if example:
        emit({"map": EXAMPLE}, as_json=as_json, text=EXAMPLE.rstrip())
        return
    if not sources or columns is None:
        raise UsageError(
            "data index needs a SOURCE and --columns MAP", hint="`isthmus data index --example` prints a map"
        )
    other = open_dataset(like) if like is not None else None
    settings = read_map(columns, other)
    started = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"{done} of {total} footers", file=sys.stderr, flush=True)

    manifest = index_files(sources, dest, settings, pattern=files, replace=replace, like=other, progress=show)
    roots = list(dict.fromkeys([dest or sources[0], *sources]))
    uri = roots[0] if len(roots) == 1 else roots
    result = {
        "dataset": uri,
        **describe(manifest),
        "seconds": round(time.monotonic() - started, 2),
    }
    emit(result, as_json=as_json, text=lambda: _text(result))


def read_map(path: str, like: Dataset | None) -> ForeignSettings:
    """The settings in a map file. UsageError names the file, and the line or the field."""
    from dataclasses import replace
    from pathlib import Path

    from isthmus.core.recipe.document import MAX_BYTES, DocumentError, parse
    from isthmus.errors import UsageError
    from isthmus.storage.shards.foreign_settings import parse_settings

    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        document = parse(raw.decode())
    except FileNotFoundError:
        raise UsageError(
            "there is no such map file", where=path, hint="`isthmus data index --example` prints one"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read the map file: {error.strerror or error}", where=path) from None
    except UnicodeDecodeError:
        raise UsageError("the map file is not UTF-8 text", where=path) from None
    except DocumentError as error:
        raise UsageError(error.message, where=f"{path}:{error.line}") from None
    try:
        settings = parse_settings(document.data, like=None if like is None else like.spec)
    except UsageError as error:
        raise type(error)(error.message, where=path, hint=error.hint) from None
    told = settings.null_text
    if told not in ("like", "zeros") and not told.startswith("key:") and "://" not in told:
        # As the map file's author sees it: beside the map file.
        settings = replace(settings, null_text=str(Path(path).parent / told))
    return settings


def _text(result: dict[str, Any]) -> str:
    uri = result["dataset"]
    lines = [
        f"indexed {result['samples']} samples in {result['blocks']} row groups of {result['files']} files, "
        f"{result['bytes'] / 1e6:.1f} MB"
    ]
    lines += [
        f"  {bucket:>7}  {entry['samples']} samples; latents "
        + ", ".join(f"{shape} at {resolution} px" for resolution, shape in entry["latents"].items())
        for bucket, entry in result["buckets"].items()
    ]
    lines.append(f"fingerprint {result['fingerprint']}")
    if isinstance(uri, list):
        lines.append(f"next: in the recipe, data.sources.0.uri: [{', '.join(uri)}]")
    else:
        lines.append(f"next: in the recipe, data.sources.0.uri: {uri}")
    return "\n".join(lines)
