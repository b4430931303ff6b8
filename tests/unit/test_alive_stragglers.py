"""The rank that makes the others wait, from parts of the step that hold no waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import MODELS

from isthmus.core.models.families import blocks, build_from_config
from isthmus.core.train.stragglers import PARTS, BlockTimer, StragglerMeter, StragglerWatch, figures


def parts(**changes: list[float]) -> dict[str, list[float]]:
    calm = {"data": [0.01] * 4, "own": [1.0] * 4, "wait": [0.1] * 4, "host": [0.01] * 4, "block": [0.02] * 4}
    return calm | changes


def test_a_rank_is_named_once_when_it_is_slow_for_long_enough_and_when_it_is_no_longer() -> None:
    watch = StragglerWatch(1.5, 30.0)
    slow = parts(own=[1.0, 1.0, 1.9, 1.1], wait=[1.0, 1.0, 0.1, 0.9])
    assert watch.observe(slow, 15.0) == []
    (found,) = watch.observe(slow, 15.0)
    assert (found.rank, found.part, found.event_type) == (2, "own", "alarm")
    assert found.event_fields()["message"] == (
        "rank 2 is slow and the others wait for it: it needs 1.9 times the time of the median rank for itself "
        "(1.9e+03 ms a step against 1e+03, over 30 s)"
    )
    assert watch.observe(slow, 15.0) == []
    (over,) = watch.observe(parts(), 15.0)
    assert (over.rank, over.event_type) == (2, "note")
    assert over.event_fields()["message"] == "rank 2 is no longer slow"


def test_one_good_interval_starts_the_clock_anew() -> None:
    watch = StragglerWatch(1.5, 30.0)
    slow = parts(data=[0.0, 0.9, 0.0, 0.0])
    found = [watch.observe(interval, 15.0) for interval in (slow, parts(), slow, slow)]
    assert [len(changes) for changes in found] == [0, 0, 0, 1]
    assert found[-1][0].part == "data"


def test_under_sharding_the_block_tells() -> None:
    watch = StragglerWatch(1.5, 10.0, blocks=20)
    (found,) = watch.observe(parts(block=[0.01, 0.01, 0.01, 0.03]), 15.0)
    assert (found.rank, found.part) == (3, "block")
    assert "computes a block in 3.0 times the time of the median rank" in found.event_fields()["message"]


@pytest.mark.parametrize(
    "calm",
    [
        parts(data=[0.0, 0.01, 0.0, 0.0]),
        parts(own=[1.0, 1.2, 1.4, 1.1]),
        parts(wait=[0.0, 5.0, 5.0, 5.0]),
        parts(block=[0.0, 0.02, 0.0, 0.0]),
    ],
    ids=["costs too little", "within the factor", "waiting is not slow", "not measured"],
)
def test_what_is_no_straggler(calm: dict[str, list[float]]) -> None:
    assert StragglerWatch(1.5, 1.0).observe(calm, 15.0) == []


def test_of_two_ranks_the_slower_is_compared_with_the_faster() -> None:
    two = {"data": [0.0, 0.0], "own": [1.0, 1.6], "wait": [0.6, 0.0], "host": [0.0, 0.0], "block": [0.0, 0.0]}
    (found,) = StragglerWatch(1.5, 1.0).observe(two, 15.0)
    assert found.rank == 1


def test_parts_of_an_interval_are_means_over_its_steps_in_the_ranks_place() -> None:
    meter = StragglerMeter(1, 3)
    meter.add(seconds=0.9, data=0.2, wait=0.3)
    meter.add(seconds=2.0, data=0.0, wait=0.5)
    found = meter.by_rank(meter.take())
    assert set(found) == set(PARTS)
    assert found["data"] == [0.0, 0.1, 0.0]
    assert found["own"] == pytest.approx([0.0, 0.95, 0.0])
    assert meter.take() == [0.0] * 15
    row = figures(parts(own=[1.0, 3.0, 2.0, 1.0]))
    assert (row["own_s"], row["own_max_s"], row["own_max_rank"]) == (1.0, 3.0, 1)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_block_is_timed_and_computes_what_it_did(backend: str | None) -> None:
    def output(timed: bool) -> tuple[Any, float]:
        model = build_from_config("PixArtTransformer2DModel", MODELS["dit"], 0)
        for block in blocks(model) if backend else ():
            block.compile(backend=backend)
        timer = BlockTimer(model, torch.device("cpu"), compiled=backend is not None) if timed else None
        if timer is not None:
            timer.begin()
        generator = torch.Generator().manual_seed(0)
        for _ in range(12):
            found = model(
                torch.randn(2, 4, 8, 8, generator=generator),
                encoder_hidden_states=torch.randn(2, 5, 24, generator=generator),
                timestep=torch.tensor([10, 20]),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            )[0]
        found.sum().backward()
        gradient = model.transformer_blocks[1].attn1.to_q.weight.grad
        assert timer is None or 0 < timer.host < 5
        return (found.detach(), gradient), timer.take() if timer is not None else 0.0

    (plain, gradient), _ = output(False)
    (timed, same_gradient), seconds = output(True)
    assert torch.equal(plain, timed)
    assert torch.equal(gradient, same_gradient)
    assert 0 < seconds < 5
