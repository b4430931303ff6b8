"""A run directory from wherever it is to a folder of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from isthmus.errors import UsageError
from isthmus.storage.copying import Copied, Item, Tree, copy
from isthmus.storage.rundir import RunDirectory

_FIXED = ("checkpoints/", "events/", "plan/", "submissions/", "code/", "samples/")
"""What never changes once it is there; of these a file of the same size is the same file."""
_LEFT = ("lease/", "jobs/")
"""What only the place itself means something for: who may write there, and what its jobs were sent."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What was brought here."""

    folder: Path
    copied: Copied
    files: int
    bytes: int
    """Of all files that belong to it, also of those that were here already."""


def listed(run: RunDirectory, tree: Tree, *, steps: list[int] | None = None) -> tuple[list[Item], list[Item]]:
    """The files of a run, and apart from them those that are written last: COMMITTED and run.json.

    Args:
        steps: of the committed checkpoints that are wanted; None: all.

    Raises:
        StorageError.
    """
    committed = run.checkpoints()
    wanted = {f"step-{step:08d}": step for step in committed if steps is None or step in steps}
    hashes: dict[str, str] = {}
    for name, step in wanted.items():
        for file, facts in run.read_commit(step).get("files", {}).items():
            hashes[f"checkpoints/{name}/{file}"] = str(facts["sha256"])
    first: list[Item] = []
    last: list[Item] = []
    for name, size in tree.sizes().items():
        if name.startswith(_LEFT):
            continue
        parts = name.split("/")
        if parts[0] == "checkpoints" and (len(parts) < 3 or parts[1] not in wanted):
            continue  # one that is not committed is not a checkpoint
        item = Item(name, size, hashes.get(name), name.startswith(_FIXED))
        (last if parts[-1] == "COMMITTED" or name == "run.json" else first).append(item)
    # run.json makes it a run: after everything.
    return first, sorted(last, key=lambda item: (item.name == "run.json", item.name))


def fetch(
    run: RunDirectory,
    folder: Path,
    *,
    only: str | None = None,
    on_file: Callable[[Item, bool], None] = lambda item, kept: None,
) -> Fetched:
    """Brings the run here; what is here already stays, so it can be cut off and called again.

    Args:
        folder: where to; it may hold an earlier fetch of the same run.
        only: a shell pattern of names, such as `checkpoints/step-00001000/*`; None: all.

    Raises:
        UsageError: nothing matches, or the folder holds another run.
        DataError: a checkpoint's bytes are not those that its COMMITTED lists.
        StorageError.
    """
    here = RunDirectory(folder)
    if here.exists() and here.read_run_json().get("id") != run.read_run_json().get("id"):
        raise UsageError(
            f"holds run {here.read_run_json().get('id')}",
            where=str(folder),
            hint="choose another folder with --to",
        )
    if run.local_path() is not None and run.local_path() == here.local_path():
        raise UsageError("the run is here already", where=str(folder), hint="choose another folder with --to")
    source, target = Tree(run.uri), Tree(str(folder))
    first, last = listed(run, source)
    if only is not None:
        first, last = ([item for item in items if fnmatchcase(item.name, only)] for items in (first, last))
        if not first and not last:
            raise UsageError(
                f"no file of the run matches {only!r}", where=run.uri, hint="such as --only 'samples/*'"
            )
    copied = copy(source, target, first, on_file=on_file)
    ended = copy(source, target, last, on_file=on_file)
    both = Copied(
        copied.files + ended.files,
        copied.bytes + ended.bytes,
        copied.kept + ended.kept,
        copied.gone + ended.gone,
    )
    everything = [*first, *last]
    return Fetched(folder, both, len(everything), sum(item.size for item in everything))
