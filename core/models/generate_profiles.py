"""Makes ``profiles.json`` from the real diffusers classes on the meta device: no weights, no GPU, a minute of CPU.

    python -m isthmus.core.models.generate_profiles            # write the file; with names, only these presets
    python -m isthmus.core.models.generate_profiles --check    # compare with it, exit 1 if it is out of date

FLOPs are counted by torch's FlopCounterMode over a forward and a backward pass. Its backward is wrong for depthwise
convolutions, which only Sana has: there a step is three forward passes. Activation memory is what autograd saves.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isthmus.core.models.conditioning import Condition
from isthmus.core.models.families import blocks, build_from_config, predict
from isthmus.core.models.presets import CLASSES, PRESETS
from isthmus.core.models.profiles import FILE, downsampling, latent_channels

TEXT_TOKENS = {"unet": 77, "dit": 300, "mmdit": 333, "sana": 300, "flux": 512}
"""Tokens of a caption: CLIP's 77; T5's 300 in PixArt-Sigma; CLIP's 77 and T5's 256 in SD3; Gemma's 300; T5's 512."""

RESOLUTIONS = (256, 512, 768, 1024)
_DEEP = {"factor": 32, "resolutions": (512, 768, 1024, 2048)}
SPECIAL: dict[str, dict[str, Any]] = {
    "quickstart": {"factor": 4, "text_tokens": 10, "resolutions": (32,)},
    "sana-600m": _DEEP,
    "sana-1600m": _DEEP,
    "flux-12b": {"text_tokens": 256, "resolutions": RESOLUTIONS},
}
"""Presets that are meant for another autoencoder, or other captions, than their family's usual ones."""


def measure(
    family: str, config: dict[str, Any], *, factor: int = 8, text_tokens: int = 0, resolutions: Sequence[int]
) -> dict[str, Any]:
    """The profile of one configuration, as it is stored.

    Args:
        family: a key of `CLASSES`.
        config: arguments of the family's diffusers class.
        factor: pixels per latent cell.
        text_tokens: tokens of a caption; 0 for the family's usual number.
        resolutions: in pixels.

    Raises:
        UsageError: the class does not take the configuration.
    """
    class_name = CLASSES[family]
    text_tokens = text_tokens or TEXT_TOKENS[family]
    with torch.device("meta"):
        model = build_from_config(class_name, config, seed=0)
    full = {**class_defaults(class_name), **config}
    found: dict[str, Any] = {
        "class_name": class_name,
        "config": config,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "patch_size": 1 if family == "unet" else downsampling(family, full),
        "downsampling": downsampling(family, full),
        "latent_channels": latent_channels(family, full),
        "factor": factor,
        "text_tokens": text_tokens,
        "forward_flops": {},
        "train_flops": {},
        "activation_bytes": {},
        "checkpointed_activation_bytes": {},
    }
    for resolution in resolutions:
        cells = resolution // factor
        arguments = family, full, cells, text_tokens
        forward, train = _flops(model.float(), *arguments)
        kept, checkpointed = _activations(model.to(torch.bfloat16), *arguments)
        for name, value in (
            ("forward_flops", forward),
            ("train_flops", train),
            ("activation_bytes", kept),
            ("checkpointed_activation_bytes", checkpointed),
        ):
            found[name][str(resolution)] = value
    return found


def class_defaults(class_name: str) -> dict[str, Any]:
    """Arguments of a diffusers class and their defaults, JSON-able."""
    import diffusers

    arguments = inspect.signature(getattr(diffusers, class_name).__init__).parameters.values()
    named = {
        argument.name: argument.default
        for argument in arguments
        if argument.default is not inspect.Parameter.empty
    }
    defaults: dict[str, Any] = json.loads(json.dumps(named))
    return defaults


def _inputs(
    family: str, config: dict[str, Any], cells: int, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Condition]:
    """Noisy latent, timestep and condition of one image, on the meta device."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype)

    channels = latent_channels(family, config)
    assert channels is not None
    noisy, timestep = empty(1, channels, cells, cells), empty(1).float()
    sizes = empty(1, 6).float()
    if family == "unet":
        condition = Condition(tokens=empty(1, tokens, config["cross_attention_dim"]))
        if config["addition_embed_type"] == "text_time":
            pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
            condition = Condition(tokens=condition.tokens, pooled=empty(1, pooled), size_crop=sizes)
    elif family == "dit":
        additional = config["use_additional_conditions"]
        if additional is None:
            additional = config["sample_size"] == 128
        condition = Condition(
            tokens=empty(1, tokens, config["caption_channels"]), size_crop=sizes if additional else None
        )
    elif family == "sana":
        condition = Condition(tokens=empty(1, tokens, config["caption_channels"]))
    else:
        condition = Condition(
            tokens=empty(1, tokens, config["joint_attention_dim"]),
            pooled=empty(1, config["pooled_projection_dim"]),
        )
    return noisy, timestep, condition


def _flops(model: nn.Module, family: str, config: dict[str, Any], cells: int, tokens: int) -> tuple[int, int]:
    noisy, timestep, condition = _inputs(family, config, cells, tokens, torch.float32)
    with FlopCounterMode(display=False) as forward:
        prediction = predict(model, family, noisy, timestep, condition)
    if family == "sana":
        return forward.get_total_flops(), 3 * forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        prediction.sum().backward()  # type: ignore[no-untyped-call]
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


class _FusedAttention(torch.autograd.Function):
    """Keeps what a fused attention kernel keeps: query, key, value, output and one log-sum-exp a row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("only the forward pass is measured")


def _fused(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    output: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output


@contextmanager
def _labelled(parts: list[nn.Module], label: list[int | None]) -> Iterator[list[int]]:
    """Sets label[0] to the index of the block that runs; yields bytes of each block's input."""
    inputs = [0] * len(parts)
    handles = []
    for index, part in enumerate(parts):

        def enter(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            label[0] = index
            first = args[0] if args else kwargs["hidden_states"]
            inputs[index] = first.numel() * first.element_size()

        def leave(*_: Any) -> None:
            label[0] = None

        handles += [
            part.register_forward_pre_hook(enter, with_kwargs=True),
            part.register_forward_hook(leave),
        ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _activations(
    model: nn.Module, family: str, config: dict[str, Any], cells: int, tokens: int
) -> tuple[int, int]:
    """Bytes that autograd saves for one image: all of them, and with every block recomputed."""
    noisy, timestep, condition = _inputs(family, config, cells, tokens, torch.bfloat16)
    parts = blocks(model)
    label: list[int | None] = [None]
    # Saved tensors are held until the end: a storage's identity is its address, which may be used again once freed.
    held: dict[int, tuple[Tensor, int | None]] = {}
    weights = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            held.setdefault(storage._cdata, (tensor, label[0]))
        return tensor

    with (
        patch("torch.nn.functional.scaled_dot_product_attention", _fused),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        _labelled(parts, label) as inputs,
    ):
        predict(model, family, noisy, timestep, condition)
    inside = [0] * len(parts)
    outside = 0
    for tensor, owner in held.values():
        size = tensor.untyped_storage().nbytes()
        if owner is None:
            outside += size
        else:
            inside[owner] += size
    return outside + sum(inside), outside + sum(inputs) + max(inside, default=0)


def generate(names: Sequence[str] = ()) -> dict[str, Any]:
    """The content of ``profiles.json``; of some presets only, when they are named."""
    profiles = {}
    for name, preset in PRESETS.items():
        if names and name not in names:
            continue
        special = SPECIAL.get(name, {"resolutions": RESOLUTIONS})
        profiles[name] = measure(preset.family, dict(preset.config), **special)
    return {
        "classes": {class_name: class_defaults(class_name) for class_name in CLASSES.values()},
        "profiles": profiles,
    }


def main(arguments: Sequence[str]) -> int:
    """Write, check, or (``--request``) answer one request on standard input; the exit code."""
    if "--request" in arguments:
        print(json.dumps(measure(**json.load(sys.stdin))))
        return 0
    names = [argument for argument in arguments if not argument.startswith("-")]
    made = json.loads(json.dumps(generate(names)))
    stored = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {"classes": {}, "profiles": {}}
    if "--check" not in arguments:
        profiles = {**stored["profiles"], **made["profiles"]} if names else made["profiles"]
        FILE.write_text(json.dumps({**made, "profiles": profiles}, indent=1) + "\n", "utf-8")
        return 0
    stale = [name for name, found in made["profiles"].items() if stored["profiles"].get(name) != found]
    stale += [name for name, found in made["classes"].items() if stored["classes"].get(name) != found]
    print(f"out of date: {', '.join(stale)}" if stale else f"{FILE.name} is up to date")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
