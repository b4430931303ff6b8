"""The denoiser families: diffusers' classes, built, wrapped and called the same way.

Three conventions differ between the classes and are settled here: which blocks are the units of sharding,
compiling and recomputing; how text and sizes are passed (:mod:`isthmus.core.models.calling`); what comes out (PixArt
may predict a variance beside the noise, of which nothing is trained). Timesteps are on the models' scale of 0 to 1000
everywhere: a flow time t in [0, 1] is given as 1000 t, as SD3 and diffusers' flow scheduler do. A team's own families
(:mod:`isthmus.core.models.denoisers`) go through the same functions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.core.models.calling import CALLS
from isthmus.core.models.conditioning import Condition
from isthmus.core.models.denoisers import OWN_BLOCKS, build_own, own_config, own_prediction
from isthmus.core.models.patch_mixer import PatchMixerBlock, add_patch_mixer
from isthmus.core.models.presets import CLASSES, model_config
from isthmus.core.recipe.schema import Model
from isthmus.errors import UsageError

# diffusers' own `_repeated_blocks` is empty for many classes and `_no_split_modules` names patch embeddings.
WRAP = {
    "UNet2DConditionModel": ("BasicTransformerBlock", "ResnetBlock2D"),
    "PixArtTransformer2DModel": ("BasicTransformerBlock",),
    "SD3Transformer2DModel": ("JointTransformerBlock",),
    "SanaTransformer2DModel": ("SanaTransformerBlock",),
    "FluxTransformer2DModel": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
}
"""diffusers class -> classes of its blocks, the units of sharding and compiling."""


def build_denoiser(model: Model, seed: int) -> nn.Module:
    """A denoiser with initial weights from `seed` alone (the same on every rank), in float32 on the CPU.

    Raises:
        UsageError: the configuration does not fit the diffusers class, or there is no such family.
        PluginError: a team's own denoiser cannot be built.
    """
    class_name, config = model_config(model)
    if model.family not in CLASSES:
        return build_own(model.family, config, seed)
    denoiser = build_from_config(class_name, config, seed)
    if model.patch_mixer is not None:
        # Behind the model, whose weights are the same with and without it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            add_patch_mixer(denoiser, model.family, model.patch_mixer)
    if model.family == "flux":
        denoiser.told_guidance = model.guidance_embedding  # type: ignore[assignment]
    return denoiser


def build_from_config(class_name: str, config: dict[str, Any], seed: int) -> nn.Module:
    """As :func:`build_denoiser`, from a diffusers class and its arguments."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            denoiser: nn.Module = getattr(diffusers, class_name)(**config)
        except (TypeError, ValueError, NotImplementedError, ZeroDivisionError, RuntimeError) as error:
            raise UsageError(str(error), where=f"model.config of {class_name}") from error
    inputs, outputs = _channels(denoiser)
    packed = class_name == CLASSES["flux"]
    if outputs not in ((inputs,) if packed else (inputs, 2 * inputs)):
        twice = "" if packed else " nor twice that (noise and variance)"
        raise UsageError(
            f"out_channels {outputs} is {'not' if packed else 'neither'} in_channels {inputs}{twice}",
            where=f"model.config of {class_name}",
        )
    return denoiser


def resolved_config(denoiser: nn.Module) -> dict[str, Any]:
    """The configuration of a denoiser with the defaults of its class filled in; a team's own as it says."""
    own = own_config(denoiser)
    if own is not None:
        return own
    config: Any = denoiser.config
    resolved = dict(config)
    if "use_additional_conditions" in resolved:
        # PixArt decides by the sample size when it is not told.
        resolved["use_additional_conditions"] = denoiser.use_additional_conditions
    mixer: Any = getattr(denoiser, "patch_mixer", None)
    if mixer is not None:
        resolved["patch_mixer"] = mixer.settings.model_dump()
    return resolved


def block_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Classes of the blocks of `module`: the wrap table's, else the most frequent class of its module lists.

    Returns an empty set for a module without repeated blocks.
    """
    own = OWN_BLOCKS.get(type(module))
    if own is not None:
        return set(own)
    names = WRAP.get(type(module).__name__)
    if names is not None:
        found = {type(part) for part in module.modules() if type(part).__name__ in names}
        mixed = any(isinstance(part, PatchMixerBlock) for part in module.modules())
        return found | ({PatchMixerBlock} if mixed else set())
    repeated: Counter[type[nn.Module]] = Counter()
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) > 1 and len({type(item) for item in part}) == 1:
            repeated[type(part[0])] += len(part)
    return {repeated.most_common(1)[0][0]} if repeated else set()


def blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of `module`, in order."""
    classes = tuple(block_classes(module))
    return [part for part in module.modules() if isinstance(part, classes)] if classes else []


def predict(
    model: nn.Module,
    family: str,
    noisy: Tensor,
    timestep: Tensor,
    condition: Condition,
    keep: Tensor | None = None,
) -> Tensor:
    """The model's prediction for `noisy`.

    Args:
        model: a module of :func:`build_denoiser`, as it is or wrapped for training.
        family: the recipe's `model.family`.
        noisy: [b, C, H, W], in the dtype to compute in (autocast may lower it).
        timestep: float32 [b], 0 to 1000; must not be lowered to bfloat16, which holds 8 bits of it.
        condition: of b samples, text in the dtype of `noisy`.
        keep: int64 [b, k], the image tokens that are kept in training, in rows; None: all. Only for families of
            :data:`isthmus.core.models.presets.MASKABLE`.

    Returns:
        The prediction [b, C, H, W]; where the model also predicts a variance, without it; where tokens were left
        out, zeros.
    """
    call = CALLS.get(family)
    if call is None:
        return own_prediction(model, family, noisy, timestep, condition)
    output = call(model, noisy, timestep, condition, keep)
    channels = noisy.shape[1]
    return output if output.shape[1] == channels else output[:, :channels]


def _channels(denoiser: nn.Module) -> tuple[int, int]:
    config: Any = denoiser.config
    inputs = int(config.in_channels)
    outputs = getattr(config, "out_channels", None)
    return inputs, inputs if outputs is None else int(outputs)
