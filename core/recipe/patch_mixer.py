"""The recipe's `model.patch_mixer`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from isthmus.core.recipe.stages import Positive, Section

_MULTIPLE = 256


class PatchMixer(Section):
    """Transformer blocks that every image token passes before some are left out (MicroDiT's deferred masking). Defaults: its XL model."""

    layers: Positive = 6
    """Blocks."""
    width: Positive = 768
    """Of a token within."""
    head_width: Positive = 64
    """Of an attention head; divides `width`."""
    mlp_ratio: Annotated[float, Field(gt=0, le=64)] = 4.0
    """Width of a block's gated feed-forward layer: two thirds of this times `width`, rounded up to a multiple of 256."""

    @property
    def hidden(self) -> int:
        """Width of a block's gated feed-forward layer."""
        return _MULTIPLE * -(-int(2 * int(self.width * self.mlp_ratio) / 3) // _MULTIPLE)
