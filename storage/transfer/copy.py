"""Copying one place into another: what a user asks for, planned and then carried out."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from isthmus.errors import PlaceNotFound, UsageError
from isthmus.storage import filesystems
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.retry import RetryPolicy
from isthmus.storage.ranges.settings import AZURE_SCHEMES, AzureAccount, container_and_path
from isthmus.storage.transfer.blob import BlobPlace
from isthmus.storage.transfer.engine import Engine
from isthmus.storage.transfer.journal import Journal
from isthmus.storage.transfer.local import LocalPlace
from isthmus.storage.transfer.pace import Bandwidth
from isthmus.storage.transfer.plan import (
    MANIFEST,
    PART_BYTES,
    Item,
    Plan,
    accepted,
    difference,
    part_bytes_for,
)
from isthmus.storage.transfer.s3 import S3Place
from isthmus.storage.transfer.spec import MIB, Entry, Place
from isthmus.storage.transfer.work import Progress, SideRetry

_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to copy."""

    parallel: int | None = None
    """Parts on the way at the same time; None: see `parts_at_once`."""
    memory: int = 1 << 30
    """Bytes of all buffers together; fewer parts are on the way when they would need more."""
    bandwidth: float | None = None
    """Bytes a second."""
    delete: bool = False
    """Files that only the destination has are removed; a dataset there may be replaced by another."""
    checksum: bool = False
    """Files of the same size are compared by reading both, and what was written is read back."""
    by_service: bool = True
    """A store may fetch files by itself where it can."""
    part_bytes: int = PART_BYTES
    budget_s: float = 300.0
    """How long a request that fails is tried again."""
    stall_s: float = 60.0

    def parts_at_once(self, target: str) -> int:
        """`parallel`, or what is fast: into a folder here the cores are soon the limit, and more threads only wait for them."""
        if self.parallel is not None:
            return self.parallel
        return min(max(2 * (os.cpu_count() or 1), 4), _AT_ONCE) if filesystems.is_local(target) else _AT_ONCE


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy did."""

    files: int
    bytes: int
    same: int
    deleted: int
    parts_sent: int
    parts_there: int
    by_service: int
    checked: dict[str, int]
    counts: dict[str, float]
    """requests, retries, throttled."""


class Copy:
    """One copy from place to place; `with` it, `plan` it, `run` it.

    Args:
        state: the folder of this machine's journals.
        dry: only planned: the journal is read, not held.

    Raises:
        UsageError: a place that cannot be copied from or to, or one within the other.
        NotInstalled, StorageError: see the places.
    """

    def __init__(self, source: str, target: str, options: Options, state: Path, *, dry: bool = False) -> None:
        _apart(source, target)
        self.options = options
        pace = Bandwidth(options.bandwidth) if options.bandwidth else None
        # The bytes are counted once: where they go out, or of a download where they come in.
        out = not filesystems.is_local(target)
        self.source = open_place(source, options, None if out else pace)
        self.target = open_place(target, options, pace if out else None)
        self.journal = Journal(state, self.source.uri, self.target.uri, dry=dry)
        self._policy = RetryPolicy(budget_s=options.budget_s, stall_s=options.stall_s)
        self._counters = Counters()

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections and the journal."""
        self.source.close()
        self.target.close()
        self.journal.close()

    def plan(self) -> Plan:
        """Lists both sides and says what differs.

        Raises:
            DataError: the source's files are not of the sizes that its index tells.
            UsageError: nothing is there to copy, or no such bucket.
            StorageError: a side cannot be listed.
        """
        plan = Plan(self.source.uri, self.target.uri)
        with ThreadPoolExecutor(2, thread_name_prefix="list") as pool:
            here = pool.submit(self._listed, self.source, plan.left_out)
            there = pool.submit(self._listed, self.target, {})
            found, present = here.result(), there.result()
        if not found:
            raise UsageError(
                "there is nothing to copy",
                where=plan.source,
                hint="name a folder or a prefix that holds files",
            )
        vouched = None
        if MANIFEST in found:
            from isthmus.storage.transfer.known import check_vouched, vouched_for

            vouched = vouched_for(self.source.uri)
            check_vouched(vouched, found, plan.source)
        done = self.journal.done
        plan.started = dict(self.journal.started)

        def judge(entry: Entry) -> tuple[Entry, int | None, str, bool]:
            crc = vouched.files.get(entry.name, (0, None))[1] if vouched is not None else None
            other = present.get(entry.name)
            why, differs = difference(entry, other, done.get(entry.name), crc, self._look)
            if (
                self.options.checksum
                and not differs
                and other is not None
                and why in {"time", "etag", "copied"}
            ):
                why, differs = "checksum", self._differ(entry, other, crc)
            return entry, crc, why, differs

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="compare") as pool:
            for entry, crc, why, differs in pool.map(judge, (found[name] for name in sorted(found))):
                if differs:
                    plan.items.append(Item(entry, why, crc))
                else:
                    plan.same.append((entry, present[entry.name], why))
        plan.extra = [present[name] for name in sorted(present.keys() - found.keys())]
        largest = max((item.entry.size for item in plan.items), default=0)
        if largest > self.target.limits.largest_file:
            raise UsageError(
                f"a file has {largest:,} bytes; the destination takes up to {self.target.limits.largest_file:,}",
                where=plan.target,
            )
        plan.part_bytes = part_bytes_for(largest, self.target.limits, self.options.part_bytes)
        if self.options.memory < plan.buffer_bytes:
            needed = plan.buffer_bytes / MIB
            raise UsageError(
                f"memory of {self.options.memory / MIB:.1f} MiB does not hold one part of {needed:.1f} MiB",
                where="--memory",
                hint=f"allow {needed:.1f} MiB or more",
            )
        return plan

    def run(self, plan: Plan, on_progress: Callable[[Progress], None] = lambda progress: None) -> Copied:
        """Carries a plan out. Files whose presence says that all is there come last, and only if all is.

        Raises:
            UsageError: the destination holds another dataset, and nothing was said of replacing it.
            DataError, StorageError: the first failure; what arrived stays, and the next copy goes on from there.
        """
        self._replace_datasets(plan)
        options = self.options
        engine = Engine(
            self.source,
            self.target,
            self.journal,
            parallel=max(min(options.parts_at_once(self.target.uri), options.memory // plan.buffer_bytes), 1),
            part_bytes=plan.part_bytes,
            by_service=options.by_service,
            read_back=options.checksum,
            policy=self._policy,
        )
        going = {item.entry.name for item in plan.items}
        for name in [name for name in self.journal.started if name not in going]:
            engine.forget(name)
        deleted = 0
        for last in (False, True):
            items = [item for item in plan.items if item.last == last]
            if last and items:
                self.target.settle()
            if last and options.delete:
                deleted = self._delete(plan.extra)
            if items:
                engine.run(items, on_progress)
            if last and items:
                self.target.settle()
            if engine.progress.failures:
                raise _all(engine.progress, len(plan.items))
        progress, counters = engine.progress, engine.counters
        return Copied(
            progress.files,
            progress.bytes,
            len(plan.same),
            deleted,
            progress.parts_sent,
            progress.parts_there,
            progress.by_service,
            dict(progress.checked),
            {name: counters.count(name) for name in ("requests", "retries", "throttled")},
        )

    def _replace_datasets(self, plan: Plan) -> None:
        """The manifest of another dataset goes first, or it would vouch for a mixture."""
        for item in plan.items:
            name = item.entry.name
            folder, _, base = name.rpartition("/")
            others = any(
                other.entry.name != name and other.entry.name.startswith(f"{folder}/" if folder else "")
                for other in plan.items
            )
            if base != MANIFEST or item.why == "missing" or not others:
                continue
            there = self._look_at(self.target, name)
            if there is None or not self._differ(item.entry, there, None):
                continue
            if not self.options.delete:
                raise UsageError(
                    "the destination holds another dataset, and copying over it would mix the two",
                    where=f"{plan.target}/{folder}".rstrip("/"),
                    hint="name an empty place, or replace it with --delete",
                )
            self._tried("delete").run(name, lambda: self.target.delete(name), refresh=self.target.refresh)  # noqa: B023

    def _delete(self, extra: list[Entry]) -> int:
        retry = self._tried("delete")
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="delete") as pool:
            names = [entry.name for entry in extra]
            list(
                pool.map(
                    lambda name: retry.run(
                        name, lambda: self.target.delete(name), refresh=self.target.refresh
                    ),
                    names,
                )
            )
        return len(extra)

    def _listed(self, place: Place, left_out: dict[str, int]) -> dict[str, Entry]:
        retry = self._tried("list", place)
        try:
            return retry.run(
                "", lambda: accepted(place.entries(), place.uri, left_out), refresh=place.refresh
            )
        except FileNotFoundError as error:
            raise PlaceNotFound(place.uri) from error

    def _ended(self, entry: Entry, other: Entry) -> bool:
        """Whether the destination's file is one that a copy finished, which was killed before it wrote that down."""
        begun = self.journal.started.get(entry.name)
        if begun is None or begun.source != entry.version or other.size != entry.size:
            return False
        parts = [begun.parts[number] for number in sorted(begun.parts)]
        return bool(parts) and self.target.holds(other, parts)

    def _look(self, name: str) -> Entry | None:
        # Only S3 tells more of one file than in a listing.
        return self._look_at(self.target, name) if self.target.kind == "s3" else None

    def _look_at(self, place: Place, name: str) -> Entry | None:
        return self._tried("read", place).run(name, lambda: place.find(name), refresh=place.refresh)

    def _differ(self, entry: Entry, other: Entry, crc: int | None) -> bool:
        """Whether the bytes of two files of one size differ, by reading what nobody vouches for."""
        memory = memoryview(bytearray(min(4 * MIB, max(entry.size, 1))))
        return self._crc(self.target, other, memory) != (
            crc if crc is not None else self._crc(self.source, entry, memory)
        )

    def _crc(self, place: Place, entry: Entry, memory: memoryview) -> int:
        retry, crc = self._tried("read", place), 0
        for start in range(0, entry.size, len(memory)):
            view = memory[: min(len(memory), entry.size - start)]
            retry.run(entry.name, lambda: place.read(entry, start, view), refresh=place.refresh)  # noqa: B023
            crc = zlib.crc32(view, crc)
        return crc

    def _tried(self, verb: str, place: Place | None = None) -> SideRetry:
        place = place or self.target
        retry = SideRetry(place.uri, self._policy, self._counters, store=f"copy at {place.uri}")
        retry.verb = verb
        return retry


def _all(progress: Progress, files: int) -> Exception:
    """What is raised of files that failed: the first, and how many more."""
    first, more = progress.failures[0], len(progress.failures) - 1
    if more:
        first.message += f" (and {more} more of {files} files; the others were copied)"
    return first


def open_place(uri: str, options: Options, pace: Callable[[int], None] | None) -> Place:
    """The place of a URI.

    Raises:
        UsageError: nothing can be copied from or to such an address.
    """
    scheme = filesystems.scheme_of(uri)
    if scheme == "file":
        return LocalPlace(uri)
    if not container_and_path(uri)[0]:
        raise UsageError("it names no bucket or container", where=uri)
    if scheme == "s3":
        return S3Place(uri, stall_s=options.stall_s, pace=pace)
    if scheme in AZURE_SCHEMES:
        return BlobPlace(uri, stall_s=options.stall_s, pace=pace)
    raise UsageError(
        f"{scheme}:// cannot be copied",
        where=uri,
        hint="a folder, s3://bucket/prefix or az://container@account.blob.core.windows.net/prefix",
    )


def _apart(source: str, target: str) -> None:
    """That neither place lies in the other."""
    one, other = (_identity(uri) for uri in (source, target))
    shorter, longer = sorted((one, other), key=len)
    if longer[: len(shorter)] == shorter:
        what = "the two places are the same" if one == other else "one place lies within the other"
        raise UsageError(what, where=f"{source} and {target}")


def _identity(uri: str) -> tuple[str, ...]:
    scheme = filesystems.scheme_of(uri)
    if scheme == "file":
        return "file", *filesystems.local_path(uri).resolve().parts
    bucket, path = container_and_path(uri)
    host = ""
    if scheme in AZURE_SCHEMES:
        with contextlib.suppress(UsageError):
            host = urlsplit(AzureAccount.of(uri).endpoint).netloc
        scheme = "az"
    return scheme, host, bucket, *(part for part in path.split("/") if part)
