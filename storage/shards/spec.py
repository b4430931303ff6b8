"""What a latent dataset holds: the encoders it was made with, its samples, and text columns as arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError

Float16 = NDArray[np.float16]
Int32 = NDArray[np.int32]
EncodedText = Mapping[str, tuple[Float16, int, Float16 | None]]
"""Encoder name -> (tokens [T, D], number of valid tokens, pooled vector [P] or None)."""

SCHEMA_VERSION = 1
"""Of the files described in this package; raised when an older reader would misread them."""

_ENCODER_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._x-]{0,31}")
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_TAKEN = re.compile(
    r"key|caption[0-9]*|source|bucket|size_class|width|height|original_(height|width)|crop_(top|left|height|width)"
    r"|flipped|latent_.*|and|or|not|in|is|null|like|between|true|false",
    re.IGNORECASE,
)
MAX_FIELDS = 64
_MAX_ROW_BYTES = 1 << 28  # of one column; what a hostile manifest may make a reader allocate for a row


@dataclass(slots=True)
class TextColumn:
    """Embeddings of one text encoder for b captions."""

    tokens: Float16
    """[b, T, D], zeros beyond what the encoder returned."""
    length: Int32
    """[b], valid tokens."""
    pooled: Float16 | None = None
    """[b, P], when the encoder has a pooled vector."""

    def __len__(self) -> int:
        return len(self.length)


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """One text encoder as the shards know it."""

    name: str
    """Prefix of its columns, such as `clip_l`."""
    max_tokens: int
    """Tokens stored for each caption."""
    width: int
    """Width of a token's embedding."""
    pooled_width: int | None = None
    """Width of the pooled vector; None when there is none."""
    fingerprint: str = ""
    """Hash of weights and settings, from the encoder itself."""

    def __post_init__(self) -> None:
        if not _ENCODER_NAME.fullmatch(self.name):
            raise UsageError(
                f"text encoder name {self.name!r} is not lower-case letters, digits and underscores"
            )
        _in_range(f"max_tokens of {self.name}", self.max_tokens, 1, 1 << 16)
        _in_range(f"width of {self.name}", self.width, 1, 1 << 20)
        _in_range(f"token bytes of {self.name}", self.max_tokens * self.width * 2, 1, _MAX_ROW_BYTES)
        if self.pooled_width is not None:
            _in_range(f"pooled_width of {self.name}", self.pooled_width, 1, 1 << 20)


@dataclass(frozen=True, slots=True)
class AutoencoderSpec:
    """The autoencoder whose unscaled mean and log-variance the shards hold."""

    kind: str
    """`diffusers` or `patch_pca`."""
    fingerprint: str
    """Hash of weights and settings, from the autoencoder itself."""
    latent_channels: int
    """Channels of a latent."""
    factor: int
    """Pixels per latent cell along one side."""
    scaling_factor: float
    """Training scale: (latent - shift_factor) * scaling_factor."""
    shift_factor: float = 0.0

    def __post_init__(self) -> None:
        _in_range("latent_channels", self.latent_channels, 1, 1 << 12)
        _in_range("factor", self.factor, 1, 1 << 10)
        if not np.isfinite([self.scaling_factor, self.shift_factor]).all():
            raise UsageError("scaling_factor and shift_factor must be finite")


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One thing more that is told of each sample, such as a score or a licence; what is not told is null."""

    name: str
    """Of its column, and in predicates."""
    kind: Literal["number", "text"]
    """float64, or text that is not empty."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _FIELD_NAME.fullmatch(self.name):
            raise UsageError(f"field {self.name!r} is not letters, digits and underscores, at most 64")
        if _TAKEN.fullmatch(self.name):
            raise UsageError(f"field {self.name} has a name that shards and predicates use otherwise")
        if self.kind not in ("number", "text"):
            raise UsageError(f"field {self.name} is of kind {self.kind!r}, not number or text")


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """The settings of a dataset: everything but its samples."""

    autoencoder: AutoencoderSpec
    text: tuple[EncoderSpec, ...]
    """Text encoders, in the order of their columns."""
    resolutions: tuple[int, ...]
    """Pixels, ascending; each adds sibling files to a shard."""
    captions: int = 1
    """Captions stored for each image, each in its own sibling file."""
    buckets: tuple[str, ...] = ("1:1",)
    """Names of the aspect classes that samples may have."""
    fields: tuple[FieldSpec, ...] = ()
    """What is told of each sample beyond this, in a sibling file that training does not read."""

    def __post_init__(self) -> None:
        names = [encoder.name for encoder in self.text]
        if not names or len(set(names)) != len(names):
            raise UsageError(f"text encoders must be at least one, with different names, not {names}")
        if not self.resolutions or list(self.resolutions) != sorted(set(self.resolutions)):
            raise UsageError(f"resolutions must ascend, not {list(self.resolutions)}")
        for resolution in self.resolutions:
            _in_range("a resolution", resolution, 1, 1 << 16)
        _in_range("captions", self.captions, 1, 64)
        if not self.buckets or len(set(self.buckets)) != len(self.buckets):
            raise UsageError(f"buckets must be at least one, with different names, not {list(self.buckets)}")
        for bucket in self.buckets:
            if not _BUCKET_NAME.fullmatch(bucket):
                raise UsageError(f"bucket name {bucket!r} is not like `1:1` or `4:3`")
        self._check_fields()

    def _check_fields(self) -> None:
        if len(self.fields) > MAX_FIELDS:
            raise UsageError(f"{len(self.fields)} fields: at most {MAX_FIELDS}")
        seen = set()
        for told in self.fields:
            # Other readers do not tell capitals from small letters.
            if told.name.casefold() in seen:
                raise UsageError(f"two fields have the name {told.name}, apart from capitals")
            seen.add(told.name.casefold())
            for encoder in self.text:
                if re.fullmatch(f"{encoder.name}_(tokens|length|pooled)[0-9]*", told.name, re.IGNORECASE):
                    raise UsageError(
                        f"field {told.name} has the name of a column of text encoder {encoder.name}"
                    )

    def resolutions_of(self, size_class: int) -> tuple[int, ...]:
        """The resolutions stored for an image of this size class: those it reaches without upscaling."""
        return tuple(resolution for resolution in self.resolutions if resolution <= size_class)


@dataclass(slots=True)
class Sample:
    """One image, encoded. The writer takes these; the loader returns columns instead."""

    key: str
    """Unique name within the dataset."""
    captions: list[str]
    """One to `spec.captions`; fewer are repeated in turn, so that each is as likely to be drawn."""
    text: list[EncodedText]
    """For each caption: encoder name -> (tokens [T, D] with T <= max_tokens, length, pooled [P] or None)."""
    latents: Mapping[int, tuple[Float16, Float16]]
    """Resolution -> unscaled (mean [C, H, W], log-variance [C, H, W]), for all up to the size class."""
    bucket: str = "1:1"
    """Aspect class."""
    size_class: int = 0
    """The largest of the dataset's resolutions that the image reaches; 0 stands for the largest in `latents`."""
    source: str = ""
    """Where the image came from: a path or URL."""
    original_size: tuple[int, int] = (0, 0)
    """Height and width of the image file, pixels."""
    crop: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Top, left, height and width of the part that was encoded, in pixels of the original image."""
    flipped: bool = False
    """Mirrored left to right before encoding."""
    fields: Mapping[str, float | str | None] = field(default_factory=dict)
    """Of `spec.fields`: numbers, text; None, what is missing, and an empty text are not told."""


def _in_range(what: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{what} must be a whole number from {low} to {high}, not {value!r}")
