"""Where pictures and captions come from: one small interface, and what it hands over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from isthmus.core.encode.pictures import Size
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image


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
    """How many pictures there are of each size."""


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


def open_source(source: str) -> ImageSource:
    """The source that a command line names.

    `emoji` is the quickstart's; otherwise a folder of pictures, or a `.csv` or `.jsonl` file that lists some
    (file names are relative to the file's folder). A folder that is called `emoji` is written `./emoji`.

    Raises:
        UsageError: there is no such folder or file.
    """
    if source == "emoji":
        from isthmus.core.encode.emoji import EmojiSource

        return EmojiSource()
    path = Path(source)
    if not path.exists():
        raise UsageError(
            f"no folder of pictures at {source}",
            hint="a folder with captions, a .csv or .jsonl file that lists pictures, or `emoji`",
        )
    from isthmus.core.encode.folder import FolderSource

    if path.is_dir():
        return FolderSource(path)
    if path.suffix.lower() in (".csv", ".jsonl"):
        return FolderSource(path.parent, listing=path)
    raise UsageError(
        f"{source} is a file, not a folder of pictures", hint="name a folder, a .csv or a .jsonl file"
    )
