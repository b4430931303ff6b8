"""What `isthmus data encode` takes of a source: names of its columns, captions, filters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.core.recipe.stages import Section


class CaptionField(Section):
    """One field that holds a caption, or several."""

    field: Annotated[str, Field(min_length=1)]
    """A column, a key of the `.json` beside a picture, or `txt` for the text file beside it."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its share of a picture's stored captions; training draws among those evenly."""


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
