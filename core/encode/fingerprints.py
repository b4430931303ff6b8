"""Fingerprints of models: the same weights and settings give the same string, on any device and file layout."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def fingerprint(settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over settings and named tensors, as 64 hexadecimal digits.

    Tensors are hashed one after the other in the order of their names, so nothing is copied as a whole; how the
    files were split does not matter.
    """
    import torch

    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode())
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # Bytes, not numbers: numpy knows no bfloat16.
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 of a tokenizer's words and their numbers."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items()), ensure_ascii=False).encode()).hexdigest()
