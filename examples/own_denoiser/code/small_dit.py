"""A diffusion transformer in a hundred lines: caption tokens before image tokens, adaptive layer norm for the time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.core.models.conditioning import Condition


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines of geometric frequencies: float32 [..., width]."""
    steps = torch.arange(width // 2, device=positions.device) / (width // 2)
    angles = positions.float()[..., None] * torch.exp(-math.log(10_000) * steps)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward network, each scaled, shifted and gated by the time (Peebles and Xie 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, tokens: Tensor, time: Tensor, mask: Tensor) -> Tensor:
        """Tokens [b, n, width], time [b, width], mask [b, 1, 1, n] -> tokens [b, n, width]."""
        a, b, c, d, e, f = self.modulation(time)[:, None].chunk(6, dim=-1)
        parts = self.qkv(self.norm(tokens) * (1 + a) + b).chunk(3, dim=-1)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        tokens = tokens + c * self.out(seen.transpose(1, 2).flatten(2))
        return tokens + f * self.feed(self.norm(tokens) * (1 + d) + e)


class Model(nn.Module):
    """The module that is trained."""

    def __init__(
        self, in_channels: int, text_width: int, width: int, layers: int, heads: int, patch: int
    ) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.image = nn.Conv2d(in_channels, width, patch, patch)
        self.text = nn.Linear(text_width, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, in_channels * patch**2))

    def forward(self, noisy: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """Latents [b, C, H, W], timestep [b], caption tokens [b, T, D] and which are valid [b, T] -> [b, C, H, W]."""
        patches = self.image(noisy)
        rows, columns = patches.shape[-2:]
        places = torch.cartesian_prod(
            torch.arange(rows, device=noisy.device), torch.arange(columns, device=noisy.device)
        )
        places = torch.cat([sinusoids(place, self.width // 2) for place in places.unbind(1)], dim=-1)
        image = patches.flatten(2).transpose(1, 2) + places.to(patches.dtype)
        time = self.time(sinusoids(timestep, self.width).to(patches.dtype))
        tokens = torch.cat([self.text(text), image], dim=1)
        seen = torch.cat([mask, mask.new_ones(len(mask), rows * columns)], dim=1)[:, None, None]
        for block in self.blocks:
            tokens = block(tokens, time, seen)
        cells = (
            self.head(tokens[:, text.shape[1] :])
            .unflatten(1, (rows, columns))
            .unflatten(-1, (-1, self.patch, self.patch))
        )
        return cells.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)


class SmallDiT:
    """What isthmus asks of a denoiser: `isthmus.core.models.denoisers.Denoiser`."""

    conditioning = "dit"  # one text encoder's tokens, with a mask

    def build(self, config: dict[str, Any], seed: int) -> nn.Module:
        """The recipe's `model.config` are the module's arguments; torch is seeded already."""
        return Model(**{"width": 192, "layers": 3, "heads": 6, "patch": 2} | config)

    def blocks(self, model: nn.Module) -> list[type[nn.Module]]:
        """The units of sharding, compiling and recomputing."""
        return [Block]

    def predict(self, model: nn.Module, noisy: Tensor, timestep: Tensor, condition: Condition) -> Tensor:
        """Calls the model, which DDP may be around."""
        prediction: Tensor = model(noisy, timestep, condition.tokens, condition.mask)
        return prediction

    def resolved_config(self, model: nn.Module) -> dict[str, Any]:
        """What a checkpoint is compared by."""
        assert isinstance(model, Model)
        return {
            "in_channels": model.image.in_channels,
            "text_width": model.text.in_features,
            "width": model.width,
            "layers": len(model.blocks),
            "heads": model.blocks[0].heads,
            "patch": model.patch,
        }

    def train_flops(self, config: dict[str, Any], height: int, width: int, text_tokens: int) -> float:
        """Optional: of one image, for the model FLOPs utilisation; three times the forward pass's."""
        full = {"width": 192, "layers": 3, "patch": 2} | config
        tokens = text_tokens + height * width // full["patch"] ** 2
        matrices, attention = 2 * 12 * full["width"] ** 2, 4 * tokens * full["width"]
        return float(3 * full["layers"] * tokens * (matrices + attention))
