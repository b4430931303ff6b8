"""Names and local parts of parameters, whatever has been wrapped around the model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean(name: str) -> str:
    """A parameter's name as the plain diffusers class knows it."""
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper):
            name = name[len(wrapper) :]
        name = name.replace("." + wrapper, ".")
    return name


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds; memory is shared."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def full(tensor: Tensor) -> Tensor:
    """The whole tensor; of a DTensor by a collective that all ranks must enter."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Clean name -> parameter, of those that are trained, in the model's order."""
    return {clean(name): weight for name, weight in model.named_parameters() if weight.requires_grad}


def checksum(tensors: dict[str, Tensor]) -> str:
    """A hash of names, shapes and bits of whole tensors; all ranks must enter. For tests and checks."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = full(tensor.detach()).cpu().contiguous()
        digest.update(f"{name}{tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
