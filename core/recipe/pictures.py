"""What `isthmus data encode` takes of a source: names of its columns, captions, filters."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from isthmus.core.recipe.stages import Section


class CaptionField(Section):
    """One field that holds a caption, or several."""

    field: Annotated[str, Field(min_length=1)]
    """A column, a key of the `.json` beside a picture, or `txt` for the text file beside it."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of a picture's stored captions; training draws among those evenly."""


_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = re.compile(
    r"key|caption[0-9]*|source|bucket|size_class|width|height|original_(height|width)|crop_(top|left|height|width)"
    r"|flipped|latent_.*|phash|phash_colours|and|or|not|in|is|null|like|between|true|false",
    re.IGNORECASE,
)


class KeptField(Section):
    """One field of the source that is kept with the samples, for `data stats`, `data filter` and `data split`."""

    field: Annotated[str, Field(min_length=1)]
    """A column, or a key of the `.json` beside a picture."""
    kind: Literal["number", "text"]
    """number: float64, true and false are 1 and 0; text: up to 2,000 characters. What is neither there nor of this kind is null."""
    name: str | None = None
    """In the dataset: letters, digits and underscores; null: as the field is called."""

    @property
    def stored(self) -> str:
        """What it is called in the dataset."""
        return self.name or self.field


def _names(kept: list[KeptField]) -> list[KeptField]:
    seen = set[str]()
    for item in kept:
        if not _FIELD_NAME.fullmatch(item.stored):
            raise ValueError(
                f"{item.stored!r} is not letters, digits and underscores, at most 64: give it a `name` that is"
            )
        if _TAKEN.fullmatch(item.stored):
            raise ValueError(
                f"{item.stored} is what shards or predicates call something else: give it another `name`"
            )
        if item.stored.casefold() in seen:
            raise ValueError(f"{item.stored} is there twice (capitals do not count)")
        seen.add(item.stored.casefold())
    return kept


class Bounds(Section):
    """What a number may be."""

    min: float | None = None
    """Smallest that is taken."""
    max: float | None = None
    """Largest that is taken."""


class Pictures(Section):
    """Which of a source's pictures are encoded, and what its columns are called."""

    image: str | None = None
    """Column of the picture's bytes, path or URL; null: the first of the usual names that is there."""
    key: str | None = None
    """Column that names a row within its file; null: its number."""
    captions: list[CaptionField] = []  # noqa: RUF012
    """Fields with captions; empty: `txt`, `text`, `caption` and `captions`, whichever are there."""
    provenance: str | None = None
    """Field that says where a picture is from; null: `source` or `url`, where there is one."""
    min_side: Annotated[int, Field(ge=0)] = 0
    """Pictures whose shorter side has fewer pixels are left out."""
    min_ratio: Annotated[float, Field(gt=0)] | None = None
    """Smallest width / height that is taken."""
    max_ratio: Annotated[float, Field(gt=0)] | None = None
    """Largest width / height that is taken."""
    scores: dict[str, Bounds] = {}  # noqa: RUF012
    """Field -> bounds, such as an aesthetic score's or a watermark's; a picture without the number is left out."""
    licence: str | None = None
    """Field that names a picture's licence."""
    licences: list[str] = []  # noqa: RUF012
    """Licences that are taken, in any case of letters; empty: all."""
    keep: Annotated[list[KeptField], Field(max_length=60), AfterValidator(_names)] = []  # noqa: RUF012
    """Fields that are kept with the samples, so that a dataset can be filtered and split by them later."""
    phash: bool = True
    """Keep a perceptual hash of each picture, which `data duplicates` then need not get out of the latents."""
