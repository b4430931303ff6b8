"""How each family's diffusers class is called: what it is told, in which form, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.profiles import PACKED
from isthmus.core.models.tokens import Mix, dropped, scatter


def plain(model: nn.Module) -> nn.Module:
    """The model without DDP around it. FSDP2 and per-block compiling wrap nothing around the whole."""
    inner = getattr(model, "module", model)
    assert isinstance(inner, nn.Module)
    return inner


def _unet(model: nn.Module, noisy: Tensor, timestep: Tensor, given: Condition, keep: Tensor | None) -> Tensor:
    assert keep is None, "a unet has no tokens to drop"
    sizes = None if given.size_crop is None else {"text_embeds": given.pooled, "time_ids": given.size_crop}
    output: Tensor = model(noisy, timestep, given.tokens, added_cond_kwargs=sizes, return_dict=False)[0]
    return output


def _mixing(model: nn.Module, timestep: Tensor, given: Condition, grid: tuple[int, int]) -> Mix | None:
    """What image tokens pass before the blocks, where the model has a patch mixer."""
    mixer: Any = getattr(plain(model), "patch_mixer", None)
    if mixer is None:
        return None
    return lambda tokens, keep: mixer(tokens, timestep, given, keep, grid)


def _dit(model: nn.Module, noisy: Tensor, timestep: Tensor, given: Condition, keep: Tensor | None) -> Tensor:
    added: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if given.size_crop is not None:
        target = given.size_crop[:, 4:]
        added = {"resolution": target, "aspect_ratio": (target[:, :1] / target[:, 1:])}
    with dropped(plain(model), keep, _mixing(model, timestep, given, (0, 0))):
        output: Tensor = model(
            noisy,
            encoder_hidden_states=given.tokens,
            timestep=timestep,
            added_cond_kwargs=added,
            encoder_attention_mask=given.mask,
            return_dict=False,
        )[0]
    return output


def _mmdit(
    model: nn.Module, noisy: Tensor, timestep: Tensor, given: Condition, keep: Tensor | None
) -> Tensor:
    with dropped(plain(model), keep, _mixing(model, timestep, given, (0, 0))):
        output: Tensor = model(
            hidden_states=noisy,
            encoder_hidden_states=given.tokens,
            pooled_projections=given.pooled,
            timestep=timestep,
            return_dict=False,
        )[0]
    return output


def _sana(model: nn.Module, noisy: Tensor, timestep: Tensor, given: Condition, keep: Tensor | None) -> Tensor:
    assert keep is None, "Sana's blocks convolve over the whole grid"
    config: Any = plain(model).config
    output: Tensor = model(
        noisy,
        encoder_hidden_states=given.tokens,
        # As SanaPipeline does.
        timestep=timestep * config.timestep_scale,
        encoder_attention_mask=given.mask,
        return_dict=False,
    )[0]
    return output


def _flux(model: nn.Module, noisy: Tensor, timestep: Tensor, given: Condition, keep: Tensor | None) -> Tensor:
    inner: Any = plain(model)
    rows, columns = noisy.shape[-2] // PACKED, noisy.shape[-1] // PACKED
    tokens, places = pack(noisy), image_ids(rows, columns, noisy.device)
    mix = _mixing(model, timestep, given, (rows, columns))
    if keep is not None:
        # Its rotary positions are one table for the batch, so that all samples drop the same tokens.
        places = places[keep[0]]
        if mix is None:
            tokens = tokens[:, keep[0]]
    guidance = None
    if inner.config.guidance_embeds:
        guidance = torch.full_like(timestep, float(getattr(inner, "told_guidance", 1.0)))
    with _exact_time(inner, timestep, guidance), _mixed(inner.x_embedder, keep, mix):
        output: Tensor = model(
            hidden_states=tokens,
            encoder_hidden_states=given.tokens,
            pooled_projections=given.pooled,
            timestep=timestep / 1000,
            guidance=guidance,
            txt_ids=torch.zeros(given.tokens.shape[1], 3, device=noisy.device),
            img_ids=places,
            return_dict=False,
        )[0]
    if keep is not None:
        output = scatter(output, keep, rows * columns)
    return unpack(output, rows, columns)


CALLS: dict[str, Callable[[nn.Module, Tensor, Tensor, Condition, Tensor | None], Tensor]] = {
    "unet": _unet,
    "dit": _dit,
    "mmdit": _mmdit,
    "sana": _sana,
    "flux": _flux,
}
"""Family -> (model, noisy, timestep, condition, kept tokens) -> what the class gives, [b, C or 2 C, H, W]."""


def pack(latents: Tensor) -> Tensor:
    """[b, C, H, W] -> [b, H/2 x W/2, 4 C]: 2 x 2 cells to a token, as `FluxPipeline._pack_latents` does."""
    b, channels, height, width = latents.shape
    cells = latents.reshape(b, channels, height // PACKED, PACKED, width // PACKED, PACKED)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, channels * PACKED**2)


def unpack(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of :func:`pack`, of a grid of `rows` x `columns` tokens."""
    cells = tokens.reshape(tokens.shape[0], rows, columns, -1, PACKED, PACKED)
    return cells.permute(0, 3, 1, 4, 2, 5).reshape(tokens.shape[0], -1, rows * PACKED, columns * PACKED)


def image_ids(rows: int, columns: int, device: torch.device) -> Tensor:
    """float32 [rows x columns, 3]: 0, row and column of each token, as `FluxPipeline._prepare_latent_image_ids`."""
    ids = torch.zeros(rows, columns, 3, device=device)
    ids[..., 1] += torch.arange(rows, device=device)[:, None]
    ids[..., 2] += torch.arange(columns, device=device)[None, :]
    return ids.reshape(-1, 3)


@contextmanager
def _mixed(embed: nn.Module, keep: Tensor | None, mix: Mix | None) -> Iterator[None]:
    """While within, what Flux embeds passes the mixer, and only what is kept goes on."""
    if mix is None:
        yield
        return
    handle = embed.register_forward_hook(lambda _, args, tokens: mix(tokens, keep))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _exact_time(model: Any, timestep: Tensor, guidance: Tensor | None) -> Iterator[None]:
    """Gives Flux's time embedding the time as it is.

    The class lowers the time to the dtype of its tokens first: in bfloat16 only 8 bits of it would be left, a step of 4
    at 999. The embedding itself computes in float32, whatever it is given.
    """
    exact = (timestep,) if guidance is None else (timestep, guidance * 1000)

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*exact, args[-1])

    handle = model.time_text_embed.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()
