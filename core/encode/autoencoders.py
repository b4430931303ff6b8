"""Autoencoders behind one interface: diffusers' autoencoders of pictures, and the quickstart's linear one.

Latents are stored unscaled, as mean and log variance. In training a latent is
`((mean + exp(logvar / 2) * noise) - shift_factor) * scaling_factor`; what a sampler draws goes back through
`latent / scaling_factor + shift_factor` before :meth:`Autoencoder.decode`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from isthmus.core.encode.fingerprints import fingerprint
from isthmus.core.encode.patch_pca import PatchPCA
from isthmus.core.encode.pretrained import load_pretrained, locate, quiet
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.core.recipe.schema import Autoencoder as AutoencoderSection


class Autoencoder(Protocol):
    """Pictures to latents and back."""

    kind: str
    factor: int
    """Pixels per latent cell along one side."""
    latent_channels: int
    scaling_factor: float
    shift_factor: float

    @property
    def fingerprint(self) -> str:
        """Of weights and settings."""
        ...

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 [b, 3, H, W] in [-1, 1] -> unscaled mean and log variance, each fp32 [b, C, H/factor, W/factor]."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Unscaled latents [b, C, h, w] -> pictures fp32 [b, 3, h*factor, w*factor], about [-1, 1]."""
        ...

    def save(self, folder: str) -> None:
        """Writes safetensors and a configuration that :func:`load_autoencoder` reads, into a folder or URI."""
        ...


def load_autoencoder(
    section: AutoencoderSection, dataset_uri: str, *, device: str = "auto", bf16: bool = False
) -> Autoencoder:
    """The autoencoder of a recipe.

    Args:
        section: the recipe's `encoders.autoencoder`.
        dataset_uri: the dataset beside whose shards a patch_pca lies; `source` is a folder within it.
        device: a torch device; `auto` is the first GPU, or the CPU. patch_pca always runs on the CPU.
        bf16: compute in bfloat16 instead of fp32. Never fp16: SDXL's autoencoder overflows in it.

    Raises:
        UsageError: there is no such model, it has no safetensors, or it is not what the recipe says.
        DatasetNotFound: the dataset has no patch_pca autoencoder.
    """
    autoencoder: Autoencoder
    if section.kind == "patch_pca":
        autoencoder = PatchPCA.load(patch_pca_folder(section, dataset_uri))
    else:
        autoencoder = DiffusersAutoencoder(section.source, device=device, bf16=bf16)
    for field in ("latent_channels", "factor"):
        recipe, model = getattr(section, field), getattr(autoencoder, field)
        if recipe != model:
            raise UsageError(
                f"encoders.autoencoder.{field} is {recipe} in the recipe, {model} in {section.source}"
            )
    return autoencoder


def patch_pca_folder(section: AutoencoderSection, dataset_uri: str) -> str:
    """Where a patch_pca autoencoder lies: `source` within the dataset, or `source` itself if it is absolute."""
    from isthmus.storage.filesystems import join

    if "://" in section.source or section.source.startswith("/"):
        return section.source
    return str(join(dataset_uri, section.source))


_KL = (
    "in_channels", "out_channels", "down_block_types", "up_block_types", "block_out_channels",
    "layers_per_block", "act_fn", "latent_channels", "norm_num_groups", "scaling_factor", "shift_factor",
    "use_quant_conv", "use_post_quant_conv", "mid_block_add_attention",
)  # fmt: skip
_DC = (
    "in_channels", "latent_channels", "attention_head_dim", "encoder_block_types", "decoder_block_types",
    "encoder_block_out_channels", "decoder_block_out_channels", "encoder_layers_per_block",
    "decoder_layers_per_block", "encoder_qkv_multiscales", "decoder_qkv_multiscales", "upsample_block_type",
    "downsample_block_type", "decoder_norm_types", "decoder_act_fns", "encoder_out_shortcut",
    "decoder_in_shortcut", "decoder_conv_act_fn", "scaling_factor",
)  # fmt: skip
_SETTINGS = {"AutoencoderKL": _KL, "AutoencoderDC": _DC}
"""Class -> what changes its output; lists of our own, since the library's defaults grow. Of others: all there is."""
_NO_SPREAD = -30.0
"""Log variance of an autoencoder without a posterior: a standard deviation of 3e-7, which fp16 latents do not show."""


class DiffusersAutoencoder:
    """An autoencoder of diffusers from a folder, a URI or the hub: what its configuration says it is.

    One with a posterior (AutoencoderKL and its like) gives mean and log variance; one without (AutoencoderDC) gives its
    latent and a log variance of next to nothing.

    Args:
        source: see :func:`isthmus.core.encode.pretrained.locate`.
    """

    kind = "diffusers"

    def __init__(self, source: str, *, device: str = "auto", bf16: bool = False) -> None:
        import diffusers

        where, options = locate(source)
        found: Any = load_pretrained(
            lambda: diffusers.AutoencoderKL.load_config(where, **options), source=source
        )
        name = str(dict(found).get("_class_name"))
        kind: Any = getattr(diffusers, name, None) if name.startswith("Autoencoder") else None
        if kind is None:
            raise UsageError(f"{source} is a {name}, no autoencoder of diffusers")
        self.model: Any = load_pretrained(
            lambda: kind.from_pretrained(
                where, use_safetensors=True, low_cpu_mem_usage=False, torch_dtype=torch.float32, **options
            ),
            source=source,
        ).eval()
        config = self.model.config
        if config.get("latents_mean") is not None or config.get("latents_std") is not None:
            raise UsageError(
                f"{source} scales each channel of its latents by itself (latents_mean, latents_std)",
                hint="an autoencoder with one scaling_factor",
            )
        self.latent_channels = int(config.latent_channels)
        levels = config.get("block_out_channels") or config.get("encoder_block_out_channels")
        if levels is None:
            raise UsageError(f"{source}: a {name} is no autoencoder of pictures that isthmus knows")
        self.factor = 2 ** (len(levels) - 1)
        self.scaling_factor = float(config.get("scaling_factor") or 1.0)
        self.shift_factor = float(config.get("shift_factor") or 0.0)
        settings = _SETTINGS.get(name) or sorted(key for key in config if not key.startswith("_"))
        chosen: dict[str, Any] = {
            "kind": self.kind,
            "config": {setting: getattr(config, setting, None) for setting in settings},
        }
        if name != "AutoencoderKL":
            chosen["class"] = name
        self._fingerprint = fingerprint(chosen, self.model.state_dict())
        self._device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self._dtype = torch.bfloat16 if bf16 else torch.float32
        with quiet():
            self.model = self.model.to(device=self._device, dtype=self._dtype).requires_grad_(False)

    @property
    def fingerprint(self) -> str:
        """Of weights in fp32 and settings."""
        return self._fingerprint

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Autoencoder`."""
        encoded = self.model.encode(images.to(self._device, self._dtype))
        posterior = getattr(encoded, "latent_dist", None)
        if posterior is not None:
            return posterior.mean.float().cpu(), posterior.logvar.float().cpu()
        latent: Tensor = encoded[0].float().cpu()
        return latent, torch.full_like(latent, _NO_SPREAD)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See :class:`Autoencoder`."""
        pictures: Tensor = self.model.decode(latents.to(self._device, self._dtype)).sample
        return pictures.float().cpu()

    def save(self, folder: str) -> None:
        """As diffusers saves it; a local folder only."""
        self.model.save_pretrained(folder, safe_serialization=True)
