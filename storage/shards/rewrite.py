"""Datasets out of datasets: repacked, merged, split, filtered. No value changes; no encoder runs.

Every command is a plan (which rows go into which shard) and its writing. The plan is a function of the sources' indices and
the settings, so the same call gives the same bytes, whatever the number of threads, and goes on where it was killed. Memory
is a few row groups a thread, and up to 40 bytes a row where keys are compared. The manifests are written last of all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from isthmus.errors import UsageError
from isthmus.storage.filesystems import is_local, join, local_path, scheme_of
from isthmus.storage.shards.dataset import Dataset, open_dataset
from isthmus.storage.shards.fields import scan
from isthmus.storage.shards.manifest import Manifest
from isthmus.storage.shards.predicate import column_types, parse_predicate
from isthmus.storage.shards.rewrite_compressed import CODECS, spec_of
from isthmus.storage.shards.rewrite_keys import by_hash, collect, later_duplicates, refuse_duplicates
from isthmus.storage.shards.rewrite_merge import common_spec, extras, side_files
from isthmus.storage.shards.rewrite_plan import LEFT_OUT, Chosen, Order, Sizes, plan_part
from isthmus.storage.shards.rewrite_source import Source, source_of
from isthmus.storage.shards.rewrite_work import Work
from isthmus.storage.shards.rewrite_write import Job, write

By = Literal["hash", "bucket", "size-class", "where"]
MAX_THREADS = 64
_VERSION = 1
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How a dataset is rewritten."""

    sizes: Sizes = field(default_factory=Sizes)
    order: Order = "bucket"
    """Of the shards: by bucket and size class, by size class and bucket, or as their first rows come in the sources."""
    threads: int = 0
    """Shards that are written at once; 0: as many as there are cores, four at most."""
    restart: bool = False
    """Forget what was begun at the destination."""
    progress: Progress | None = None
    """Called with what is being done, the rows done and all rows."""
    compression: str = "none"
    """Of `CODECS`. With any but `none` the files are parquet that is read through a column map, not our own layout."""


@dataclass(frozen=True, slots=True)
class Written:
    """One dataset that was written."""

    name: str
    """Of the part; empty when there is one dataset."""
    uri: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What came of a rewriting."""

    datasets: tuple[Written, ...]
    left_out: int
    """Rows of the sources that are in none of them."""


def repack(roots: Sequence[str], dest: str, options: Options = Options()) -> Rewritten:
    """All rows of a dataset, in shards and row groups of other sizes; also of files that others made, into our layout.

    Raises:
        UsageError: the destination holds something, or the sizes are impossible.
        CorruptShard: a block is not what the index says.
        StorageError: a store refuses. What was done stays, and the same call goes on from there.
    """
    source = source_of(open_dataset(list(roots)))
    return _run("repack", [source], dest, [""], [None], {}, options)


def merge(
    roots: Sequence[str],
    dest: str,
    options: Options = Options(),
    *,
    duplicates: Literal["refuse", "skip"] = "refuse",
) -> Rewritten:
    """One dataset of several, which must have been made with the same encoders.

    Args:
        duplicates: whether a key that comes a second time is an error, or left out.

    Raises:
        DatasetMismatch: encoders, captions, latent shapes or null embeddings differ.
        UsageError: as of :func:`repack`; a key comes twice.
    """
    if len(roots) < 2:
        raise UsageError("merge needs at least two datasets", hint="`data repack` rewrites one")
    places = [_place(root) for root in roots]
    if len(set(places)) < len(places):
        again = next(root for at, root in enumerate(roots) if places[at] in places[:at])
        raise UsageError("named twice", where=again)
    sources = [source_of(open_dataset(root)) for root in roots]
    common_spec([source.dataset for source in sources])  # before a key is read
    parts = later_duplicates(sources, threads=_threads(options), progress=_saying(options, "keys"))
    if duplicates == "refuse":
        refuse_duplicates(sources, parts)
    chosen = [part if (part == LEFT_OUT).any() else None for part in parts]
    return _run("merge", sources, dest, [""], chosen, {"duplicates": duplicates}, options)


def filtered(roots: Sequence[str], dest: str, where: str, options: Options = Options()) -> Rewritten:
    """The rows of which a predicate is true; see :mod:`.predicate`."""
    source = source_of(open_dataset(list(roots)))
    part = _where(source, where, options)
    part[part == 1] = LEFT_OUT
    return _run("filter", [source], dest, [""], [part], {"where": where}, options)


def split(
    roots: Sequence[str],
    dest: str,
    by: By,
    options: Options = Options(),
    *,
    shares: Mapping[str, Fraction] | None = None,
    seed: int = 0,
    where: str | None = None,
    names: Sequence[str] = ("true", "false"),
) -> Rewritten:
    """Several datasets below `dest`, each in a folder of its own; every row goes into one of them.

    Args:
        by: `hash`: by shares of a stable hash of the key, so that a sample stays in its part when others come and go;
            `bucket`, `size-class`: a part for each; `where`: whether a predicate is true.
        shares: with `hash`: the parts' names and their shares, which sum to 1.
        seed: with `hash`: other seeds draw other parts.
        where: the predicate, and
        names: of the part where it is true and of the other.

    Raises:
        UsageError: a part would be empty, or a name is no folder's; otherwise as of :func:`repack`.
    """
    source = source_of(open_dataset(list(roots)))
    index, spec = source.dataset.index, source.dataset.spec
    settings: dict[str, Any] = {"by": by}
    if by == "hash":
        if not shares or len(shares) < 2 or sum(shares.values()) != 1 or min(shares.values()) <= 0:
            raise UsageError(
                "the shares must be at least two, above 0, and sum to 1", hint="train=0.99,val=0.01"
            )
        parts = _named(shares)
        settings |= {"shares": {name: str(share) for name, share in shares.items()}, "seed": seed}
        saying = _saying(options, "keys")
        chosen = by_hash(source, list(shares.values()), seed, threads=_threads(options), progress=saying)
    elif by == "where":
        if where is None:
            raise UsageError("a split by predicate needs the predicate", hint='--where "width >= 512"')
        parts = _named(names)
        settings["where"] = where
        chosen = _where(source, where, options)
    else:
        values = index.bucket if by == "bucket" else index.size_class
        kinds = np.unique(values)
        parts = _named(
            spec.buckets[kind].replace(":", "x") if by == "bucket" else str(kind) for kind in kinds
        )
        chosen = np.repeat(np.searchsorted(kinds, values).astype(np.uint8), index.rows)
    return _run("split", [source], dest, parts, [chosen], settings, options)


def _where(source: Source, where: str, options: Options) -> Any:
    """0 where the predicate is true of a row, 1 elsewhere; [rows]."""
    spec = source.dataset.spec
    fields = {told.name for told in spec.fields}
    predicate = parse_predicate(where, column_types(spec), fields)
    rows, saying = source.dataset.index.rows, _saying(options, "rows looked at")
    if predicate.columns and predicate.columns <= fields:
        # Of fields alone: their files in pieces of megabytes, not a request for each row group.
        parts = np.empty(source.rows, np.uint8)
        for block, values in scan(source, sorted(predicate.columns)):
            start, stop = int(source.first[block]), int(source.first[block + 1])
            parts[start:stop] = np.where(predicate(values, stop - start), 0, 1)
            if saying is not None:
                saying(stop, source.rows)
        return parts

    def tested(block: int) -> Any:
        values = source.small(block, predicate.columns)
        return np.where(predicate(values, int(rows[block])), 0, 1).astype(np.uint8)

    return collect(source, tested, threads=_threads(options), progress=saying)


def _run(
    command: str,
    sources: Sequence[Source],
    dest: str,
    names: Sequence[str],
    chosen: Chosen,
    settings: Mapping[str, Any],
    options: Options,
) -> Rewritten:
    """Plans and writes. `names`: of the parts; `chosen`: of each source which part its rows go into."""
    threads = _threads(options)
    datasets = [source.dataset for source in sources]
    spec, shapes = common_spec(datasets)
    targets = {name: join(dest, name) if name else dest for name in names}
    if options.compression not in CODECS:
        raise UsageError(f"compression is {', '.join(CODECS)}, not {options.compression}")
    _check_dest(dest, list(targets.values()), datasets)
    parts = [
        plan_part(number, name, targets[name], sources, chosen, spec, shapes, options.sizes, options.order)
        for number, name in enumerate(names)
    ]
    if options.compression != "none":
        classes = {size for part in parts for by_size in part.rows.values() for size in by_size}
        spec = spec_of(spec, sorted(classes), dest)
    plan = {
        "version": _VERSION,
        "command": command,
        "sources": [dataset.fingerprint for dataset in datasets],
        **settings,
        "sizes": asdict(options.sizes),
        "order": options.order,
        "compression": options.compression,
        "pyarrow": pa.__version__,
        "parts": {part.name: [len(part.shards), part.samples] for part in parts},
    }
    work = Work(dest, plan, list(targets.values()))
    work.begin(restart=options.restart)
    job = Job(
        sources=sources,
        chosen=chosen,
        spec=spec,
        shapes=shapes,
        parts=parts,
        side_files=side_files(datasets, spec),
        extras=extras(datasets),
        compression=options.compression,
        about="; ".join(dict.fromkeys(d.manifest.source for d in datasets if d.manifest.source)),
    )
    manifests = write(job, work, threads=threads, progress=_saying(options, "rows written"))
    written = tuple(
        Written(part.name, part.uri, manifest) for part, manifest in zip(parts, manifests, strict=True)
    )
    total = sum(source.rows for source in sources)
    return Rewritten(written, total - sum(part.samples for part in parts))


def _check_dest(dest: str, targets: Sequence[str], datasets: Sequence[Dataset]) -> None:
    if scheme_of(dest) in ("http", "https"):
        raise UsageError("a web server takes no files", where=dest, hint="write to a folder, s3:// or az://")
    taken = {_place(root) for dataset in datasets for root in dataset.roots}
    for target in (dest, *targets):
        if _place(target) in taken:
            raise UsageError(
                "a dataset cannot be rewritten onto itself", where=target, hint="choose another DEST"
            )


def _place(uri: str) -> str:
    return os.path.realpath(local_path(uri)) if is_local(uri) else uri.rstrip("/")


def _named(names: Iterable[str]) -> list[str]:
    """The parts' names, checked."""
    parts = list(names)
    if len(set(parts)) < len(parts):
        raise UsageError(f"two parts have the same name: {', '.join(parts)}")
    if not 1 <= len(parts) < LEFT_OUT:
        raise UsageError(f"{len(parts)} parts: at most {LEFT_OUT - 1}")
    for name in parts:
        plain = all(letter.isalnum() or letter in "._-" for letter in name)
        if not plain or not name or name[0] in "._-" or len(name) > 64:
            raise UsageError(f"a part's name {name!r} is no folder's: letters, digits, `-`, `_` and `.`")
    return parts


def _threads(options: Options) -> int:
    if not 0 <= options.threads <= MAX_THREADS:
        raise UsageError(f"threads must be from 0 to {MAX_THREADS}, not {options.threads}")
    return options.threads or min(4, os.cpu_count() or 1)


def _saying(options: Options, what: str) -> Callable[[int, int], None] | None:
    if options.progress is None:
        return None
    say = options.progress
    return lambda done, total: say(what, done, total)
