"""What Sana and Flux encode with: AutoencoderDC, 16 channels, Gemma; loaded by their own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.core.encode import tiny
from isthmus.core.encode.autoencoders import DiffusersAutoencoder
from isthmus.core.encode.text import load_text_encoder
from isthmus.core.recipe.schema import TextEncoder
from isthmus.errors import UsageError


def test_an_autoencoder_without_a_posterior_gives_its_latent(tmp_path: Path) -> None:
    found = DiffusersAutoencoder(str(tiny.save_deep_autoencoder(tmp_path / "dc")), device="cpu")
    assert (found.latent_channels, found.factor, found.scaling_factor, found.shift_factor) == (4, 4, 0.5, 0.0)
    pictures = torch.rand(2, 3, 16, 32) * 2 - 1
    mean, logvar = found.encode(pictures)
    assert mean.shape == logvar.shape == (2, 4, 4, 8)
    with torch.no_grad():
        assert torch.equal(mean, found.model.encode(pictures).latent)
    # What training adds of the posterior's noise is below what fp16 can tell.
    spread = torch.exp(logvar.half().float() / 2)
    assert spread.max() < 1e-6
    assert found.decode(mean).shape == pictures.shape


def test_sixteen_channels_are_like_four(tmp_path: Path) -> None:
    folder = tiny.save_autoencoder(tmp_path / "kl", latent_channels=16)
    found = DiffusersAutoencoder(str(folder), device="cpu")
    assert found.latent_channels == 16
    assert found.encode(torch.zeros(1, 3, 16, 16))[0].shape == (1, 16, 4, 4)


def test_autoencoders_are_told_apart_by_weights_and_class(tmp_path: Path) -> None:
    prints = [
        DiffusersAutoencoder(
            str(tiny.save_deep_autoencoder(tmp_path / f"{seed}", seed=seed)), device="cpu"
        ).fingerprint
        for seed in (0, 1)
    ]
    again = DiffusersAutoencoder(str(tmp_path / "0"), device="cpu").fingerprint
    assert prints[0] == again != prints[1]


def test_what_is_no_autoencoder_is_refused_by_name(tmp_path: Path) -> None:
    import diffusers
    from training import MODELS

    diffusers.PixArtTransformer2DModel(**MODELS["dit"]).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="is a PixArtTransformer2DModel, no autoencoder of diffusers"):
        DiffusersAutoencoder(str(tmp_path), device="cpu")


def gemma(folder: Path, **changes: Any) -> TextEncoder:
    section = {"name": "gemma", "kind": "gemma", "source": str(folder), "max_tokens": 8, "width": tiny.WIDTH}
    return TextEncoder.model_validate(section | changes)


def test_gemma_gives_its_last_state_masked_and_padded_on_the_right(tmp_path: Path) -> None:
    runner = load_text_encoder(gemma(tiny.save_gemma(tmp_path)), device="cpu")
    column = runner.encode(["a red heart", ""])
    assert column.tokens.shape == (2, 8, tiny.WIDTH)
    assert column.length.tolist() == [5, 2]  # with the first and the last token
    assert not column.tokens[0, 5:].any()
    assert column.tokens[0, :5].any()
    assert column.pooled is None
    # Gemma is causal: what a short caption means does not depend on how much room there is.
    shorter = load_text_encoder(gemma(tmp_path, max_tokens=6), device="cpu").encode(["a red heart"])
    assert abs(shorter.tokens[0, :5] - column.tokens[0, :5]).max() < 2e-3


def test_gemma_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a t5"):
        load_text_encoder(gemma(tiny.save_t5(tmp_path)), device="cpu")
