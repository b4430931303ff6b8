"""Where pictures and captions come from: one small interface, and what it hands over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from isthmus.core.encode.pictures import Size
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

    from isthmus.core.encode.places import File, Place
    from isthmus.core.recipe.pictures import Pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecord:
    """One picture with its captions."""

    key: str
    """Names the picture within its source; unique and the same in every run."""
    image: Image
    """RGB, upright."""
    captions: tuple[str, ...]
    """At least one, none of them empty."""
    source: str
    """Provenance: where the picture is from and, where known, its licence."""
    weights: tuple[float, ...] = ()
    """Of the captions; empty when they are even."""
    fields: Mapping[str, float | str | None] = field(default_factory=dict)
    """What the recipe keeps of the source's fields."""
    unfit: tuple[str, ...] = ()
    """Of those, what was there and neither number nor text, as it should have been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A picture that is left out, and why."""

    key: str
    reason: str
    """A word to count by: `unreadable`, `too-many-pixels`, `no-caption`, `escapes`, `too-small`, ..."""
    detail: str = ""
    """One line more."""

    def to_json(self) -> dict[str, str]:
        """A line of `_rejected.jsonl`."""
        return {"key": self.key, "reason": self.reason, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of a source before its pictures are decoded. An estimate: some may be rejected later."""

    most_captions: int
    """Of any picture."""
    sizes: Counter[Size]
    """How many of the pictures that were looked at are of each size."""
    pictures: int | None = None
    """How many there are, about; None: as many as were looked at."""


@runtime_checkable
class ImageSource(Protocol):
    """Pictures in a fixed order. Iterating again gives the same records."""

    @property
    def description(self) -> str:
        """What the pictures are and under which licence."""
        ...

    def __iter__(self) -> Iterator[ImageRecord | Rejected]:
        """Records one at a time, in an order that depends on nothing but the source's content."""
        ...

    def survey(self) -> Survey:
        """A first look, without decoding a picture."""
        ...


def open_source(source: str, pictures: Pictures | None = None, *, origin: str | None = None) -> ImageSource:
    """The source that a command line names.

    `emoji` is the quickstart's; otherwise a folder or URI of pictures, WebDataset tars, parquet files or a Hugging Face
    dataset on disk, one such file, or a `.csv` or `.jsonl` file that lists pictures (file names are relative to its
    folder). What a folder holds tells what it is: arrow files before tars before parquet before pictures, so that
    the statistics that img2dataset leaves beside its tars are not taken for pictures. A folder that is called `emoji` is
    written `./emoji`.

    Args:
        pictures: names of columns, captions and filters; by default nothing is left out.
        origin: the URI that `source`, a folder of this machine, is mounted from: it is read as that would be.

    Raises:
        UsageError: there is no such folder or file, or nothing in it is known.
    """
    if source == "emoji":
        from isthmus.core.encode.emoji import EmojiSource

        if pictures is not None and pictures.keep:
            raise UsageError("`emoji` has no fields that data.pictures.keep could keep", hint="leave it out")
        return EmojiSource()
    from isthmus.core.encode.folder import FolderSource
    from isthmus.core.encode.places import Place
    from isthmus.core.recipe.pictures import Pictures
    from isthmus.storage.filesystems import is_local, local_path

    chosen = pictures if pictures is not None else Pictures()
    local = local_path(source) if is_local(source) and origin is None else None
    listing = source.lower().endswith((".csv", ".jsonl"))
    if local is not None and "{" not in source:
        if not local.exists():
            raise UsageError(
                f"no folder of pictures at {source}",
                hint="a folder with captions, tars, parquet or arrow files, a .csv or .jsonl file, or `emoji`",
            )
        if local.is_file() and listing:
            return FolderSource(local.parent, listing=local, pictures=chosen)
    place = Place(source.rpartition("/")[0] if listing else source, origin)
    files = place.files()
    for suffix, kind in ((".arrow", "arrow"), (".tar", "tar"), (".parquet", "parquet")):
        having = [file for file in files if file.name.lower().endswith(suffix)]
        if having and not listing:
            return _tables(kind, place, files if kind == "arrow" else having, chosen)
    if local is not None and local.is_dir():
        return FolderSource(local, pictures=chosen)
    if local is not None:
        raise UsageError(
            f"{source} is a file, not a folder of pictures",
            hint="name a folder, or a .tar, .parquet, .arrow, .csv or .jsonl file",
        )
    from isthmus.core.encode.store_folder import StoreFolder

    return StoreFolder(place, files, chosen, source.rpartition("/")[2] if listing else None)


def _tables(kind: str, place: Place, files: list[File], pictures: Pictures) -> ImageSource:
    if kind == "tar":
        from isthmus.core.encode.webdataset import TarSource

        return TarSource(place, files, pictures)
    from isthmus.core.encode.tables import ArrowSource, ParquetSource

    return (ArrowSource if kind == "arrow" else ParquetSource)(place, files, pictures)
