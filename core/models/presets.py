"""Named denoiser configurations: pure data, as the diffusers classes take them."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Model

CLASSES = {
    "unet": "UNet2DConditionModel",
    "dit": "PixArtTransformer2DModel",
    "mmdit": "SD3Transformer2DModel",
    "sana": "SanaTransformer2DModel",
    "flux": "FluxTransformer2DModel",
}
"""The diffusers class of each family that comes with isthmus; a team's own families have none."""


MASKABLE = frozenset({"dit", "mmdit", "flux"})
"""Families of which image tokens can be left out in training, see `core/models/tokens.py`."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named configuration.

    Args:
        family: a key of `CLASSES`.
        class_name: of diffusers.
        config: the arguments of that class.
    """

    family: str
    class_name: str
    config: MappingProxyType[str, Any]


def _preset(family: str, **config: Any) -> Preset:
    return Preset(family, CLASSES[family], MappingProxyType(config))


PRESETS: dict[str, Preset] = {
    # 2.57 B parameters: Podell et al. 2023, table 1.
    "sdxl": _preset(
        "unet",
        sample_size=128,
        in_channels=4,
        out_channels=4,
        block_out_channels=[320, 640, 1280],
        layers_per_block=2,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        transformer_layers_per_block=[1, 2, 10],
        attention_head_dim=[5, 10, 20],
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    ),
    # 0.87 B parameters: Stable Diffusion 2's base model.
    "sd2-base": _preset(
        "unet",
        sample_size=64,
        in_channels=4,
        out_channels=4,
        block_out_channels=[320, 640, 1280, 1280],
        layers_per_block=2,
        attention_head_dim=[5, 10, 20, 20],
        cross_attention_dim=1024,
        use_linear_projection=True,
    ),
    # 0.61 B parameters: Chen et al. 2024 (PixArt-Sigma) at 512 px. Four output channels, not eight: the variance
    # that the published weights also predict is of no use to the objectives here.
    "pixart-512": _preset(
        "dit",
        sample_size=64,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=28,
        num_attention_heads=16,
        attention_head_dim=72,
        cross_attention_dim=1152,
        caption_channels=4096,
        use_additional_conditions=False,
        interpolation_scale=1,
    ),
    # 2.03 B parameters: Esser et al. 2024, depth 24.
    "sd3-medium": _preset(
        "mmdit",
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=24,
        num_attention_heads=24,
        attention_head_dim=64,
        caption_projection_dim=1536,
        joint_attention_dim=4096,
        pooled_projection_dim=2048,
        pos_embed_max_size=192,
    ),
    # 0.59 B parameters: Xie et al. 2024 (Sana), table 1. Latents of a factor of 32, no positional embedding.
    "sana-600m": _preset(
        "sana",
        sample_size=32,
        patch_size=1,
        in_channels=32,
        out_channels=32,
        num_layers=28,
        num_attention_heads=36,
        attention_head_dim=32,
        num_cross_attention_heads=16,
        cross_attention_head_dim=72,
        cross_attention_dim=1152,
        caption_channels=2304,
        mlp_ratio=2.5,
    ),
    # 1.60 B parameters: the same, its larger model.
    "sana-1600m": _preset(
        "sana",
        sample_size=32,
        patch_size=1,
        in_channels=32,
        out_channels=32,
        num_layers=20,
        num_attention_heads=70,
        attention_head_dim=32,
        num_cross_attention_heads=20,
        cross_attention_head_dim=112,
        cross_attention_dim=2240,
        caption_channels=2304,
        mlp_ratio=2.5,
    ),
    # 11.9 B parameters: the shape of FLUX.1-dev, with its embedding of the guidance scale. A token is 2 x 2 cells
    # of 16 channels.
    "flux-dev": _preset(
        "flux",
        patch_size=1,
        in_channels=64,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=True,
        axes_dims_rope=[16, 56, 56],
    ),
    # 11.9 B parameters: the shape of FLUX.1-schnell, which MLPerf's benchmark trains from scratch: no guidance embedded,
    # captions of 256 tokens.
    "flux-12b": _preset(
        "flux",
        patch_size=1,
        in_channels=64,
        num_layers=19,
        num_single_layers=38,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        axes_dims_rope=[16, 56, 56],
    ),
    # 0.95 B parameters: half its width and a third of its depth, no embedded guidance; for a team that trains from scratch.
    "flux-small": _preset(
        "flux",
        patch_size=1,
        in_channels=64,
        num_layers=6,
        num_single_layers=12,
        attention_head_dim=128,
        num_attention_heads=12,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        axes_dims_rope=[16, 56, 56],
    ),
    # 1.9 M parameters: colours and shapes on two CPU cores. A token is 2 x 2 cells of 24 channels, 96 numbers: the
    # width must be well above that, or the noise that it predicts cannot pass.
    "quickstart": _preset(
        "dit",
        sample_size=8,
        patch_size=2,
        in_channels=24,
        out_channels=24,
        num_layers=3,
        num_attention_heads=6,
        attention_head_dim=32,
        cross_attention_dim=192,
        caption_channels=384,
        use_additional_conditions=False,
        interpolation_scale=1,
    ),
}


def config_comes_with_weights(model: Model) -> bool:
    """Whether the configuration is that of the checkpoint in `init_from`, so known once that has been read."""
    named = model.preset is not None or bool(model.config)
    return model.init_from is not None and not named and model.family in CLASSES


def model_config(model: Model) -> tuple[str, dict[str, Any]]:
    """The diffusers class and its arguments: the preset's, with the recipe's ``config`` over them.

    The class of a team's own family is the family's name.

    Raises:
        KeyError: no such preset; a loaded recipe has been checked for that.
    """
    config = dict(PRESETS[model.preset].config) if model.preset is not None else {}
    return CLASSES.get(model.family, model.family), {**config, **model.config}
