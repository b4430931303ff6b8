"""``isthmus data repack``, ``merge``, ``split`` and ``filter``: datasets out of datasets, without an encoder."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from fractions import Fraction

    from isthmus.storage.shards.rewrite import Options, Rewritten

_SRC = typer.Argument(
    metavar="SRC...", help="A dataset's folder or URI; its roots, when its files are spread over several."
)
_MERGED = typer.Argument(metavar="SRC...", help="The datasets, at least two.")
_DEST = typer.Argument(metavar="DEST", help="A folder or URI that holds no dataset.")
_SHARD = typer.Option(
    "",
    "--shard-size",
    help="Of all siblings together, such as `1.5 GB`, or a number of rows. Default: 1.5 GB.",
)
_GROUP = typer.Option(
    "",
    "--row-group-size",
    help="Such as `10 MB`, or a number of rows, of the most frequent bucket. Default: the source's largest.",
)
_ORDER = typer.Option(
    "bucket", "--order", help="Of the shards: bucket, size-class, or source (as the rows come)."
)
_COMPRESSION = typer.Option(
    "none",
    "--compression",
    help="none (our layout, the fastest), zstd, lz4 or snappy: for keeping and moving.",
)
_THREADS = typer.Option(0, "--threads", help="Shards written at once; default: the cores, four at most.")
_RESTART = typer.Option(False, "--restart", help="Forget what was begun at DEST.")
_AS_JSON = typer.Option(False, "--json", help="Print one JSON document.")
_WHERE = "A predicate over key, caption, source, width, height, bucket, ..., such as `width >= 512`."


def register(data: typer.Typer) -> None:
    """Adds the commands to the `data` group."""
    for name, command in (("repack", _repack), ("merge", _merge), ("split", _split), ("filter", _filter)):
        data.command(name)(_with_options(command))


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the parameters of `_options` beside its own; it gets what `_options` makes of them as `options`."""
    own, shared = (dict(inspect.signature(one).parameters) for one in (command, _options))
    del own["options"]
    as_json = own.pop("as_json")

    @functools.wraps(command)
    def run(**told: Any) -> None:
        options = _options(**{name: told.pop(name) for name in shared})
        command(**told, options=options)

    # What typer looks at.
    parameters = [*own.values(), *shared.values(), as_json]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    return run


def _repack(
    src: list[str] = _SRC,
    dest: str = _DEST,
    *,
    options: Options,
    as_json: bool = _AS_JSON,
) -> None:
    """Write a dataset anew with other shard and row group sizes; no row changes, nothing is encoded.

    Also turns a dataset of files that others made (`data index`) into our own layout. A run that was killed goes on with
    the same command; until the manifest is there, DEST is no dataset.

    Example: isthmus data repack ./data ./larger --row-group-size "10 MB"
    """
    from isthmus.storage.shards.rewrite import repack

    _run(lambda: repack(src, dest, options), as_json)


def _merge(
    src: list[str] = _MERGED,
    dest: str = _DEST,
    duplicates: str = typer.Option(
        "refuse", "--duplicates", help="A key that comes a second time: refuse, or skip (the first stays)."
    ),
    *,
    options: Options,
    as_json: bool = _AS_JSON,
) -> None:
    """Write one dataset of several that were made with the same encoders.

    Validation prompts and lists of rejected pictures are put together. Exit code 2 when encoders, captions, latent shapes
    or null embeddings differ, or a key comes twice.

    Example: isthmus data merge ./photos ./paintings ./all
    """
    from isthmus.storage.shards.rewrite import merge

    how = _one_of("--duplicates", duplicates, ("refuse", "skip"))
    _run(lambda: merge(src, dest, options, duplicates=how), as_json)


def _split(
    src: list[str] = _SRC,
    dest: str = typer.Argument(metavar="DEST", help="The parts are written to folders below it."),
    by: str = typer.Option("hash", "--by", help="hash (of the key), bucket, size-class or where."),
    parts: str = typer.Option(
        "",
        "--parts",
        help="With hash: `train=0.99,val=0.01`. With where: the names of the two parts, `large,rest`.",
    ),
    seed: int = typer.Option(0, "--seed", help="With hash: other seeds draw other parts."),
    where: str = typer.Option("", "--where", metavar="PREDICATE", help="With where. " + _WHERE),
    *,
    options: Options,
    as_json: bool = _AS_JSON,
) -> None:
    """Write several datasets, of which each row is in one: by a stable hash of the key, by bucket, or by a predicate.

    A key's part depends on the key, the seed and the shares alone, so that a sample stays where it is when others are added.

    Example: isthmus data split ./data ./parts --parts train=0.99,val=0.01
    """
    from isthmus.errors import UsageError
    from isthmus.storage.shards.rewrite import split

    how = _one_of("--by", by, ("hash", "bucket", "size-class", "where"))
    if where and how != "where":
        raise UsageError("--where is for --by where")
    if parts and how in ("bucket", "size-class"):
        raise UsageError(f"--parts does not go with --by {how}: the parts are named after what they hold")
    if seed and how != "hash":
        raise UsageError("--seed is for --by hash")
    more: dict[str, Any] = {"where": where or None, "seed": seed}
    if how == "hash":
        more["shares"] = _shares(parts)
    elif how == "where" and parts:
        more["names"] = [name.strip() for name in parts.split(",")]
        if len(more["names"]) != 2:
            raise UsageError("--parts names two parts here, such as `large,rest`", where=parts)
    _run(lambda: split(src, dest, how, options, **more), as_json)


def _filter(
    src: list[str] = _SRC,
    dest: str = _DEST,
    where: str = typer.Option(..., "--where", metavar="PREDICATE", help=_WHERE),
    *,
    options: Options,
    as_json: bool = _AS_JSON,
) -> None:
    """Write the rows of which a predicate is true: comparisons, and/or/not, in, between, like, is null, length().

    Columns: key, caption (caption1, ...), source, bucket, size_class, width, height, crop_top, crop_left, crop_height,
    crop_width, flipped, and each text encoder's ENCODER_length.

    Example: isthmus data filter ./data ./large --where "width >= 512 and not caption like '%watermark%'"
    """
    from isthmus.storage.shards.rewrite import filtered

    _run(lambda: filtered(src, dest, where, options), as_json)


def _run(do: Callable[[], Rewritten], as_json: bool) -> None:
    started = time.monotonic()
    done = do()
    seconds = round(time.monotonic() - started, 2)
    datasets: list[dict[str, Any]] = [
        {
            **({"part": written.name} if written.name else {}),
            "dataset": written.uri,
            "fingerprint": written.manifest.fingerprint,
            "samples": written.manifest.samples,
            "shards": written.manifest.shards,
            "blocks": written.manifest.blocks,
            "bytes": written.manifest.size,
        }
        for written in done.datasets
    ]
    lines = [
        f"wrote {counted(row['samples'], 'sample')} in {counted(row['blocks'], 'row group')} of "
        f"{counted(row['shards'], 'shard')}, {row['bytes'] / 1e6:.1f} MB, to {row['dataset']}\n"
        f"  fingerprint {row['fingerprint']}"
        for row in datasets
    ]
    if done.left_out:
        lines.append(f"{counted(done.left_out, 'sample')} left out")
    emit(
        {"datasets": datasets, "left_out": done.left_out, "seconds": seconds},
        as_json=as_json,
        text="\n".join(lines),
    )


def _options(
    shard_size: str = _SHARD,
    row_group_size: str = _GROUP,
    order: str = _ORDER,
    compression: str = _COMPRESSION,
    threads: int = _THREADS,
    restart: bool = _RESTART,
) -> Options:
    """What all of these commands take, from the command line."""
    from isthmus.storage.shards.rewrite import Options
    from isthmus.storage.shards.rewrite_compressed import CODECS
    from isthmus.storage.shards.rewrite_plan import Sizes

    shard_rows, shard_bytes = _size("--shard-size", shard_size)
    group_rows, group_bytes = _size("--row-group-size", row_group_size)
    return Options(
        sizes=Sizes(shard_rows, shard_bytes, group_rows, group_bytes),
        order=_one_of("--order", order, ("bucket", "size-class", "source")),
        compression=_one_of("--compression", compression, CODECS),
        threads=threads,
        restart=restart,
        progress=_progress(),
    )


def _size(option: str, text: str) -> tuple[int | None, int | None]:
    """Rows and bytes, of which at most one is told."""
    from isthmus.core.recipe.units import parse_size
    from isthmus.errors import UsageError

    number = text.strip().removesuffix("rows").strip()
    if not number:
        return None, None
    if number.isdigit() and 0 < int(number) < 1 << 40:
        return int(number), None
    try:
        return None, parse_size(text)
    except ValueError:
        raise UsageError(f"{option} is a size such as `10 MB` or a number of rows, not `{text}`") from None


def _shares(text: str) -> dict[str, Fraction]:
    """``train=0.99,val=0.01``, exactly."""
    from fractions import Fraction

    from isthmus.errors import UsageError

    found: dict[str, Fraction] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, separator, share = (part.strip() for part in item.partition("="))
        digits = share.replace(".", "", 1).replace("/", "", 1)
        try:
            value = Fraction(share) if separator and digits.isdigit() and len(share) < 30 else None
        except (ValueError, ZeroDivisionError):
            value = None
        if value is None or name in found:
            raise UsageError(
                f"`{item}` is no part and its share" + (", or named twice" if name in found else ""),
                where="--parts",
                hint="such as train=0.99,val=0.01",
            )
        found[name] = value
    return found


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> Any:
    from isthmus.errors import UsageError

    if value not in allowed:
        raise UsageError(f"{option} is {', '.join(allowed[:-1])} or {allowed[-1]}, not `{value}`")
    return value


def _progress() -> Callable[[str, int, int], None]:
    """Says every few seconds how far it is; on standard error, so that --json stays one document."""
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > 5:
            last = time.monotonic()
            print(f"{done} of {total} {what}", file=sys.stderr, flush=True)

    return show
