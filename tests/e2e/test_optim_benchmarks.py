"""The trainer's benchmarks run: what they measure is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_mfu_without_a_gpu_is_refused_in_one_line() -> None:
    done = benchmark("gpu_mfu.py")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: needs a GPU whose peak is known (H200")


@pytest.mark.long
def test_mfu_runs_dry_on_a_cpu() -> None:
    """Slow: a training run and a profile of it."""
    done = benchmark("gpu_mfu.py", "--dry-run", "--steps", "2", "--warm-up", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mfu"] is None
    assert found["samples_per_s"] > 0
    assert {"convolution", "matrix products", "idle"} <= set(found["lost"])


@pytest.mark.long
def test_a_step_and_the_average_are_measured() -> None:
    """Slow: models of tens of milliseconds a step, twice."""
    done = benchmark("trainer_step.py", "--json", "--rounds", "2", "--case", "unet", "--processes", "1")
    (found,) = json.loads(done.stdout)["results"]
    assert found["isthmus_ms"] > 0
    done = benchmark("ema_cost.py", "--json", "--rounds", "2", "--case", "unet")
    (found,) = json.loads(done.stdout)["results"]
    assert found["ratio"] > 0


def test_kernels_have_kinds_and_overlaps_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu_mfu

    assert gpu_mfu.kind_of("ncclDevKernel_ReduceScatter_Sum_f32") == "exchange"
    assert gpu_mfu.kind_of("void cutlass::Kernel2<cutlass_80_tensorop_bf16_gemm>") == "matrix products"
    assert gpu_mfu.kind_of("flash_fwd_kernel") == "attention"
    assert gpu_mfu.kind_of("triton_poi_fused_gelu_3") == "other"
    assert gpu_mfu.gpu_of("NVIDIA H200") == "h200-141gb"
    assert gpu_mfu.gpu_of("NVIDIA T4") is None
    assert gpu_mfu.busy([(0, 2), (1, 3), (5, 6)]) == 4
