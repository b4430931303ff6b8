"""The quickstart's judgement: samples, how many show what their caption says, and the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.core.encode.emoji import HELD_OUT, EmojiSource
from isthmus.core.sample.caption_match import CaptionMatcher, Pixels, fit, shuffled
from isthmus.core.sample.grids import labelled_grid, to_pixels
from isthmus.core.sample.load import load_run

_FITTED_SEED, _REAL_SEED = 1_000_003, 2_000_003
"""Of pictures that no quickstart trains on: those that the rules are fitted on, and those that they are tried on."""
_SHOWN = 10
"""Held-out samples on the grid, after one sample of each training caption."""


def judge(
    run_uri: str, *, grid: Path, seed: int, training: int, held_out: int, say: Callable[[str], None]
) -> tuple[dict[str, float], Path]:
    """Draw samples and judge them.

    Args:
        run_uri: a finished run of the quickstart.
        grid: where the picture goes, a PNG.
        seed: of the samples' noise, and of the shuffled control.
        training, held_out: samples of training captions and of held-out pairs.

    Returns:
        `caption_match`, `heldout_caption_match` and `shuffled_caption_match`, shares in 0..1; and the grid's path.
    """
    loaded = load_run(run_uri, device="cpu")
    seen = EmojiSource().captions
    captions = [seen[i % len(seen)] for i in range(training)]
    unseen = [HELD_OUT[i % len(HELD_OUT)] for i in range(held_out)]
    scale = loaded.recipe.validation.guidance_scale
    say(
        f"4/6 sampling {training} pictures of training captions and {held_out} of held-out pairs: EMA weights of "
        f"step {loaded.step}, guidance scale {scale:g}"
    )
    pictures = to_pixels(loaded.sample([*captions, *unseen], seed=seed))

    size = loaded.stage.resolution
    matcher = fit_matcher(size)
    real, names = _draw(size, 8, _REAL_SEED)
    trial = matcher.match(real, names)
    control = matcher.match(real, shuffled(names, seed))
    say(
        f"5/6 caption match; tried first on {trial.count} real pictures: {trial.both:.2f}, and with their captions "
        f"shuffled: {control.both:.2f}"
    )
    found = {
        "caption_match": matcher.match(pictures[:training], captions).both,
        "heldout_caption_match": matcher.match(pictures[training:], unseen).both,
        "shuffled_caption_match": matcher.match(pictures[:training], shuffled(captions, seed)).both,
    }
    shown = [*range(min(len(seen), training)), *range(training, training + min(_SHOWN, held_out))]
    _write_grid(grid, matcher, pictures, [*captions, *unseen], shown, training, found, loaded.step)
    return {name: round(share, 4) for name, share in found.items()}, grid


def fit_matcher(size: int) -> CaptionMatcher:
    """The rules, fitted on real pictures of all 27 pairs at `size` pixels."""
    drawn, names = _draw(size, 8, _FITTED_SEED)
    words = [name.split() for name in names]
    return fit(drawn, [colour for colour, _ in words], [shape for _, shape in words])


def _draw(size: int, variants: int, seed: int) -> tuple[Pixels, list[str]]:
    records = [
        record
        for held_out in (False, True)
        for record in EmojiSource(size=size, variants=variants, seed=seed, held_out=held_out)
    ]
    pixels = np.stack([np.asarray(record.image) for record in records])
    return pixels, [record.captions[0] for record in records]


def _write_grid(
    place: Path,
    matcher: CaptionMatcher,
    pictures: Pixels,
    captions: Sequence[str],
    shown: Sequence[int],
    training: int,
    found: dict[str, float],
    step: int,
) -> None:
    def label(index: int) -> str:
        right = matcher.see(pictures[index]) == matcher.parse(captions[index])
        return captions[index] if right else f"{captions[index]}\nno match"

    sheet: Any = labelled_grid(
        pictures[list(shown)],
        [label(index) for index in shown],
        columns=8,
        marked=[index >= training for index in shown],
        title=(
            f"isthmus quickstart, step {step}: caption match {found['caption_match']:.2f}, "
            f"held-out pairs {found['heldout_caption_match']:.2f}"
        ),
        footer="* held out: this pair of colour and shape was never trained on",
    )
    sheet.save(place)
