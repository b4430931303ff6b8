"""Image tokens of a transformer: leaving some out, and where the positions of all of them come from.

Leaving out (Sehwag et al. 2024, "MicroDiT", section 3.1): tokens are dropped after the patch embedding, which has told
each its position, and before the first block; what the blocks do costs less, and the loss is taken over the tokens
that were kept. With `model.patch_mixer` they are dropped behind it (deferred masking), without at once (naive masking).
PixArt, SD3 and Flux can do it. Sana cannot: a convolution in each of its blocks needs the whole grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def gather(tokens: Tensor, keep: Tensor) -> Tensor:
    """Tokens [b, n, D] at the places `keep` [b, k]: [b, k, D]."""
    return tokens.gather(1, keep[:, :, None].expand(-1, -1, tokens.shape[2]))


def scatter(kept: Tensor, keep: Tensor, count: int) -> Tensor:
    """The inverse of :func:`gather`: [b, count, D], zero where nothing was kept."""
    whole = kept.new_zeros(kept.shape[0], count, kept.shape[2])
    return whole.scatter(1, keep[:, :, None].expand(-1, -1, kept.shape[2]), kept)


Mix = Callable[[Tensor, Tensor | None], Tensor]
"""All tokens [b, n, D], and which of them to keep (int64 [b, k] or None) -> those, having seen the others."""


@contextmanager
def dropped(model: nn.Module, keep: Tensor | None, mix: Mix | None = None) -> Iterator[None]:
    """While within, blocks see only the tokens at `keep` (int64 [b, k]); the output has zeros for the others.

    Args:
        model: of PixArt or SD3.
        keep: None: all.
        mix: what all tokens pass before.
    """
    if keep is None and mix is None:
        yield
        return
    embed, head = model.get_submodule("pos_embed"), model.get_submodule("proj_out")
    count = 0

    def leave_out(_: nn.Module, args: Any, tokens: Tensor) -> Tensor:
        nonlocal count
        count = tokens.shape[1]
        if mix is not None:
            return mix(tokens, keep)
        return tokens if keep is None else gather(tokens, keep)

    def fill_in(_: nn.Module, args: Any, tokens: Tensor) -> Tensor:
        return tokens if keep is None else scatter(tokens, keep, count)

    handles = [embed.register_forward_hook(leave_out), head.register_forward_hook(fill_in)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kept_values(values: Tensor, keep: Tensor, patch: int) -> Tensor:
    """Of [b, C, H, W] what lies under the tokens `keep` [b, k], `patch` cells a side: [b, k, C x patch^2]."""
    b, channels, height, width = values.shape
    cells = values.reshape(b, channels, height // patch, patch, width // patch, patch)
    return gather(cells.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, channels * patch**2), keep)


def position_table(model: nn.Module) -> Any:
    """The patch embedding whose sinusoidal table is computed from a scale, or None where there is none.

    SD3 crops a fixed table around its centre, Flux rotates by token number, a UNet and Sana as published have none.
    """
    for name in ("pos_embed", "patch_embed"):
        embed: Any = getattr(model, name, None)
        scalable = getattr(embed, "interpolation_scale", None) is not None
        if scalable and embed.pos_embed is not None and embed.pos_embed_max_size is None:
            return embed
    return None


def place_tokens(model: nn.Module, grid: int, scale: float | None) -> None:
    """Have a model place the tokens of a picture of `grid` tokens a side at 0, 1/scale, 2/scale, ...; None: as built.

    Does nothing for a model without a table that can be scaled, see :func:`position_table`.
    """
    embed = position_table(model)
    if embed is None:
        return
    fields = ("base_size", "interpolation_scale", "height", "width", "pos_embed")
    if scale is not None:
        if not hasattr(embed, "as_built"):
            embed.as_built = {field: getattr(embed, field) for field in fields}
        _scale(embed, grid, scale)
    elif hasattr(embed, "as_built"):
        for field, value in embed.as_built.items():
            setattr(embed, field, value)


def _scale(embed: Any, grid: int, scale: float) -> None:
    """Set a patch embedding's scale (Chen et al. 2024, PixArt-Sigma, section 3.3).

    So token i of a side of h tokens lies at i (grid / h) / scale; a picture of another aspect is stretched over the
    same square, as diffusers does. A grid of 16 at scale 0.5, 32 at 1 and 64 at 2 cover the same square.
    """
    from diffusers.models.embeddings import get_2d_sincos_pos_embed

    before = embed.pos_embed
    table = get_2d_sincos_pos_embed(
        before.shape[-1], grid, base_size=grid, interpolation_scale=scale, output_type="pt"
    )
    embed.base_size, embed.interpolation_scale = grid, scale
    embed.height = embed.width = grid
    embed.pos_embed = table.float().unsqueeze(0).to(device=before.device, dtype=torch.float32)
