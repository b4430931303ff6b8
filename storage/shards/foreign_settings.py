"""What `isthmus data index` is told about files made by others: the map file, checked."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isthmus.errors import UsageError
from isthmus.storage.shards.foreign_map import (
    ColumnMap,
    Section,
    column_name,
    parse_columns,
)
from isthmus.storage.shards.spec import AutoencoderSpec, DatasetSpec, EncoderSpec

Shape = tuple[int, int, int]

EXAMPLE = """\
# About the files: what they do not say themselves.
about: my photographs, CC-BY-4.0
autoencoder: {kind: diffusers, latent_channels: 4, factor: 8, scaling_factor: 0.13025}
text:
  clip_l: {max_tokens: 77, width: 768, pooled_width: 768}
bucket: "1:1"              # or {column: NAME}, {height: NAME, width: NAME}, {files: {"PATTERN": "4:3"}}
null_text: zeros           # or FILE.npz, FILE.safetensors, {key: KEY OF A ROW}
# Which column is what.
columns:
  key: id
  captions:
    - caption: text
      clip_l: {tokens: clip_tokens, length: clip_length, pooled: clip_pooled}
  latents:
    512: {mean: latent}    # logvar: NAME; scaled: true; {column: NAME, dtype: float32} for raw bytes of fp32
  # source: url; original_size: [HEIGHT, WIDTH]; crop: [TOP, LEFT, HEIGHT, WIDTH]; flipped: NAME
  # fields: {aesthetic: number, licence: {column: LICENSE, kind: text}}   # for stats, filter --where and split
"""


@dataclass(frozen=True, slots=True)
class BucketRule:
    """How a row group's bucket is told. One of the fields is set."""

    constant: str | None = None
    """The same for all."""
    column: str | None = None
    """A text column that names it."""
    sides: tuple[str, str] | None = None
    """Columns with the height and width of the picture that was encoded, or of the latent."""
    pixels: bool = True
    """Whether `sides` are pixels at the largest resolution; otherwise latent cells."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Pattern of file names -> bucket; the first that fits counts."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that tell it."""
        if self.sides is not None:
            return self.sides
        return () if self.column is None else (self.column,)

    def of_file(self, name: str) -> str:
        """The bucket of a file where names or a constant tell it."""
        if self.constant is not None:
            return self.constant
        for pattern, bucket in self.files.items():
            if fnmatch.fnmatchcase(name, pattern):
                return bucket
        raise UsageError(
            "no pattern of bucket.files fits its name", where=name, hint="add one, such as '*': '1:1'"
        )


def bucket_of_sides(height: int, width: int) -> str:
    """Width to height, reduced, as our own encoder names buckets: 896 by 1152 (H, W) is ``9:7``."""
    common = math.gcd(height, width) or 1
    return f"{width // common}:{height // common}"


@dataclass(frozen=True, slots=True)
class ForeignSettings:
    """The content of a map file."""

    columns: ColumnMap
    autoencoder: AutoencoderSpec
    text: tuple[EncoderSpec, ...]
    bucket: BucketRule
    shapes: Mapping[str, Mapping[int, Shape]]
    """Bucket -> resolution -> [C, H, W], where the map file tells."""
    null_text: str
    """`zeros`, a file, `key:` and the key of a row, or `like` the other dataset's."""
    about: str

    def spec(self, buckets: tuple[str, ...]) -> DatasetSpec:
        """The dataset's spec; the map is checked against it."""
        spec = DatasetSpec(
            autoencoder=self.autoencoder,
            text=self.text,
            resolutions=tuple(sorted(self.columns.latents)),
            captions=len(self.columns.captions),
            buckets=buckets,
            fields=self.columns.field_specs(),
        )
        self.columns.check(spec)
        return spec


def parse_settings(raw: Any, *, like: DatasetSpec | None = None) -> ForeignSettings:
    """The settings in a map file's data.

    Args:
        like: of another dataset: its autoencoder and text encoders stand where the file says nothing.

    Raises:
        UsageError: names the field that is wrong, and what may stand there.
    """
    section = Section(raw, "map")
    section.place = "the map file"
    section.known("about", "autoencoder", "text", "bucket", "shapes", "null_text", "columns")
    columns = parse_columns(section.raw.get("columns"))
    found = ForeignSettings(
        columns=columns,
        autoencoder=_autoencoder(section.raw.get("autoencoder"), like),
        text=_text(section.raw.get("text"), columns, like),
        bucket=_bucket(section.raw.get("bucket")),
        shapes=_shapes(section.raw.get("shapes"), columns),
        null_text=_null(section.raw.get("null_text"), like),
        about=_about(section.raw.get("about", "")),
    )
    found.spec(("1:1",))
    return found


def _autoencoder(raw: Any, like: DatasetSpec | None) -> AutoencoderSpec:
    if raw is None:
        if like is not None:
            return like.autoencoder
        raise UsageError(
            "the map file says nothing of the autoencoder",
            hint="add `autoencoder: {kind, latent_channels, factor, scaling_factor}`, or --like DATASET",
        )
    section = Section(raw, "autoencoder")
    section.known("kind", "fingerprint", "latent_channels", "factor", "scaling_factor", "shift_factor")
    kind = raw.get("kind", "diffusers")
    if kind not in ("diffusers", "patch_pca"):
        raise UsageError(f"autoencoder.kind is diffusers or patch_pca, not {kind!r:.60}")
    return AutoencoderSpec(
        kind=kind,
        fingerprint=_string(raw.get("fingerprint", ""), "autoencoder.fingerprint"),
        latent_channels=raw.get("latent_channels", 0),
        factor=raw.get("factor", 0),
        scaling_factor=_real(raw.get("scaling_factor"), "autoencoder.scaling_factor"),
        shift_factor=_real(raw.get("shift_factor", 0.0), "autoencoder.shift_factor"),
    )


def _text(raw: Any, columns: ColumnMap, like: DatasetSpec | None) -> tuple[EncoderSpec, ...]:
    if raw is None and like is not None:
        return like.text
    if raw is None:
        raise UsageError(
            "the map file says nothing of the text encoders",
            hint="add `text: {NAME: {max_tokens, width, pooled_width}}`, or --like DATASET",
        )
    section = Section(raw, "text")
    encoders = []
    for name, item in section.raw.items():
        inner = Section(item, f"text.{name}")
        inner.known("max_tokens", "width", "pooled_width", "fingerprint")
        encoders.append(
            EncoderSpec(
                name=str(name),
                max_tokens=item.get("max_tokens", 0),
                width=item.get("width", 0),
                pooled_width=item.get("pooled_width"),
                fingerprint=_string(item.get("fingerprint", ""), f"text.{name}.fingerprint"),
            )
        )
    return tuple(encoders)


def _bucket(raw: Any) -> BucketRule:
    if isinstance(raw, str):
        return BucketRule(constant=raw)
    if raw is None:
        raise UsageError(
            "the map file does not say the bucket",
            hint='add `bucket: "1:1"`, or {column: NAME}, {height: NAME, width: NAME}, {files: {"PATTERN": BUCKET}}',
        )
    section = Section(raw, "bucket")
    section.known("column", "height", "width", "unit", "files")
    files = raw.get("files")
    if len({"column", "files"} & set(raw)) + ("height" in raw or "width" in raw) != 1:
        raise UsageError("bucket needs one of: a name, column, height and width, files")
    if files is not None:
        inner = Section(files, "bucket.files")
        return BucketRule(files={str(at): _string(to, f"bucket.files.{at}") for at, to in inner.raw.items()})
    if "column" in raw:
        return BucketRule(column=section.name("column", needed=True))
    unit: Literal["pixels", "latent"] = raw.get("unit", "pixels")
    if unit not in ("pixels", "latent"):
        raise UsageError(f"bucket.unit is pixels or latent, not {unit!r:.60}")
    sides = tuple(column_name(raw.get(side), f"bucket.{side}") for side in ("height", "width"))
    return BucketRule(sides=(sides[0], sides[1]), pixels=unit == "pixels")


def _shapes(raw: Any, columns: ColumnMap) -> dict[str, dict[int, Shape]]:
    if raw is None:
        return {}
    shapes: dict[str, dict[int, Shape]] = {}
    for bucket, item in Section(raw, "shapes").raw.items():
        place = f"shapes.{bucket}"
        by_resolution = item if isinstance(item, Mapping) else {max(columns.latents): item}
        for resolution, shape in by_resolution.items():
            if (
                not isinstance(shape, list)
                or len(shape) != 3
                or not all(isinstance(side, int) and 1 <= side <= 1 << 14 for side in shape)
            ):
                raise UsageError(f"{place} must be [CHANNELS, HEIGHT, WIDTH] in latent cells")
            try:
                at = int(resolution)
            except ValueError:
                raise UsageError(f"{place}.{resolution} is not a resolution in pixels") from None
            if at not in columns.latents:
                raise UsageError(f"{place}: columns.latents has no {at}")
            shapes.setdefault(str(bucket), {})[at] = (shape[0], shape[1], shape[2])
    return shapes


def _null(raw: Any, like: DatasetSpec | None) -> str:
    if raw is None:
        if like is not None:
            return "like"
        raise UsageError(
            "the map file does not say the embedding of the empty caption",
            hint="add `null_text: FILE.npz` (or .safetensors), `{key: KEY OF A ROW}`, or `zeros`",
        )
    if isinstance(raw, Mapping):
        section = Section(raw, "null_text")
        section.known("key")
        return f"key:{_string(str(raw.get('key', '')), 'null_text.key')}"
    return _string(raw, "null_text")


def _about(raw: Any) -> str:
    return "" if raw is None else _string(raw, "about")


def _string(raw: Any, place: str) -> str:
    if not isinstance(raw, str) or len(raw) > 4096:
        raise UsageError(f"{place} must be text, not {raw!r:.60}")
    return raw


def _real(raw: Any, place: str) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise UsageError(f"{place} must be a number, not {raw!r:.60}")
    if place.endswith("scaling_factor") and not raw:
        raise UsageError(f"{place} must not be zero")
    return float(raw)
