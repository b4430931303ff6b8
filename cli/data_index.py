"""``isthmus data index`` and ``convert``: a dataset out of parquet files that others made."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from isthmus.storage.shards.dataset import Dataset
    from isthmus.storage.shards.foreign_settings import ForeignSettings

_SOURCES = typer.Argument(
    None, metavar="SOURCE...", help="Folder or URI of the files; several roots are one dataset."
)
_MAP = typer.Option(None, "--columns", metavar="MAP", help="The map file, YAML: which column is what.")

_FILES = typer.Option("*.parquet", "--files", metavar="PATTERN", help="Names of the files that count.")
_LIKE = typer.Option(
    None,
    "--like",
    metavar="DATASET",
    help="Take autoencoder, text encoders and null embedding from this dataset.",
)
_AS_JSON = typer.Option(False, "--json", help="Print one JSON document.")


def register(data: typer.Typer) -> None:
    """Adds the commands to the `data` group."""
    data.command("index")(_index)
    data.command("convert")(_convert)


def _index(
    sources: list[str] = _SOURCES,
    columns: str | None = _MAP,
    dest: str | None = typer.Option(
        None, "--dest", help="Where the index goes; beside the files (in the first SOURCE) if not told."
    ),
    files: str = _FILES,
    like: str | None = _LIKE,
    replace: bool = typer.Option(False, "--replace", help="Replace an index that is there."),
    example: bool = typer.Option(False, "--example", help="Print a map file to begin with, and do nothing."),
    as_json: bool = _AS_JSON,
) -> None:
    """Make a dataset of parquet files that others made, without changing or copying them.

    Reads the files' footers and the first row group of each bucket, checks them against the map, and writes
    _index.parquet, the null embedding and manifest.json. Exit code 2 when files and map do not fit, 1 when a file is
    damaged.

    Example: isthmus data index --example > map.yaml; isthmus data index ./theirs --columns map.yaml --dest ./index
    """
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
    started = time.monotonic()
    manifest = index_files(
        sources, dest, settings, pattern=files, replace=replace, like=other, progress=_progress("footers")
    )
    roots = list(dict.fromkeys([dest or sources[0], *sources]))
    uri = roots[0] if len(roots) == 1 else roots
    result = {
        "dataset": uri,
        **describe(manifest),
        "seconds": round(time.monotonic() - started, 2),
    }
    emit(result, as_json=as_json, text=lambda: _text("indexed", result))


def _convert(
    sources: list[str] = _SOURCES,
    columns: str | None = _MAP,
    dest: str | None = typer.Option(
        None, "--dest", help="Where the dataset is written: a folder or URI without one."
    ),
    files: str = _FILES,
    like: str | None = _LIKE,
    as_json: bool = _AS_JSON,
) -> None:
    """Rewrite parquet files that others made as a dataset of our own layout.

    For files whose row groups mix shapes or are too large for `data index`, and for the fastest reading. The map file
    is the same; `isthmus data index --example` prints one. Needs little memory, whatever the size of the files.

    Example: isthmus data convert ./theirs --columns map.yaml --dest ./data
    """
    from isthmus.errors import UsageError
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.shards.foreign_build import describe
    from isthmus.storage.shards.foreign_convert import convert_files

    if not sources or columns is None or dest is None:
        raise UsageError(
            "data convert needs a SOURCE, --columns MAP and --dest DEST",
            hint="`isthmus data index --example` prints a map",
        )
    other = open_dataset(like) if like is not None else None
    started = time.monotonic()
    manifest = convert_files(
        sources, dest, read_map(columns, other), pattern=files, like=other, progress=_progress("rows")
    )
    result = {"dataset": dest, **describe(manifest), "seconds": round(time.monotonic() - started, 2)}
    emit(result, as_json=as_json, text=lambda: _text("wrote", result))


def _progress(what: str) -> Callable[[int, int], None]:
    """Says every few seconds how far it is; on standard error, so that --json stays one document."""
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"{done} of {total} {what}", file=sys.stderr, flush=True)

    return show


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


def _text(did: str, result: dict[str, Any]) -> str:
    uri = result["dataset"]
    lines = [
        f"{did} {counted(result['samples'], 'sample')} in {counted(result['blocks'], 'row group')} of "
        f"{counted(result['files'], 'file')}, "
        f"{result['bytes'] / 1e6:.1f} MB"
    ]
    lines += [
        f"  {bucket:>7}  {counted(entry['samples'], 'sample')}; latents "
        + ", ".join(f"{shape} at {resolution} px" for resolution, shape in entry["latents"].items())
        for bucket, entry in result["buckets"].items()
    ]
    lines.append(f"fingerprint {result['fingerprint']}")
    if isinstance(uri, list):
        lines.append(f"next: in the recipe, data.sources.0.uri: [{', '.join(uri)}]")
    else:
        lines.append(f"next: in the recipe, data.sources.0.uri: {uri}")
    return "\n".join(lines)
