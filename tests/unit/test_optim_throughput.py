"""Throughput by hand, the waits by a clock that the test moves, and what the bar says."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.autograd import Variable

from isthmus.core.models.profiles import Profile, profile
from isthmus.core.recipe.load import load_recipe, shipped_recipes
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.progress import Progress
from isthmus.core.train.throughput import ExposedCommunication, Throughput, shares
from isthmus.errors import UsageError


def recipe(name: str = "sd3-medium", *overrides: str) -> Recipe:
    return load_recipe(shipped_recipes()[name], overrides).recipe


def test_mfu_is_the_models_flops_over_what_the_gpus_could_do() -> None:
    known = recipe("sdxl-progressive")
    stored = profile(known.model)
    assert stored is not None
    stage = next(stage for stage in known.stages if stage.resolution == 512)
    throughput = Throughput(known, 64, cuda=True)
    seconds = 3.0
    found = throughput.figures(stage, (4, 64, 64), seconds)
    rate = stage.global_batch_size / seconds
    assert found["samples_per_s"] == pytest.approx(rate)
    assert found["samples_per_s_per_gpu"] == pytest.approx(rate / 64)
    peak = 312e12  # dense bf16 of an A100, NVIDIA's data sheet
    assert found["mfu"] == pytest.approx(rate * stored.train_flops[512] / (64 * peak))
    wide = throughput.figures(stage, (4, 48, 80), seconds)
    assert wide["mfu"] == pytest.approx((found["mfu"] or 0) * 48 * 80 / 64**2)


def test_published_speed_gives_the_published_mfu() -> None:
    """MosaicML, SD2 on 8 A100 at 512 px: 290 images/s are 28.0 % MFU. Their FLOPs and ours differ by a few per cent."""
    known = recipe("sdxl-progressive")
    config = profile(known.model)
    assert config is not None
    sd2 = 2.409e12  # forward and backward FLOPs of an image, counted on diffusers' class
    throughput = Throughput(known, 8, cuda=True)
    throughput._flops = {512: int(sd2)}
    stage = next(stage for stage in known.stages if stage.resolution == 512)
    found = throughput.figures(stage, (4, 64, 64), stage.global_batch_size / 290)
    assert found["mfu"] == pytest.approx(0.280, rel=0.02)


def test_a_cpu_has_no_mfu_and_counts_nothing() -> None:
    def never(*_: Any, **__: Any) -> Profile:
        raise AssertionError("counted FLOPs for a CPU")

    known = recipe("quickstart")
    throughput = Throughput(known, 2, cuda=False, find_profile=never)
    assert throughput.figures(known.stages[0], (24, 8, 8), 2.0)["mfu"] is None
    assert throughput.figures(known.stages[0], (24, 8, 8), 2.0)["samples_per_s_per_gpu"] == 64 / 2 / 2


def test_an_unknown_model_is_counted_and_what_cannot_be_counted_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []
    changed = recipe("sd3-medium", "model.config={num_layers: 3}")
    stored = profile(recipe("sd3-medium").model)
    assert stored is not None

    def count(model: Any, **more: Any) -> Profile:
        asked.append((model, more["resolutions"], more["factor"]))
        return stored

    stage = changed.stages[0]
    side = stage.resolution // 8
    found = Throughput(changed, 8, cuda=True, find_profile=count).figures(stage, (16, side, side), 1.0)
    assert found["mfu"] is not None
    resolutions = sorted({stage.resolution for stage in changed.stages})
    assert asked == [(changed.model, resolutions, 8)]

    def cannot(*_: Any, **__: Any) -> Profile:
        raise UsageError("its figures are unknown", where="model.family")

    assert (
        Throughput(changed, 8, cuda=True, find_profile=cannot).figures(stage, (16, 8, 8), 1.0)["mfu"] is None
    )
    assert "warning: no MFU: model.family: its figures are unknown" in capsys.readouterr().out


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_exposed_communication_is_what_follows_the_backward_pass_and_the_losss_exchange() -> None:
    clock = Clock()
    exposed = ExposedCommunication(torch.device("cpu"), 2, clock)
    weight = torch.ones(3, requires_grad=True)

    def pass_time(seconds: float) -> Any:
        def hook(*_: Any) -> None:
            clock.now += seconds

        return hook

    def as_ddp(*_: Any) -> None:
        # DDP and FSDP2 wait for their exchange in a callback that a parameter's hook makes.
        clock.now += 1.0  # computing the last gradient
        Variable._execution_engine.queue_callback(pass_time(0.25))

    weight.register_hook(as_ddp)
    middle = weight * 2
    middle.register_hook(pass_time(5.0))
    loss = middle.sum()
    exposed.watch(loss)
    loss.backward()
    exposed.mark()
    clock.now += 7.0  # summing the report up on the host
    exposed.mark()
    clock.now += 0.5
    exposed.mark()
    assert exposed.take() == pytest.approx(0.25 + 0.5)
    assert exposed.take() is None


def test_one_rank_measures_no_exchange() -> None:
    exposed = ExposedCommunication(torch.device("cpu"), 1)
    loss = torch.ones(3, requires_grad=True).sum()
    exposed.watch(loss)
    loss.backward()
    for _ in range(3):
        exposed.mark()
    assert exposed.take() is None


def test_the_bar_names_what_takes_more_than_a_hundredth() -> None:
    row = {
        "step_s": 1.0,
        "mfu": 0.4123,
        "data_wait_s": 0.02,
        "exposed_communication_s": None,
        "checkpoint_stall_s": 0.001,
    }
    assert shares(row) == "MFU 41.2 %  data 2 %"
    row |= {"mfu": None, "exposed_communication_s": 0.5, "checkpoint_stall_s": 1.0}
    assert shares(row) == "data 1 %  exchange 25 %  checkpoint 50 %"
    stream = io.StringIO()
    progress = Progress(10, quiet=False, stream=stream, interval=0)
    progress.step(1, stage="a", loss=0.5, samples_per_s=8, seconds=1, shares=lambda: shares(row))
    progress.step(2, stage="a", loss=0.5, samples_per_s=8, seconds=1)
    first, second = stream.getvalue().splitlines()
    assert "8 samples/s  data 1 %  exchange 25 %  checkpoint 50 %  9 s left" in first
    assert second.endswith("8 samples/s  8 s left")
