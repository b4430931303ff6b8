"""Each family's way to join text, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from training import ENCODERS, MODELS, recipe_data

from isthmus.core.models.conditioning import Condition, build_condition
from isthmus.core.recipe.schema import Encoders
from isthmus.errors import UsageError
from isthmus.storage.shards import TextColumn


def encoders(family: str) -> Encoders:
    return Encoders.model_validate(recipe_data("x", family)["encoders"])


def columns(family: str, rows: int = 3) -> dict[str, TextColumn]:
    random = np.random.default_rng(0)

    def half(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape).astype(np.float16)

    return {
        name: TextColumn(
            half(rows, tokens, width),
            np.arange(1, rows + 1, dtype=np.int32),
            None if pooled is None else half(rows, pooled),
        )
        for name, _, tokens, width, pooled in ENCODERS[family]
    }


def build(family: str, text: dict[str, TextColumn] | None = None, **kwargs: Any) -> Condition:
    return build_condition(
        family, kwargs.pop("config", MODELS[family]), text or columns(family), encoders(family), **kwargs
    )


def test_dit_masks_what_lies_past_the_length() -> None:
    text = columns("dit")
    found = build("dit", text)
    assert found.mask is not None
    assert found.mask.sum(1).tolist() == [1, 2, 3]
    assert found.pooled is None
    assert np.array_equal(found.tokens.numpy(), text["minilm"].tokens)


def test_unet_joins_by_channel_and_takes_the_last_pooled_vector() -> None:
    text = columns("unet")
    found = build("unet", text, target_size=(32, 64))
    assert found.tokens.shape == (3, 5, 32)
    assert np.array_equal(found.tokens[..., :12].numpy(), text["clip_l"].tokens)
    assert np.array_equal(found.tokens[..., 12:].numpy(), text["clip_g"].tokens)
    assert found.pooled is not None
    assert np.array_equal(found.pooled.numpy(), text["clip_g"].pooled)
    assert found.mask is None


def test_unet_tells_the_crop_in_pixels_of_the_resized_picture() -> None:
    original = np.array([[800, 1200]] * 3, np.int32)
    crop = np.array([[100, 50, 512, 1024]] * 3, np.int32)
    found = build("unet", original_size=original, crop=crop, target_size=(256, 512))
    assert found.size_crop is not None
    assert found.size_crop[0].tolist() == [800, 1200, 50, 25, 256, 512]
    assert found.to("cpu", torch.bfloat16).size_crop.dtype == torch.float32  # type: ignore[union-attr]


def test_mmdit_pads_clip_appends_t5_and_joins_pooled() -> None:
    text = columns("mmdit")
    found = build("mmdit", text)
    assert found.tokens.shape == (3, 5 + 4, 48)
    assert np.array_equal(found.tokens[:, :5, :12].numpy(), text["clip_l"].tokens)
    assert np.array_equal(found.tokens[:, :5, 12:32].numpy(), text["clip_g"].tokens)
    assert not found.tokens[:, :5, 32:].any()
    assert np.array_equal(found.tokens[:, 5:].numpy(), text["t5"].tokens)
    assert found.pooled is not None
    assert found.pooled.shape == (3, 32)


def test_null_replaces_text_but_not_sizes() -> None:
    condition = build("unet", target_size=(32, 64))
    null = build("unet", columns("unet", 1), target_size=(16, 16))
    drop = torch.tensor([True, False, True])
    found = condition.with_null(drop, null)
    assert torch.equal(found.tokens[0], null.tokens[0])
    assert torch.equal(found.tokens[1], condition.tokens[1])
    assert found.pooled is not None
    assert null.pooled is not None
    assert torch.equal(found.pooled[2], null.pooled[0])
    assert found.size_crop is condition.size_crop


def test_rows_and_cat_are_inverse() -> None:
    condition = build("dit")
    again = Condition.cat([condition.rows(0, 1), condition.rows(1, 3)])
    assert torch.equal(again.tokens, condition.tokens)
    assert again.mask is not None
    assert condition.mask is not None
    assert torch.equal(again.mask, condition.mask)
    assert len(condition.rows(0, 1).expand(4)) == 4


@pytest.mark.parametrize(
    ("family", "key", "value", "says"),
    [
        ("dit", "caption_channels", 25, "caption_channels is 25"),
        ("unet", "cross_attention_dim", 31, "cross_attention_dim is 31"),
        ("mmdit", "joint_attention_dim", 64, "joint_attention_dim is 64"),
        ("mmdit", "joint_attention_dim", 16, "joint_attention_dim is 16"),
        ("mmdit", "pooled_projection_dim", 33, "pooled_projection_dim is 33"),
    ],
)
def test_widths_that_do_not_fit_are_named(family: str, key: str, value: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build(family, config={**MODELS[family], key: value}, target_size=(16, 16))


def test_missing_columns_and_sizes_are_named() -> None:
    with pytest.raises(UsageError, match="minilm"):
        build("dit", {"other": columns("dit")["minilm"]})
    with pytest.raises(UsageError, match="target size"):
        build("unet")
    with pytest.raises(UsageError, match="one text encoder"):
        build_condition("dit", MODELS["dit"], columns("unet"), encoders("unet"))
