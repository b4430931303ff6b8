"""What a denoiser is told besides the noisy latent: text, pooled text, and SDXL's size and crop.

A shard stores one column per text encoder; a family wants them joined in its own way (a team's own family chooses one
of these ways, and looks at widths itself):

===== =========================================================================================
unet  tokens of all encoders concatenated along channels (SDXL: CLIP-L and bigG, 768 + 1280);
      the last encoder's pooled vector and the six time ids when the model embeds them
dit   the one encoder's tokens with a mask of the valid ones (PixArt)
mmdit CLIP tokens concatenated along channels and zero-padded to the width of T5, T5's tokens appended
      along the sequence, the CLIP encoders' pooled vectors concatenated (Esser et al. 2024, figure 2)
sana  the one encoder's tokens with a mask of the valid ones, as dit
flux  the tokens of the one encoder that is no CLIP (T5), without a mask; the CLIP's pooled vector
===== =========================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from isthmus.core.models.denoisers import own_conditioning
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Encoders
from isthmus.errors import UsageError

_OWN_WIDTHS: dict[str, None] = dict.fromkeys(
    ("caption_channels", "cross_attention_dim", "joint_attention_dim", "pooled_projection_dim")
)
"""What a team's own family is held to: nothing."""


class TextArrays(Protocol):
    """What is read of a `TextColumn` of the storage layer."""

    @property
    def tokens(self) -> np.ndarray[Any, Any]:
        """Token embeddings float16 [b, T, D], zeros past `length`."""

    @property
    def length(self) -> np.ndarray[Any, Any]:
        """Valid tokens int32 [b]."""

    @property
    def pooled(self) -> np.ndarray[Any, Any] | None:
        """Pooled vector float16 [b, P], where the encoder's is used."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Conditioning of b samples, joined for one family."""

    tokens: Tensor
    """[b, T, D]"""
    mask: Tensor | None = None
    """bool [b, T], true where a token is valid; None: the family attends to all."""
    pooled: Tensor | None = None
    """[b, P]"""
    size_crop: Tensor | None = None
    """float32 [b, 6] in pixels: original height and width, crop top and left, target height and width."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Condition:
        """On `device`, text in `dtype`; sizes stay float32, which bfloat16 could not hold exactly."""
        return Condition(
            tokens=self.tokens.to(device, non_blocking=True).to(dtype),
            mask=None if self.mask is None else self.mask.to(device, non_blocking=True),
            pooled=None if self.pooled is None else self.pooled.to(device, non_blocking=True).to(dtype),
            size_crop=None if self.size_crop is None else self.size_crop.to(device, non_blocking=True),
        )

    def rows(self, start: int, stop: int) -> Condition:
        """Samples `start` to `stop`, as views."""
        part = slice(start, stop)
        return Condition(
            tokens=self.tokens[part],
            mask=None if self.mask is None else self.mask[part],
            pooled=None if self.pooled is None else self.pooled[part],
            size_crop=None if self.size_crop is None else self.size_crop[part],
        )

    def with_null(self, drop: Tensor, null: Condition) -> Condition:
        """The same with the text of `null` (one row) where `drop` (bool [b]) is true; sizes are kept."""

        def choose(own: Tensor | None, other: Tensor | None) -> Tensor | None:
            if own is None or other is None:
                return own
            return torch.where(drop.view(-1, *[1] * (own.dim() - 1)), other, own)

        tokens = choose(self.tokens, null.tokens)
        assert tokens is not None
        return Condition(
            tokens=tokens,
            mask=choose(self.mask, null.mask),
            pooled=choose(self.pooled, null.pooled),
            size_crop=self.size_crop,
        )

    @staticmethod
    def cat(parts: Sequence[Condition]) -> Condition:
        """The samples of all parts, in order."""

        def join(name: str) -> Tensor | None:
            columns = [getattr(part, name) for part in parts]
            return None if columns[0] is None else torch.cat(columns)

        tokens = join("tokens")
        assert tokens is not None
        return Condition(tokens=tokens, mask=join("mask"), pooled=join("pooled"), size_crop=join("size_crop"))

    def expand(self, count: int) -> Condition:
        """One row, `count` times, as views."""

        def repeat(own: Tensor | None) -> Tensor | None:
            return None if own is None else own.expand(count, *own.shape[1:])

        tokens = repeat(self.tokens)
        assert tokens is not None
        return Condition(
            tokens=tokens,
            mask=repeat(self.mask),
            pooled=repeat(self.pooled),
            size_crop=repeat(self.size_crop),
        )


def build_condition(
    family: str,
    model_config: Mapping[str, Any],
    text: Mapping[str, TextArrays],
    encoders: Encoders,
    original_size: np.ndarray[Any, Any] | None = None,
    crop: np.ndarray[Any, Any] | None = None,
    target_size: tuple[int, int] | None = None,
) -> Condition:
    """Join the encoders' columns for `family`, on the CPU, text still in float16.

    Args:
        family: the recipe's `model.family`.
        model_config: configuration of the diffusers class, as it was built.
        text: a column of b rows for every encoder of `encoders`.
        original_size: [b, 2] height and width of the picture; absent: the target's.
        crop: [b, 4] top, left, height, width of what was kept of it; absent: no crop.
        target_size: height and width in pixels of what is denoised; needed by models that embed sizes.

    Raises:
        UsageError: a column is missing, or the widths do not fit the model.
    """
    missing = [encoder.name for encoder in encoders.text if encoder.name not in text]
    if missing:
        raise UsageError(f"the dataset has no text of encoder {missing[0]!r}")
    columns = [text[encoder.name] for encoder in encoders.text]
    tokens = [_tensor(column.tokens) for column in columns]
    rows = tokens[0].shape[0]
    mask: Tensor | None = None
    pooled: Tensor | None = None
    sizes = None
    if family not in CLASSES:
        family, model_config = own_conditioning(family), _OWN_WIDTHS
    if family in ("dit", "sana"):
        if len(columns) != 1:
            raise UsageError(f"a {family} takes one text encoder, the recipe names {len(columns)}")
        joined = tokens[0]
        mask = torch.arange(joined.shape[1])[None, :] < _tensor(columns[0].length)[:, None]
        _same_width(joined.shape[2], model_config.get("caption_channels"), "caption_channels")
        if model_config.get("use_additional_conditions"):
            sizes = _sizes(rows, original_size, crop, target_size)
    elif family == "unet":
        if len({part.shape[1] for part in tokens}) != 1:
            raise UsageError("a unet's text encoders must have the same max_tokens, to be joined by channel")
        joined = torch.cat(tokens, dim=2) if len(tokens) > 1 else tokens[0]
        width = model_config.get("cross_attention_dim", 1280)
        width = width[0] if isinstance(width, (list, tuple)) else width
        _same_width(joined.shape[2], width, "cross_attention_dim")
        if model_config.get("addition_embed_type") == "text_time":
            with_pooled = [column.pooled for column in columns if column.pooled is not None]
            if not with_pooled:
                raise UsageError("this unet needs a pooled text vector, and no encoder has a pooled_width")
            pooled = _tensor(with_pooled[-1])
            sizes = _sizes(rows, original_size, crop, target_size)
    elif family == "flux":
        joined, pooled = _flux(model_config, encoders, columns, tokens)
    else:
        joined, pooled = _joint(model_config, encoders, columns, tokens)
    return Condition(tokens=joined, mask=mask, pooled=pooled, size_crop=sizes)


def _joint(
    config: Mapping[str, Any], encoders: Encoders, columns: list[TextArrays], tokens: list[Tensor]
) -> tuple[Tensor, Tensor]:
    clip = [part for part, encoder in zip(tokens, encoders.text, strict=True) if encoder.kind == "clip"]
    sequence = [part for part, encoder in zip(tokens, encoders.text, strict=True) if encoder.kind != "clip"]
    width = config.get("joint_attention_dim", 4096)
    if width is None:  # a team's own family: as wide as the widest
        width = max(sum(part.shape[2] for part in clip), *(part.shape[2] for part in sequence), 0)
    parts: list[Tensor] = []
    if clip:
        if len({part.shape[1] for part in clip}) != 1:
            raise UsageError(
                "an mmdit's clip encoders must have the same max_tokens, to be joined by channel"
            )
        joined = torch.cat(clip, dim=2) if len(clip) > 1 else clip[0]
        if joined.shape[2] > width:
            raise UsageError(f"clip tokens are {joined.shape[2]} wide, joint_attention_dim is {width}")
        parts.append(torch.nn.functional.pad(joined, (0, width - joined.shape[2])))
    for part in sequence:
        _same_width(part.shape[2], width, "joint_attention_dim")
        parts.append(part)
    with_pooled = [_tensor(column.pooled) for column in columns if column.pooled is not None]
    if not with_pooled:
        raise UsageError("an mmdit needs a pooled text vector, and no encoder has a pooled_width")
    pooled = torch.cat(with_pooled, dim=1)
    _same_width(pooled.shape[1], config.get("pooled_projection_dim", 2048), "pooled_projection_dim")
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], pooled


def _flux(
    config: Mapping[str, Any], encoders: Encoders, columns: list[TextArrays], tokens: list[Tensor]
) -> tuple[Tensor, Tensor]:
    sequence = [part for part, encoder in zip(tokens, encoders.text, strict=True) if encoder.kind != "clip"]
    pooled = [_tensor(column.pooled) for column in columns if column.pooled is not None]
    if len(sequence) != 1 or len(pooled) != 1:
        raise UsageError(
            f"a flux takes the tokens of one encoder and the pooled vector of one clip, "
            f"the recipe gives {len(sequence)} and {len(pooled)}"
        )
    _same_width(sequence[0].shape[2], config.get("joint_attention_dim", 4096), "joint_attention_dim")
    _same_width(pooled[0].shape[1], config.get("pooled_projection_dim", 768), "pooled_projection_dim")
    return sequence[0], pooled[0]


def _same_width(width: int, expected: int | None, name: str) -> None:
    if expected is not None and width != expected:
        raise UsageError(f"text embeddings are {width} wide, the model's {name} is {expected}")


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.flags.writeable:
        # torch warns that such memory must not be written to; nothing here writes to it in place.
        array = array.copy()
    return torch.from_numpy(array)


def _sizes(
    rows: int,
    original_size: np.ndarray[Any, Any] | None,
    crop: np.ndarray[Any, Any] | None,
    target_size: tuple[int, int] | None,
) -> Tensor:
    """SDXL's time ids (Podell et al. 2023, section 2.2): the crop is told in pixels of the resized picture."""
    if target_size is None:
        raise UsageError("this model embeds sizes and needs a target size")
    sizes = np.zeros((rows, 6), np.float32)
    sizes[:, 4:] = target_size
    sizes[:, :2] = target_size if original_size is None else original_size
    if crop is not None:
        kept = np.maximum(crop[:, 2:], 1).astype(np.float64)
        sizes[:, 2:4] = np.rint(crop[:, :2] * (np.asarray(target_size, np.float64) / kept))
    return torch.from_numpy(sizes)
