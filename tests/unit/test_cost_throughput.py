"""The estimator of training's speed: what it claims, what it was fitted on, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from math import exp

import pytest

from isthmus.core.models.presets import PRESETS
from isthmus.core.models.profiles import stored
from isthmus.cost import fit, fit_report
from isthmus.cost.gpus import GPUS
from isthmus.cost.resolutions import figure_at
from isthmus.cost.rows import Row, preset_profile, published
from isthmus.cost.speed import communication
from isthmus.cost.throughput import Throughput, estimate_throughput
from isthmus.errors import UsageError

ROWS = published()


def estimate(**over: object) -> Throughput:
    plan: dict[str, object] = {
        "model": "sd2-base",
        "gpu": "h100-80gb",
        "gpus": 8,
        "gpus_per_node": 8,
        "global_batch_size": 256,
        "resolution": 512,
    }
    return estimate_throughput(**{**plan, **over})  # type: ignore[arg-type]


def of_row(row: Row) -> Throughput:
    return estimate_throughput(
        model=row.model,
        gpu=row.gpu.name,
        gpus=row.gpus,
        gpus_per_node=min(row.gpus, 4 if row.gpu.name.startswith("gb") or row.gpu.name == "l40s-48gb" else 8),
        global_batch_size=row.batch,
        resolution=row.resolution,
    )


def test_the_stored_coefficients_are_what_the_script_makes() -> None:
    assert fit.same(json.loads(fit.FILE.read_text("utf-8")), fit.make()), "run python -m isthmus.cost.fit"


def test_an_estimate_is_the_fit_s() -> None:
    """The file's figures are rounded, and the launcher has no numpy in this path: the same numbers all the same."""
    found = fit.fit(ROWS)
    for row in ROWS:
        step, _ = found.step_seconds(row)
        assert of_row(row).step_s == pytest.approx(step, rel=2e-3), row


def test_the_claims_of_the_documentation_hold_on_rows_left_out() -> None:
    """docs/cost.md, from `python -m isthmus.cost.fit --report`."""
    row = fit_report.errors(ROWS, fit_report.physics(ROWS, id))
    submitter = fit_report.errors(ROWS, fit_report.physics(ROWS, lambda row: row.submitter))
    gpu = fit_report.errors(ROWS, fit_report.physics(ROWS, lambda row: row.gpu.chip))
    assert row.below < 0.02
    assert row.at_scale < 0.07
    assert submitter.below < 0.02
    assert submitter.at_scale < 0.09
    assert gpu.below < 0.10
    assert gpu.at_scale < 0.10
    median = fit_report.errors(ROWS, fit_report.median(ROWS, id))
    loglinear = fit_report.errors(ROWS, fit_report.loglinear(ROWS, id))
    assert row.at_scale < loglinear.at_scale / 2 < median.at_scale / 2
    # Of a GPU without rows the simpler methods say nothing at all.
    none = fit_report.errors(ROWS, fit_report.median(ROWS, lambda row: row.gpu.name))
    assert none.below != none.below


def test_flux_is_among_them() -> None:
    logs = fit.left_out(ROWS, id)
    errors = [abs(exp(-log) - 1) for row, log in zip(ROWS, logs, strict=True) if row.family == "flux"]
    assert len(errors) == 9
    assert sorted(errors)[4] < 0.05


def test_four_of_five_left_out_rows_lie_within_the_interval() -> None:
    for covers, half, score in fit_report.coverage(ROWS).values():
        assert 0.75 < covers < 0.95
        assert half < 0.2
        assert score < 0.6


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.submitter == "MosaicML"], ids=lambda row: f"{row.gpus}"
)
@pytest.mark.parametrize("gpu", ["a100-40gb", "a100-80gb"])
def test_mosaic_s_table_is_within_20_percent_to_64_gpus(row: Row, gpu: str) -> None:
    """In sample. The rows do not say which A100 it was."""
    found = estimate(
        gpu=gpu, gpus=row.gpus, global_batch_size=row.batch, resolution=row.resolution
    ).images_per_s
    if row.gpus <= 64:
        assert found == pytest.approx(row.images_per_s, rel=0.2)
    else:
        assert found == pytest.approx(row.images_per_s, rel=0.3)


def test_what_physics_demands() -> None:
    base = estimate()
    assert base.images_per_s == pytest.approx(256 / base.step_s)
    assert base.images_per_s_per_gpu == pytest.approx(base.images_per_s / 8)
    assert base.interval80[0] < base.images_per_s < base.interval80[1]
    assert 0.2 < base.mfu < 0.5
    assert estimate(gpus=64, global_batch_size=2048).images_per_s_per_gpu < base.images_per_s_per_gpu
    assert estimate(gpus=64, global_batch_size=256).images_per_s_per_gpu < 0.8 * base.images_per_s_per_gpu
    assert estimate(resolution=256).images_per_s > 3 * base.images_per_s
    assert estimate(activation_checkpointing=True).images_per_s < 0.8 * base.images_per_s
    assert estimate(precision="fp32").images_per_s < 0.75 * base.images_per_s
    assert estimate(precision="fp16") == base
    assert estimate(gpu="b200-180gb").images_per_s > 1.5 * base.images_per_s
    # One GPU talks to nobody.
    alone = estimate(gpus=1, global_batch_size=32)
    assert alone.images_per_s_per_gpu >= base.images_per_s_per_gpu


def test_the_fabric_counts_where_there_is_one() -> None:
    plan = {"gpu": "a100-80gb", "gpus": 128, "global_batch_size": 2048, "resolution": 256}
    fast, slow = estimate(**plan, fabric="infiniband"), estimate(**plan, fabric="efa")
    assert slow.images_per_s < fast.images_per_s
    assert estimate(**plan, fabric="ethernet").images_per_s < slow.images_per_s
    assert estimate(**plan) == fast
    wide = {**plan, "model": "flux-12b"}
    by_strategy = {name: estimate(**wide, strategy=name) for name in ("ddp", "fsdp", "hsdp")}
    assert (
        by_strategy["fsdp"].images_per_s < by_strategy["hsdp"].images_per_s < by_strategy["ddp"].images_per_s
    )


def test_collectives_move_what_they_must() -> None:
    gpu = GPUS["h100-80gb"]
    plan = {"parameters": 10**9, "gpus": 16, "gpus_per_node": 8, "network": 50e9}
    # An all-reduce of 2 GB: twice 7/8 over NVLink, and twice an eighth of it, half of which leaves the node.
    expected = 4e9 * 7 / 8 / (450e9 * 0.7) + 4e9 / 8 * 0.5 / (50e9 * 0.7)
    assert communication(gpu, strategy="ddp", **plan) == pytest.approx(expected)  # type: ignore[arg-type]
    assert communication(gpu, strategy="ddp", **{**plan, "gpus": 1}) == 0  # type: ignore[arg-type]


def test_b200s_by_four_are_gb200s() -> None:
    four = estimate(gpu="b200-180gb", gpus=16, gpus_per_node=4)
    assert four == estimate(gpu="gb200-186gb", gpus=16, gpus_per_node=4)
    assert "gb200" in four.basis


def test_less_knowledge_widens_the_interval() -> None:
    def width(**over: object) -> float:
        low, high = estimate(**over).interval80
        return high / low

    known = width(gpu="h200-141gb")
    assert known < width(gpu="h200-141gb", model="flux-12b", resolution=256)
    assert known < width(gpu="a10g-24gb") < width(gpu="a10g-24gb", model="sd3-medium")
    assert known < width(gpu="h200-141gb", gpus=512, global_batch_size=1024)


def test_the_basis_says_what_it_rests_on() -> None:
    assert "12 published rows of a unet on h200-141gb" in estimate(gpu="h200-141gb").basis
    assert "no published row of a10g-24gb" in estimate(gpu="a10g-24gb").basis
    assert "no published row of any mmdit" in estimate(model="sd3-medium").basis
    assert (
        "5 nodes, the last one partly used (36 of 40 GPUs)" in estimate(gpus=36, global_batch_size=72).basis
    )


@pytest.mark.parametrize(
    "name", [name for name, found in stored()["profiles"].items() if len(found["train_flops"]) > 3]
)
def test_figures_between_stored_resolutions_are_exact(name: str) -> None:
    """Convolutions and projections grow with the area, attention with its square: three points give the curve."""
    known = preset_profile(name)
    for figure in (known.train_flops, known.activation_bytes):
        for resolution, expected in figure.items():
            others = {pixels: value for pixels, value in figure.items() if pixels != resolution}
            assert figure_at(known, others, resolution) == pytest.approx(expected, rel=1e-4)


def test_both_of_the_command_s_models_have_profiles() -> None:
    for name in ("sd2-base", "sdxl", "sd3-medium", "pixart-512", "flux-12b"):
        assert name in PRESETS
        assert estimate(model=name).images_per_s > 0
    # FLUX.1-schnell with captions of 256 tokens: 11.9 B parameters, 20.7 TFLOP for an image of 256 px.
    flux = preset_profile("flux-12b")
    assert flux.parameters == pytest.approx(11.89e9, rel=0.01)
    assert flux.text_tokens == 256
    tokens = 256 + 256
    assert flux.train_flops[256] == pytest.approx(6 * flux.parameters * tokens, rel=0.45)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"model": "imagen"}, "no estimate for model `imagen`"),
        ({"gpu": "a100"}, "no estimate for GPU `a100`"),
        ({"gpus": 0}, "gpus must be at least 1, not 0"),
        ({"gpus": -8}, "gpus must be at least 1"),
        ({"gpus_per_node": 0}, "gpus per node must be at least 1"),
        ({"global_batch_size": 0}, "global batch size must be at least 1"),
        ({"global_batch_size": 100}, "100 images is no multiple of 8 GPUs"),
        ({"resolution": 500}, "resolution 500 is no multiple of 64"),
        ({"resolution": 0}, "resolution 0"),
        ({"model": "quickstart", "resolution": 64}, "known at 32 px only"),
        ({"precision": "fp8"}, "no estimate for precision `fp8`"),
        ({"strategy": "zero3"}, "no estimate for strategy `zero3`"),
        ({"fabric": "token-ring"}, "h100-80gb on token-ring is not known"),
    ],
)
def test_bad_input_is_one_line(over: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        estimate(**over)
    assert "\n" not in str(caught.value)


def test_a_model_without_figures_is_refused() -> None:
    from isthmus.core.recipe.schema import Model

    other = Model.model_validate({"family": "unet", "preset": "sdxl", "config": {"layers_per_block": 3}})
    with pytest.raises(UsageError, match="no estimate for this unet model"):
        estimate(model=other)
    with pytest.raises(UsageError, match="no estimate for this my-own model"):
        estimate(model=Model.model_validate({"family": "my-own", "config": {"width": 3}}))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "isthmus", "cost", "throughput", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_prints_json_and_refuses_in_one_line() -> None:
    plan = "--model flux-12b --gpu b200-180gb --gpus 16 --gpus-per-node 8 --global-batch-size 512 --resolution 256"
    done = run(*plan.split(), "--json")
    printed = json.loads(done.stdout)
    assert set(printed) == {"images_per_s", "images_per_s_per_gpu", "interval80", "mfu", "step_s", "basis"}
    assert printed["images_per_s"] == pytest.approx(780, rel=0.1)
    assert printed["interval80"][0] < printed["images_per_s"] < printed["interval80"][1]
    refused = run(*plan.replace("flux-12b", "flux-13b").split())
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0] == "error: no estimate for model `flux-13b`"
    assert "Traceback" not in refused.stderr


def test_an_estimate_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from isthmus.cost.throughput import estimate_throughput as e;"
        "e(model='sdxl', gpu='h100-80gb', gpus=8, gpus_per_node=8, global_batch_size=256, resolution=1024);"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_documentation_quotes_the_report() -> None:
    """Digit by digit would depend on the machine's arithmetic: each figure to 0.3 points."""
    from pathlib import Path
    from re import findall

    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text("utf-8")
    for line in fit_report.report().splitlines():
        if not line.startswith("| ") or "%" not in line or "interval" in line:
            continue
        name = line[: line.index(" %")].rsplit("|", 1)[0]
        (quoted,) = [other for other in page.splitlines() if other.startswith(name)]
        for figure, other in zip(findall(r"[\d.]+ %", line), findall(r"[\d.]+ %", quoted), strict=True):
            assert float(other[:-2]) == pytest.approx(float(figure[:-2]), abs=0.3), line


def test_another_family_s_published_speed_is_of_that_order() -> None:
    """Stability's SD3 2B, whose resolution is not told; taken for 512 px. No row of an MMDiT was fitted."""
    for gpu, gpus, batch, published_rate in (
        ("h100-80gb", 16, 256, 595),
        ("a100-80gb", 16, 256, 381),
        ("a100-80gb", 256, 4096, 3992),
    ):
        found = estimate(model="sd3-medium", gpu=gpu, gpus=gpus, global_batch_size=batch)
        assert 0.6 < found.images_per_s / published_rate < 1.7
