"""MicroDiT's patch mixer: a small transformer over all image tokens, before most of them are left out.

Sehwag et al. 2024 ("Stretching Each Dollar: Diffusion Training from Scratch on a Micro-Budget"), section 3.1, deferred
masking: tokens that are kept have seen those that are not, so that three quarters can go. Blocks, norms, maps and initial
weights are those of the authors' code (SonyResearch/micro_diffusion, `models/dit.py` and `utils.py`) without its experts:
adaptive norms by time, self-attention, attention to the text, a gated feed-forward layer; tokens come in and leave by
a map of their width, with no way around the mixer. It is part of the model: sampling passes it, too.

Where the authors share the backbone's embeddings of time and text, the mixer has its own, of the model's inputs: diffusers'
classes make theirs only after the tokens. A pooled vector is added to the time, as these classes do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.mixer_figures import FREQUENCIES, text_widths
from isthmus.core.recipe.patch_mixer import PatchMixer as Settings

_EPS = 1e-6
_STD = 0.02


class PatchMixerBlock(nn.Module):
    """A block: tokens [b, n, w], text [b, l, w], time [b, w], added to the logits of the text [b, 1, 1, l] -> [b, n, w]."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.heads = width // settings.head_width
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width, eps=_EPS, bias=False) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.text_q = nn.Linear(width, width, bias=False)
        self.text_kv = nn.Linear(width, 2 * width, bias=False)
        self.text_out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, settings.hidden, bias=False)
        self.up = nn.Linear(width, settings.hidden, bias=False)
        self.down = nn.Linear(settings.hidden, width, bias=False)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, tokens: Tensor, text: Tensor, time: Tensor, bias: Tensor | None) -> Tensor:
        """See the class."""
        moved = self.modulation(F.gelu(time, approximate="tanh"))[:, None].chunk(6, dim=2)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = moved
        normed = self.norm1(tokens) * (1 + scale_a) + shift_a
        query, key, value = self.qkv(normed).chunk(3, dim=2)
        tokens = tokens + gate_a * self.out(self._attention(query, key, value, None))
        query = self.text_q(self.norm2(tokens))
        key, value = self.text_kv(text).chunk(2, dim=2)
        tokens = tokens + self.text_out(self._attention(query, key, value, bias))
        normed = self.norm3(tokens) * (1 + scale_m) + shift_m
        mixed: Tensor = tokens + gate_m * self.down(F.silu(self.gate(normed)) * self.up(normed))
        return mixed

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        # Normed over all heads together, as the authors do. Autocast makes a norm float32.
        query = F.layer_norm(query, query.shape[-1:], eps=_EPS).to(value.dtype)
        key = F.layer_norm(key, key.shape[-1:], eps=_EPS).to(value.dtype)
        query, key, value = (
            part.view(*part.shape[:2], self.heads, -1).transpose(1, 2) for part in (query, key, value)
        )
        bias = None if bias is None else bias.to(value.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return out.transpose(1, 2).flatten(2)


class PatchMixer(nn.Module):
    """The mixer in front of a transformer's blocks.

    Args:
        settings: of the recipe.
        tokens: width of the model's tokens.
        text: width of the text's tokens.
        pooled: width of the pooled vector; 0 without.
        places: whether tokens get their places here, because the model has not told them yet.
        depth: of the model, which the scale of the first weights follows.
    """

    def __init__(
        self, settings: Settings, *, tokens: int, text: int, pooled: int, places: bool, depth: int
    ) -> None:
        super().__init__()
        width = settings.width
        self.settings = settings
        self.places = places
        self.time = nn.Sequential(
            nn.Linear(FREQUENCIES, width), nn.GELU(approximate="tanh"), nn.Linear(width, width)
        )
        self.pooled = nn.Linear(pooled, width) if pooled else None
        self.text = _map(text, width)
        mapped = tokens != width
        self.enter = _map(tokens, width) if mapped else nn.Identity()
        self.blocks = nn.ModuleList(PatchMixerBlock(settings) for _ in range(settings.layers))
        self.leave = _map(width, tokens) if mapped else nn.Identity()
        # Read and set by diffusers' enable_gradient_checkpointing.
        self.gradient_checkpointing = False
        self._first_weights(depth)

    def forward(
        self,
        tokens: Tensor,
        timestep: Tensor,
        given: Condition,
        keep: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """Tokens [b, n, D] that have seen each other: [b, k, D].

        Args:
            tokens: all image tokens, in rows.
            timestep: float32 [b], 0 to 1000.
            given: text and pooled vector.
            keep: int64 [b, k], which of them leave; None: all.
            grid: their rows and columns, where the model has not placed them.
        """
        time = self.time(_sinusoids(timestep, FREQUENCIES).to(tokens.dtype))
        if self.pooled is not None:
            assert given.pooled is not None
            time = time + self.pooled(given.pooled)
        text = self.text(given.tokens)
        bias = None if given.mask is None else (~given.mask[:, None, None, :].bool()).to(text.dtype) * -10_000
        mixed = self.enter(tokens)
        if self.places:
            assert grid is not None
            mixed = mixed + _places(*grid, mixed.shape[2], mixed.device).to(mixed.dtype)
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                mixed = self._gradient_checkpointing_func(block, mixed, text, time, bias)  # type: ignore[operator]
            else:
                mixed = block(mixed, text, time, bias)
        if keep is not None:
            mixed = mixed.gather(1, keep[:, :, None].expand(-1, -1, mixed.shape[2]))
        left: Tensor = self.leave(mixed)
        return left

    def _first_weights(self, depth: int) -> None:
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                if part.bias is not None:
                    nn.init.zeros_(part.bias)
        for layer in (self.time[0], self.time[2]):
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=_STD)
        for block in self.blocks:
            assert isinstance(block, PatchMixerBlock)
            for layer in (block.qkv, block.text_q, block.text_kv, block.gate):
                nn.init.trunc_normal_(layer.weight, std=_STD)
            for layer in (block.out, block.text_out, block.up, block.down):
                nn.init.trunc_normal_(layer.weight, std=_STD / (2 * depth) ** 0.5)
            nn.init.zeros_(block.modulation.weight)


def add_patch_mixer(model: nn.Module, family: str, settings: Settings) -> None:
    """Give a transformer of :data:`isthmus.core.models.presets.MASKABLE` its mixer, as `model.patch_mixer`."""
    config: Mapping[str, Any] = model.config  # type: ignore[assignment]
    text, pooled = text_widths(family, config)
    model.patch_mixer = PatchMixer(
        settings,
        tokens=int(config["num_attention_heads"]) * int(config["attention_head_dim"]),
        text=text,
        pooled=pooled,
        places=family == "flux",
        depth=int(config["num_layers"]) + int(config.get("num_single_layers") or 0),
    )


def _map(width: int, to: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width, eps=_EPS, bias=False), nn.Linear(width, to, bias=False))


def _sinusoids(values: Tensor, count: int) -> Tensor:
    """Cosines and sines of `values` [n] at `count` / 2 frequencies each, 1 down to 1 / 10,000: float32 [n, count]."""
    half = count // 2
    steps = torch.arange(half, dtype=torch.float32, device=values.device)
    angles = values[:, None].float() * torch.exp(-math.log(10_000) / half * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _places(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Of each token of a grid, half for its column and half for its row: float32 [rows x columns, width]."""
    across = _sinusoids(torch.arange(columns, device=device), width // 2).expand(rows, -1, -1)
    down = _sinusoids(torch.arange(rows, device=device), width // 2)[:, None].expand(-1, columns, -1)
    return torch.cat([across, down], dim=2).flatten(0, 1)
