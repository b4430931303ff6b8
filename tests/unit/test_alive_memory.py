"""Out of memory: the arithmetic and the smallest change that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isthmus.core.models.memory import Images, Setting
from isthmus.core.models.profiles import profile
from isthmus.core.recipe.schema import Model
from isthmus.core.train.memory_error import (
    Footprint,
    Situation,
    is_out_of_memory,
    out_of_memory,
)

GB = 10**9
P = 2_567_463_684
"""Parameters of SDXL's UNet (Podell et al. 2023: 2.6 billion)."""


def situation(**changes: Any) -> Situation:
    """SDXL's UNet at 512 px under ddp on 8 GPUs of 80 GB."""
    shards = changes.pop("shards", 1)
    setting = {"micro_batch_size": 16, "checkpointing": False, "strategy": "ddp", "shards": shards}
    setting |= {name: changes.pop(name) for name in list(changes) if name in setting}
    four = 4 * P // shards
    values: dict[str, Any] = {
        "footprint": Footprint(weights=four, gradients=four, optimizer=2 * four, ema=four),
        "images": Images(plain=5 * GB, recomputed=1 * GB),
        "setting": Setting(**setting),
        "capacity": 80 * GB, "rank": 3, "world_size": 8, "step": 12, "stage": 1, "rank_batch_size": 32,
    }  # fmt: skip
    return Situation(**values | changes)


def test_the_arithmetic_is_shown_and_a_smaller_micro_batch_comes_first() -> None:
    error = out_of_memory(situation())
    assert str(error) == (
        "rank 3: out of memory at step 12: weights 10.3 + gradients 10.3 + optimizer 20.5 + EMA 10.3 + activations 80.0 "
        "(16 images x 5.00) = 131.3 GB; there are 80.0 GB (stages.1.micro_batch_size=4 needs 71.3 GB)"
    )


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"micro_batch_size": 32}, "stages.1.micro_batch_size=16 and parallel.activation_checkpointing=true needs 67.3 GB"),
        ({"images": Images(plain=30 * GB, recomputed=1 * GB)}, "parallel.activation_checkpointing=true needs 67.3 GB"),
        ({"capacity": 40 * GB}, "stages.1.micro_batch_size=4 and parallel.strategy=fsdp needs 26.4 GB"),
        ({"capacity": 40 * GB, "shards": 8, "strategy": "fsdp"}, "stages.1.micro_batch_size=4 needs 26.4 GB"),
        (
            {"capacity": 40 * GB, "world_size": 1, "shards": 1},
            "nothing in the recipe makes it fit",
        ),
        ({"micro_batch_size": 2}, "that should fit: look for other processes"),
        ({"images": None}, "stages.1.micro_batch_size=8 may fit"),
        ({"images": None, "micro_batch_size": 1}, "parallel.activation_checkpointing=true"),
    ],
)  # fmt: skip
def test_the_smallest_change_that_fits(changes: dict[str, Any], hint: str) -> None:
    found = out_of_memory(situation(**changes)).hint
    assert found is not None
    assert hint in found


def test_what_is_proposed_fits_by_the_same_arithmetic() -> None:
    case = situation()
    smaller = Setting(micro_batch_size=4, checkpointing=False, strategy="ddp", shards=1)
    assert case.fits(smaller)
    assert not case.fits(case.setting)
    assert not case.fits(Setting(micro_batch_size=8, checkpointing=False, strategy="ddp", shards=1))


def test_a_micro_batch_divides_the_ranks_batch() -> None:
    hint = out_of_memory(situation(micro_batch_size=15, rank_batch_size=45)).hint
    assert hint is not None
    assert "micro_batch_size=5 " in hint


def test_activations_come_from_the_profile() -> None:
    known = profile(Model(family="unet", preset="sdxl"))
    found = Images.of(known, 512, "bf16")
    assert found is not None
    assert known is not None
    assert found.plain == known.activation_bytes[512]
    assert Images.of(known, 512, "fp32") == Images(plain=2 * found.plain, recomputed=2 * found.recomputed)
    assert found.each("selective") == (found.plain + found.recomputed) // 2
    assert Images.of(known, 333, "bf16") is None
    assert Images.of(None, 512, "bf16") is None


def test_every_way_to_say_it_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid"))
