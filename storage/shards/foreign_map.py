"""The column map: which columns of parquet files made by others are a sample's key, captions, embeddings and latents."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isthmus.errors import UsageError
from isthmus.storage.shards.spec import DatasetSpec, FieldSpec

Dtype = Literal["float16", "float32"]

LOGVAR_OF_A_POINT = -30.0
"""Log variance where the files hold none: exp(-15) = 3e-7 is lost beside a latent; diffusers clamps at the same."""


@dataclass(frozen=True, slots=True)
class Values:
    """A column whose rows are arrays of numbers: raw bytes, or lists (nested ones are read in C-order)."""

    column: str
    dtype: Dtype = "float16"
    """Of raw bytes, little-endian. Lists say theirs."""


@dataclass(frozen=True, slots=True)
class LatentColumns:
    """The latents at one resolution, [C, H, W]."""

    mean: Values
    logvar: Values | None = None
    """None: the latent is a point, its log variance is :data:`LOGVAR_OF_A_POINT`."""
    scaled: bool = False
    """The files hold (latent - shift_factor) * scaling_factor; reading undoes it."""


@dataclass(frozen=True, slots=True)
class TextColumns:
    """One encoder's embeddings of one caption."""

    tokens: Values
    """[T, width] with T <= max_tokens; padded with zeros."""
    length: str | None = None
    """Valid tokens. None: all `max_tokens` are valid, or, of a `ragged` column, as many as a row holds."""
    pooled: Values | None = None
    """[pooled_width]"""
    ragged: bool = False
    """Rows may hold fewer than `max_tokens` tokens although no column says how many."""


@dataclass(frozen=True, slots=True)
class CaptionColumns:
    """One caption and its embeddings."""

    caption: str | None
    """The text. None: the files hold embeddings alone, and captions are empty."""
    text: Mapping[str, TextColumns]
    """Encoder -> its columns."""


@dataclass(frozen=True, slots=True)
class FieldColumn:
    """What else is told of a sample; null where it is not."""

    column: str
    kind: Literal["number", "text"]


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Where a sample's parts are. What the files lack is None and has the default that the field names."""

    captions: tuple[CaptionColumns, ...]
    latents: Mapping[int, LatentColumns]
    """By resolution."""
    key: str | None = None
    """Text or whole numbers. Default: file name, row group and row, as in ``a/b.parquet#3:17``."""
    source: str | None = None
    """Default: empty."""
    original_size: tuple[str, str] | None = None
    """Height and width, pixels. Default: the bucket's size at the largest resolution."""
    crop: tuple[str, str, str, str] | None = None
    """Top, left, height, width. Default: 0, 0 and the bucket's size at the largest resolution."""
    flipped: str | None = None
    """True or false, or 0 and 1. Default: false."""
    fields: Mapping[str, FieldColumn] = field(default_factory=dict)
    """Of `spec.fields`: by their names in the dataset."""

    def to_json(self) -> dict[str, Any]:
        """As the section `columns` of a manifest or of a map file."""
        data: dict[str, Any] = {
            "captions": [
                {
                    "caption": caption.caption,
                    **{
                        name: _without_none(
                            tokens=_values_json(text.tokens),
                            length=text.length,
                            pooled=text.pooled and _values_json(text.pooled),
                            ragged=text.ragged or None,
                        )
                        for name, text in sorted(caption.text.items())
                    },
                }
                for caption in self.captions
            ],
            "latents": {
                str(resolution): _without_none(
                    mean=_values_json(latent.mean),
                    logvar=latent.logvar and _values_json(latent.logvar),
                    scaled=latent.scaled or None,
                )
                for resolution, latent in sorted(self.latents.items())
            },
        }
        rest = _without_none(
            key=self.key,
            source=self.source,
            original_size=self.original_size and list(self.original_size),
            crop=self.crop and list(self.crop),
            flipped=self.flipped,
            fields={name: {"column": told.column, "kind": told.kind} for name, told in self.fields.items()}
            or None,
        )
        return {**data, **rest}

    def names(self) -> list[str]:
        """Every column of the files that has a role, each once."""
        found: dict[str, None] = {}
        for caption in range(len(self.captions)):
            for resolution in self.latents:
                found |= dict.fromkeys(self.of(resolution, caption))
        if self.source is not None:
            found[self.source] = None
        found |= dict.fromkeys(told.column for told in self.fields.values())
        return list(found)

    def of(self, resolution: int, caption: int) -> list[str]:
        """The columns that a block needs at one resolution, with one caption; each once."""
        return list(dict.fromkeys(self._of(resolution, caption)))

    def _of(self, resolution: int, caption: int) -> Iterator[str]:
        words = self.captions[caption]
        yield from (
            name
            for name in (
                self.key,
                words.caption,
                *(self.original_size or ()),
                *(self.crop or ()),
                self.flipped,
            )
            if name is not None
        )
        for text in words.text.values():
            yield text.tokens.column
            if text.length is not None:
                yield text.length
            if text.pooled is not None:
                yield text.pooled.column
        latent = self.latents[resolution]
        yield latent.mean.column
        if latent.logvar is not None:
            yield latent.logvar.column

    def field_specs(self) -> tuple[FieldSpec, ...]:
        """The dataset's fields."""
        return tuple(FieldSpec(name, told.kind) for name, told in self.fields.items())

    def check(self, spec: DatasetSpec) -> None:
        """UsageError unless the map has what the spec promises: its encoders, resolutions and captions."""
        if tuple(sorted(self.latents)) != spec.resolutions:
            raise UsageError(
                f"columns.latents are at {sorted(self.latents)} px, not {list(spec.resolutions)}"
            )
        if len(self.captions) != spec.captions:
            raise UsageError(f"columns.captions has {len(self.captions)} captions, not {spec.captions}")
        if self.field_specs() != spec.fields:
            raise UsageError(
                f"columns.fields are {', '.join(self.fields) or 'none'}, not the dataset's fields"
            )
        for number, caption in enumerate(self.captions):
            place = f"columns.captions.{number}"
            for encoder in spec.text:
                if encoder.name not in caption.text:
                    raise UsageError(f"{place} does not say where the tokens of {encoder.name} are")
                pooled = caption.text[encoder.name].pooled
                if (pooled is None) != (encoder.pooled_width is None):
                    raise UsageError(
                        f"{place}.{encoder.name} has {'no' if pooled is None else 'a'} pooled vector, "
                        f"its pooled_width is {encoder.pooled_width}"
                    )
            unknown = sorted(set(caption.text) - {encoder.name for encoder in spec.text})
            if unknown:
                raise unknown_field(place, unknown[0], ["caption", *(e.name for e in spec.text)])


def parse_columns(raw: Any) -> ColumnMap:
    """The map in a manifest's or a map file's section `columns`. UsageError names the field that is wrong."""
    table = Section(raw, "columns")
    captions = table.raw.get("captions")
    if isinstance(captions, Mapping):
        captions = [captions]
    if not isinstance(captions, list) or not captions:
        raise UsageError("columns.captions must be a list with at least one caption's columns")
    latents = Section(table.raw.get("latents"), "columns.latents")
    if not latents.raw:
        raise UsageError("columns.latents needs a resolution, as in `256: {mean: COLUMN}`")
    found = ColumnMap(
        captions=tuple(_caption(item, f"columns.captions.{at}") for at, item in enumerate(captions)),
        latents={
            _resolution(resolution): _latent(item, f"columns.latents.{resolution}")
            for resolution, item in latents.raw.items()
        },
        key=table.name("key"),
        source=table.name("source"),
        original_size=table.names("original_size", 2, "[HEIGHT, WIDTH]"),
        crop=table.names("crop", 4, "[TOP, LEFT, HEIGHT, WIDTH]"),
        flipped=table.name("flipped"),
        fields=_fields(table.raw.get("fields")),
    )
    table.known("captions", "latents", "key", "source", "original_size", "crop", "flipped", "fields")
    return found


@dataclass(slots=True)
class Section:
    """A mapping that somebody wrote, with its place for messages."""

    raw: Any
    place: str
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not isinstance(self.raw, Mapping):
            raise UsageError(f"{self.place} must be a mapping, not {self.raw!r:.60}")

    def known(self, *fields: str) -> None:
        """UsageError for a field that is none of these."""
        for name in self.raw:
            if name not in fields:
                raise unknown_field(self.place, str(name), fields)

    def name(self, field: str, *, needed: bool = False) -> Any:
        """A column's name, or None."""
        value = self.raw.get(field)
        if value is None and not needed:
            return None
        return column_name(value, f"{self.place}.{field}")

    def names(self, field: str, count: int, form: str) -> Any:
        """A tuple of `count` columns' names, or None."""
        value = self.raw.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise UsageError(f"{self.place}.{field} must be {form}, columns' names")
        return tuple(column_name(name, f"{self.place}.{field}") for name in value)

    def values(self, field: str, *, needed: bool = False) -> Any:
        """A :class:`Values`, or None."""
        value = self.raw.get(field)
        if value is None and not needed:
            return None
        if isinstance(value, Mapping):
            inner = Section(value, f"{self.place}.{field}")
            inner.known("column", "dtype")
            dtype = value.get("dtype", "float16")
            if dtype not in ("float16", "float32"):
                raise UsageError(f"{inner.place}.dtype is float16 or float32, not {dtype!r:.60}")
            return Values(inner.name("column", needed=True), dtype)
        return Values(column_name(value, f"{self.place}.{field}"))

    def flag(self, field: str) -> bool:
        """True or false; false when absent."""
        value = self.raw.get(field, False)
        if not isinstance(value, bool):
            raise UsageError(f"{self.place}.{field} is true or false, not {value!r:.60}")
        return value


def column_name(value: Any, place: str) -> str:
    """A column's name; UsageError when it is none."""
    if not isinstance(value, str) or not value or len(value) > 200:
        raise UsageError(f"{place} must be a column's name, not {value!r:.60}")
    return value


def unknown_field(place: str, name: str, known: Collection[str]) -> UsageError:
    """The error for a field that does not exist, with what may have been meant."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    return UsageError(f"{place}.{name} is not a field", hint=hint)


def _caption(raw: Any, place: str) -> CaptionColumns:
    section = Section(raw, place)
    text = {}
    for name, item in section.raw.items():
        if name == "caption":
            continue
        inner = Section({"tokens": item} if isinstance(item, str) else item, f"{place}.{name}")
        inner.known("tokens", "length", "pooled", "ragged")
        text[str(name)] = TextColumns(
            tokens=inner.values("tokens", needed=True),
            length=inner.name("length"),
            pooled=inner.values("pooled"),
            ragged=inner.flag("ragged"),
        )
    return CaptionColumns(section.name("caption"), text)


def _latent(raw: Any, place: str) -> LatentColumns:
    section = Section({"mean": raw} if isinstance(raw, str) else raw, place)
    section.known("mean", "logvar", "scaled")
    return LatentColumns(
        mean=section.values("mean", needed=True),
        logvar=section.values("logvar"),
        scaled=section.flag("scaled"),
    )


def _fields(raw: Any) -> dict[str, FieldColumn]:
    found = {}
    for name, item in Section({} if raw is None else raw, "columns.fields").raw.items():
        place = f"columns.fields.{name}"
        inner = Section({"kind": item} if isinstance(item, str) else item, place)
        inner.known("column", "kind")
        kind = inner.raw.get("kind")
        if kind not in ("number", "text"):
            raise UsageError(
                f"{place} is number or text, or {{column: NAME, kind: number}}, not {kind!r:.60}"
            )
        column = inner.name("column") or column_name(name, place)
        found[str(name)] = FieldColumn(column, kind)
    return found


def _resolution(raw: Any) -> int:
    try:
        return int(raw)
    except (TypeError, ValueError):
        raise UsageError(f"columns.latents.{raw} is not a resolution in pixels") from None


def _values_json(values: Values) -> Any:
    return values.column if values.dtype == "float16" else {"column": values.column, "dtype": values.dtype}


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
