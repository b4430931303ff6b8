"""Checks a sample of a dataset: everything that is small, the size of every file, and some row groups whole.

What it costs depends on the sample and on the number of files, not on the rows: a listing, and a few megabytes a row group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

import numpy as np

from isthmus.errors import CorruptShard, StorageError, UsageError
from isthmus.storage.filesystems import filesystem, scheme_of, storage_errors
from isthmus.storage.shards.dataset import Dataset
from isthmus.storage.shards.draw import draw_blocks
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.foreign_verify import fields_reader, verify_block
from isthmus.storage.shards.layout import siblings
from isthmus.storage.shards.verify import Problem, Verifier, VerifyReport, begin

THREADS = 4
"""Shards that are looked at together; each holds one row group of one sibling in memory."""
CONFIDENCE = 0.95


def verify_sample(
    uri: str | Sequence[str],
    rows: int,
    *,
    seed: int = 0,
    on_problem: Callable[[Problem], None] | None = None,
    finite: bool = True,
    threads: int = THREADS,
) -> VerifyReport:
    """Checks manifest, index and the files beside the shards, that every file is there with its size, and some row groups.

    Of a row group that is drawn, all of every sibling is checked as :func:`isthmus.storage.shards.verify` does it, and the
    footers of its files. The same dataset, `rows` and `seed` draw the same ones. Memory: `threads` row groups.

    Args:
        uri: the dataset's root, or its roots.
        rows: how many at least are looked at; whole row groups are, and all of them where there are no more.
        seed: another one draws others.
        on_problem: called for each problem, in the order of the index.
        finite: look into the rows, too.

    Raises:
        UsageError: fewer than one row.
        DatasetNotFound: there is no manifest.
    """
    if rows < 1:
        raise UsageError(f"a sample has at least one row, not {rows}")
    verifier, dataset = begin(uri, on_problem, finite)
    if dataset is None:
        return verifier.report
    damaged = _sizes(dataset, verifier)
    chosen = draw_blocks(dataset, rows, seed)
    report = verifier.report
    report.row_groups, report.row_groups_of = len(chosen), len(dataset.index)
    for part in _parts(dataset, chosen, finite, threads):
        for problem in part.problems:
            # A file of another size was told already.
            if problem.shard not in damaged or problem.row_group is not None:
                verifier.problem(problem.message, problem.shard, row_group=problem.row_group, row=problem.row,
                                 column=problem.column)  # fmt: skip
        report.files, report.rows, report.size = (
            report.files + part.files, report.rows + part.rows, report.size + part.size,
        )  # fmt: skip
    return report


def unseen_share(report: VerifyReport) -> float:
    """The share of damaged row groups that a sample without problems may still have missed, at 95 % confidence.

    Of k row groups drawn from n without finding any of m damaged ones the chance is at most (1 - m/n)^k.
    """
    if report.row_groups >= report.row_groups_of or not report.row_groups:
        return 0.0 if report.row_groups else 1.0
    return float(1 - (1 - CONFIDENCE) ** (1 / report.row_groups))


def _parts(dataset: Dataset, chosen: list[int], finite: bool, threads: int) -> Iterator[VerifyReport]:
    """A report of each shard with a row group that was chosen, in order, a few ahead of the one that is asked for."""
    shards = [
        list(blocks) for _, blocks in groupby(chosen, key=lambda block: int(dataset.index.shard[block]))
    ]
    _ = dataset._readers  # made once, before threads share them
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[VerifyReport]] = []
        for blocks in shards:
            waiting.append(pool.submit(_shard, dataset, blocks, finite))
            if len(waiting) >= 2 * threads:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _shard(dataset: Dataset, chosen: list[int], finite: bool) -> VerifyReport:
    index = dataset.index
    verifier = Verifier(dataset.uri, None, finite)
    if index.foreign is not None:
        return _foreign(dataset, chosen, verifier)
    number = int(index.shard[chosen[0]])
    # The blocks of a shard lie together, and shards are numbered in their order.
    first, end = np.searchsorted(index.shard, [number, number + 1]).tolist()
    verifier.shard(dataset, range(first, end), chosen)
    return verifier.report


def _foreign(dataset: Dataset, chosen: list[int], verifier: Verifier) -> VerifyReport:
    index, files, report = dataset.index, dataset.index.foreign, verifier.report
    assert files is not None
    readers = {resolution: ForeignReader(dataset, resolution) for resolution in dataset.spec.resolutions}
    name = index.file(chosen[0], "")
    report.files, report.rows = 1, int(index.rows[chosen].sum())
    try:
        readers[dataset.spec.resolutions[0]].footer(chosen[0])
    except (CorruptShard, StorageError) as error:
        verifier.problem(error.message, name)
        return report
    fields = fields_reader(dataset)
    for block in chosen:
        report.size += sum(reader.size(block) for reader in readers.values())
        verify_block(dataset, block, readers, verifier.problem, fields)
    return report


def _sizes(dataset: Dataset, verifier: Verifier) -> set[str]:
    """Reports every file that is missing or of another size than the index lists; names them."""
    told = _told(dataset)
    if any(scheme_of(root) in ("http", "https") for root in dataset.roots):
        return set()  # a web server does not list its files; those that are drawn are looked at
    found: dict[str, int] = {}
    for root in dataset.roots:
        store, path = filesystem(root)
        base = path.rstrip("/") + "/"
        try:
            with storage_errors("list", root):
                store.invalidate_cache()
                listed = store.find(path, detail=True)
        except (FileNotFoundError, StorageError) as error:
            verifier.problem(f"cannot be listed: {error}", root)
            return set()
        for place, info in listed.items():
            name = str(place).removeprefix(base)
            if name in told and dataset.root(name) == root:
                found[name] = int(info.get("size") or 0)
    wrong = set()
    for name, size in told.items():
        if name not in found:
            verifier.problem("the file is missing", name)
        elif found[name] != size:
            verifier.problem(f"it has {found[name]} bytes, the index lists {size}", name)
        else:
            continue
        wrong.add(name)
    return wrong


def _told(dataset: Dataset) -> dict[str, int]:
    """File name -> bytes, as the index has it."""
    index, spec = dataset.index, dataset.spec
    firsts = np.flatnonzero(np.diff(index.shard, prepend=-1)).tolist()
    if index.foreign is not None:
        return {index.file(block, ""): int(index.foreign.file_bytes[block]) for block in firsts}
    return {
        index.file(block, sibling): int(index.sibling(sibling).file_bytes[block])
        for block in firsts
        for sibling in siblings(spec, int(index.size_class[block]))
    }
