"""The recipe's thresholds: windows, hysteresis, the derived fabric figure, and what cannot be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from isthmus.core.recipe.schema import Compute, Monitor, Recipe
from isthmus.core.telemetry import Alarm, Thresholds, expected_fabric, unmeasurable


def monitor(**thresholds: dict[str, Any]) -> Monitor:
    """A monitor section."""
    return Monitor.model_validate(thresholds)


def feed(
    thresholds: Thresholds, metric: str, values: list[float], *, start: float = 0, every: float = 10
) -> list[Alarm]:
    """Rows of one metric, `every` seconds apart; returns the alarms."""
    alarms = []
    for index, value in enumerate(values):
        alarms += thresholds.observe({"time": start + index * every, metric: value})
    return alarms


def utilization(**options: Any) -> Thresholds:
    """At least 95 % over a minute."""
    return Thresholds(monitor(gpu_utilization={"min": 95, "for": "1 min"}), warm_up=0, **options)


def test_no_alarm_before_the_window_is_full() -> None:
    assert feed(utilization(), "gpu_utilization", [10] * 6) == []


def test_a_lasting_breach_alarms_once() -> None:
    alarms = feed(utilization(node=3), "gpu_utilization", [10] * 50)
    assert len(alarms) == 1
    assert alarms[0].event_type == "alarm"
    assert alarms[0].time == 60
    assert alarms[0].event_fields() == {
        "metric": "gpu_utilization",
        "value": 10.0,
        "bound": 95.0,
        "side": "min",
        "for_s": 60.0,
        "node": 3,
        "message": "node 3: gpu_utilization 10 % is below 95 % (over 60 s)",
    }


def test_a_single_low_reading_within_a_good_window_is_no_breach() -> None:
    assert feed(utilization(), "gpu_utilization", [100] * 10 + [80] + [100] * 10) == []


def test_a_breach_that_is_over_is_noted_and_the_next_one_alarms_again() -> None:
    values = [100] * 10 + [50] * 10 + [100] * 10 + [50] * 10
    alarms = feed(utilization(), "gpu_utilization", values)
    assert [alarm.event_type for alarm in alarms] == ["alarm", "note", "alarm"]
    assert "no longer below" in alarms[1].message


def test_hovering_at_the_bound_alarms_once() -> None:
    hover = [94.9 if index // 8 % 2 else 95.4 for index in range(200)]
    assert [alarm.over for alarm in feed(utilization(), "gpu_utilization", hover)] == [False]


def test_a_bound_near_a_hundred_percent_can_be_cleared() -> None:
    thresholds = Thresholds(monitor(gpu_memory={"min": 99, "for": "10 s"}), warm_up=0)
    alarms = feed(thresholds, "gpu_memory", [90] * 5 + [100] * 5)
    assert [alarm.over for alarm in alarms] == [False, True]


def test_maximum() -> None:
    thresholds = Thresholds(monitor(gpu_memory={"max": 90, "for": "20 s"}), warm_up=0)
    alarms = feed(thresholds, "gpu_memory", [80, 80, 80, 97, 97, 97, 97, 80, 80, 80])
    assert [(alarm.side, alarm.over) for alarm in alarms] == [("max", False), ("max", True)]


def test_energy_is_summed_within_the_window() -> None:
    # 8 A100 at 400 W: 32 kJ in 10 s, 192 kJ a minute.
    rows = [32.0] * 40
    at_most = Thresholds(monitor(gpu_energy_kilojoules={"min": 1000, "for": "320 s"}), warm_up=0)
    assert feed(at_most, "gpu_energy_kilojoules", rows) == []
    alarms = feed(
        Thresholds(monitor(gpu_energy_kilojoules={"min": 200, "for": "1 min"}), warm_up=0),
        "gpu_energy_kilojoules",
        rows,
    )
    assert [round(alarm.value, 6) for alarm in alarms] == [192]


def test_data_wait_is_the_share_of_step_time_over_the_window() -> None:
    thresholds = Thresholds(monitor(data_wait={"max": 2, "for": "10 s"}), warm_up=0)
    alarms: list[Alarm] = []
    for step in range(40):
        # One step in ten waits 0.5 s; the others do not: 0.5 of 10 s is 5 %.
        wait = 0.5 if step % 10 == 9 else 0.0
        alarms += thresholds.observe({"time": float(step), "step": step, "step_s": 1.0, "data_wait_s": wait})
    assert len(alarms) == 1
    assert alarms[0].value == pytest.approx(5.0)
    assert alarms[0].node is None


def test_warm_up_is_not_judged() -> None:
    thresholds = Thresholds(monitor(gpu_utilization={"min": 95, "for": "1 min"}), warm_up=120)
    assert feed(thresholds, "gpu_utilization", [0] * 12 + [100] * 12) == []


@pytest.mark.parametrize("junk", [None, "100", float("nan"), float("inf"), True, [1]])
def test_junk_in_a_row_is_no_reading(junk: object) -> None:
    thresholds = utilization()
    for index in range(20):
        assert thresholds.observe({"time": float(index * 10), "gpu_utilization": junk}) == []
    assert thresholds.observe({"gpu_utilization": 5}) == []


def test_auto_waits_until_the_expected_figure_is_known_and_alarms_below_half_of_it() -> None:
    figure: list[float | None] = [None]
    source: Callable[[], float | None] = lambda: figure[0]  # noqa: E731
    thresholds = Thresholds(
        monitor(fabric_gigabytes_per_s={"min": "auto", "for": "20 s"}), expected_fabric=source, warm_up=0
    )
    assert feed(thresholds, "fabric_gigabytes_per_s", [1.0] * 10) == []
    figure[0] = 3.0
    (alarm,) = feed(thresholds, "fabric_gigabytes_per_s", [1.0] * 10, start=100)
    assert (alarm.bound, alarm.value) == (1.5, 1.0)


def recipe(**sections: Any) -> Recipe:
    """SD2's published run: 64 A100 in 8 nodes, 2048 images a step."""
    data: dict[str, Any] = {
        "version": 1,
        "name": "sd2",
        "model": {"family": "unet", "preset": "sd2-base"},
        "encoders": {
            "autoencoder": {"kind": "diffusers", "source": "vae", "latent_channels": 4, "factor": 8},
            "text": [{"name": "clip", "kind": "clip", "source": "clip", "max_tokens": 77, "width": 1024}],
        },
        "data": {"sources": [{"uri": "./data"}], "lanes": 64},
        "stages": [
            {
                "name": "512px",
                "resolution": 512,
                "steps": 10,
                "global_batch_size": 2048,
                "micro_batch_size": 32,
                "learning_rate": 1e-4,
            }
        ],
        "parallel": {"strategy": "ddp"},
        "compute": {"nodes": 8, "gpus_per_node": 8, "gpu": "a100-80gb"},
        "run_directory": "./runs",
    }
    return Recipe.model_validate(data | sections)


SD2_PARAMETERS = 865_910_724
SD2_STEP_S = 2048 / 2340  # MosaicML's 2340 images/s at 512 px on 64 A100


def test_fabric_figure_of_published_sd2() -> None:
    run = recipe()
    figure = expected_fabric(run, run.stages[0], parameters=SD2_PARAMETERS, step_s=SD2_STEP_S)
    # 865.9 M x 4 B x 2 x 7/8 = 6.06 GB a step of 0.875 s; half of it with 16-bit gradients, about 3.5 GB/s.
    assert figure == pytest.approx(6.93, abs=0.01)


def test_fabric_figure_follows_strategy_precision_and_accumulation() -> None:
    def figure(**sections: Any) -> float:
        run = recipe(**sections)
        found = expected_fabric(run, run.stages[0], parameters=10**9, step_s=1.0)
        assert found is not None
        return found

    assert figure() == pytest.approx(7.0)
    assert figure(parallel={"strategy": "hsdp"}) == pytest.approx(7.0)
    assert figure(parallel={"strategy": "fsdp", "precision": "bf16"}) == pytest.approx(7 / 8 * (4 + 2 * 2))
    assert figure(parallel={"strategy": "fsdp", "precision": "fp32"}) == pytest.approx(7 / 8 * (4 + 2 * 4))
    more = recipe().stages[0].model_copy(update={"micro_batch_size": 8})
    run = recipe(parallel={"strategy": "fsdp", "precision": "bf16"})
    four_times = expected_fabric(run, more, parameters=10**9, step_s=1.0)
    assert four_times == pytest.approx(7 / 8 * (4 + 4 * 2 * 2))


def test_no_fabric_figure_on_one_node() -> None:
    run = recipe(compute={"nodes": 1, "gpus_per_node": 8, "gpu": "a100-80gb"})
    assert expected_fabric(run, run.stages[0], parameters=10**9, step_s=1.0) is None


A100 = Compute(nodes=2, gpus_per_node=8, gpu="a100-80gb")


@pytest.mark.parametrize(
    ("thresholds", "compute", "message"),
    [
        ({"gpu_utilization": {"min": 95}}, Compute(gpu="none", gpus_per_node=2), "compute.gpu is none"),
        ({"fabric_gigabytes_per_s": {"min": 4}}, Compute(gpu="a100-80gb"), "compute.nodes is 1"),
        ({"gpu_memory": {}}, A100, "neither min nor max"),
        ({"gpu_memory": {"min": "auto"}}, A100, "auto is known for"),
        ({"gpu_utilization": {"min": 760}}, A100, "0 to 100"),
        ({"gpu_memory": {"min": 80, "max": 70}}, A100, "above max"),
        ({"data_wait": {"max": -1}}, A100, "below zero"),
        ({"gpu_energy_kilojoules": {"min": 1000, "for": "1 min"}}, A100, "at least 313 s"),
    ],
)
def test_thresholds_that_can_never_work_are_named(
    thresholds: dict[str, Any], compute: Compute, message: str
) -> None:
    ((path, said),) = unmeasurable(monitor(**thresholds), compute)
    assert path == f"monitor.{next(iter(thresholds))}"
    assert message in said


def test_the_published_thresholds_can_be_watched_on_two_a100_nodes() -> None:
    assert (
        unmeasurable(
            monitor(
                gpu_utilization={"min": 95, "for": "10 min"},
                gpu_memory={"min": 70},
                gpu_energy_kilojoules={"min": 1000, "for": "10 min"},
                fabric_gigabytes_per_s={"min": "auto"},
                data_wait={"max": 2},
            ),
            A100,
        )
        == []
    )
