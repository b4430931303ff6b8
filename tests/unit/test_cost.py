"""The arithmetic, on the one public table that gives speed, time and price of whole training runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from isthmus.cost.arithmetic import run_hours, run_usd

# MosaicML's Stable Diffusion 2 on A100s, latents precomputed (github.com/mosaicml/diffusion, README):
# GPUs, images/s at 256 px, images/s at 512 px, then the days and dollars that they print for the whole run.
PUBLISHED = [
    (8, 1100, 290, 81.33, 31_230),
    (16, 2180, 585, 40.42, 31_043),
    (32, 4080, 1195, 20.06, 30_805),
    (64, 8530, 2340, 10.14, 31_146),
    (128, 11600, 4590, 5.51, 33_874),
]
IMAGES_256, IMAGES_512 = 550_000 * 2048, 850_000 * 2048
USD_PER_A100_HOUR = 2.00


@pytest.mark.parametrize(("gpus", "at_256", "at_512", "days", "usd"), PUBLISHED)
def test_published_runs_are_reproduced(gpus: int, at_256: int, at_512: int, days: float, usd: int) -> None:
    hours = run_hours(IMAGES_256, at_256) + run_hours(IMAGES_512, at_512)
    assert hours / 24 == pytest.approx(days, abs=0.01)
    assert run_usd(hours, gpus, USD_PER_A100_HOUR) == pytest.approx(usd, abs=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: run_hours(-1, 1),
        lambda: run_hours(1, 0),
        lambda: run_usd(-1, 1, 1),
        lambda: run_usd(1, 0, 1),
        lambda: run_usd(1, 8, 0),
    ],
)
def test_impossible_figures_are_refused(call: Callable[[], float]) -> None:
    with pytest.raises(ValueError, match="must"):
        call()
