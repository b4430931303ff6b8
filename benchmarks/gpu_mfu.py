"""MFU of real models on a GPU, and a profile of what is lost: SDXL's UNet and SD3-medium at 512 px, bf16, compiled.

    python benchmarks/gpu_mfu.py [--model sd3-medium] [--strategy fsdp] [--batch 32] [--steps 50] [--json]
    python -m torch.distributed.run --standalone --nproc-per-node=8 benchmarks/gpu_mfu.py ...
    python benchmarks/gpu_mfu.py --dry-run          # tiny shapes on a CPU: exercises the code, measures nothing

Random latents and text are written as shards, read by our loader and trained on by the trainer's own loop: what is
measured is what a run does, data, metrics and moving average included. MFU is as `core/train/throughput.py` defines it,
the median over the steps. The profile is of three further steps: the device's time by kind of kernel, and the share of the
time in which no kernel ran. The claim on an H200: at least 40 % for SD3-medium at 512 px.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = {"sdxl": "unet", "sd3-medium": "mmdit"}
"""Preset -> family."""

KINDS = {
    "exchange": ("nccl", "gloo"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "convolution": ("conv", "cudnn", "implicit", "xmma_fprop", "dgrad", "wgrad"),
    "matrix products": ("gemm", "cutlass", "cublas", "matmul", "addmm", "nvjet", "aten::mm", "aten::bmm"),
    "optimizer and average": ("multi_tensor", "foreach", "adam", "lerp"),
    "copies": ("memcpy", "memset", "copy"),
}
"""Words in a kernel's name that tell its kind, in the order they are asked; the rest is `other`."""

PEAKS = {
    "H200": "h200-141gb",
    "H100": "h100-80gb",
    "B200": "b200-180gb",
    "A100": "a100-80gb",
    "L40S": "l40s-48gb",
    "A10G": "a10g-24gb",
}
"""Word in a device's name -> the recipe's word for it, which has the peak."""


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def gpu_of(device: str) -> str | None:
    """The recipe's word for a device."""
    return next((word for part, word in PEAKS.items() if part in device), None)


def busy(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def make_case(model: str, resolution: int, batch: int, *, tiny: bool) -> Any:
    """What `training_cases` builds datasets and recipes from."""
    from training_cases import CASES, FACTOR, Case

    if tiny:
        return CASES["unet"]
    text: tuple[tuple[str, str, int, int, int | None], ...]
    if model == "sdxl":
        text = (("clip_l", "clip", 77, 768, None), ("clip_g", "clip", 77, 1280, 1280))
    else:
        text = (("clip_l", "clip", 77, 768, 768), ("clip_g", "clip", 77, 1280, 1280), ("t5", "t5", 77, 4096, None))  # fmt: skip
    channels = 4 if model == "sdxl" else 16
    return Case(
        name=model, family=MODELS[model], class_name="", config={}, text=text,
        channels=channels, side=resolution // FACTOR, batch=batch,
    )  # fmt: skip


def train(options: argparse.Namespace, folder: str, gpu: str, ranks: int) -> dict[str, Any]:
    """Train, and say how fast and where the device's time went; every rank must take part."""
    from torch.profiler import ProfilerActivity, profile
    from training_cases import make_loop, recipe_of

    case = make_case(options.model, options.resolution, options.batch, tiny=options.dry_run)
    changes: dict[str, Any] = {
        "parallel": {
            "strategy": options.strategy,
            "precision": "bf16",
            "compile": False if options.dry_run else options.compile,
            "activation_checkpointing": options.recompute,
        },
        "compute": {"gpu": gpu, "gpus_per_node": ranks},
    }
    if not options.dry_run:
        changes["model"] = {"family": case.family, "preset": options.model}
    loop, loader = make_loop(recipe_of(case, folder, ranks, **changes), folder, cpu=options.dry_run)
    written: list[dict[str, Any]] = []
    if loop._rows is not None:
        keep = loop._rows.write
        loop._rows.write = lambda row: (written.append(row), keep(row))
    try:
        for _ in range(options.warm_up + options.steps):
            loop.advance(loader)
        kinds = [ProfilerActivity.CPU] if options.dry_run else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=kinds) as recorded:
            for _ in range(3):
                loop.advance(loader)
    finally:
        loader.close()
        loop.close()
    steps = written[options.warm_up : options.warm_up + options.steps]

    def median(field: str) -> float | None:
        found = [row[field] for row in steps if row[field] is not None]
        return statistics.median(found) if found else None

    fields = (
        "mfu",
        "samples_per_s",
        "samples_per_s_per_gpu",
        "step_s",
        "data_wait_s",
        "exposed_communication_s",
    )
    facts = {field: median(field) for field in fields}
    return {**facts, "ranks": ranks, "gpu": gpu, "lost": lost(recorded, cpu=options.dry_run)}


def lost(recorded: Any, *, cpu: bool) -> dict[str, float]:
    """Share of the profiled time by kind of kernel, and of the time in which the device did nothing."""
    from torch.autograd import DeviceType

    wanted = DeviceType.CPU if cpu else DeviceType.CUDA
    events = [event for event in recorded.events() if event.device_type == wanted]
    if not events:
        return {}
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    length = max(end for _, end in spans) - min(start for start, _ in spans)
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for event, span in zip(events, spans, strict=True):
        by_kind.setdefault(kind_of(event.name), []).append(span)
    shares = {kind: round(busy(found) / length, 4) for kind, found in by_kind.items()}
    shares["idle"] = round(1 - busy(spans) / length, 4)
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def main() -> int:
    """Print the figures; 2 without a GPU."""
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="sd3-medium")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="fsdp")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="samples of a GPU in a step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=10, help="steps before, compiling among them")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU; measures nothing")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()

    import torch

    gpu = "none" if options.dry_run else None
    if gpu is None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        gpu = gpu_of(name)
        if gpu is None:
            known = ", ".join(PEAKS)
            print(f"error: needs a GPU whose peak is known ({known}), here is {name}; --dry-run runs anywhere", file=sys.stderr)  # fmt: skip
            return 2
    from training_cases import make_dataset

    from isthmus.core.train.agreement import agree, barrier
    from isthmus.core.train.parallel import join_processes

    rank, ranks = join_processes(cpu=options.dry_run)
    with tempfile.TemporaryDirectory() as own:
        folder = agree(own)  # one node: rank 0's
        if rank == 0:
            case = make_case(options.model, options.resolution, options.batch, tiny=options.dry_run)
            make_dataset(case, f"{folder}/data", samples=4 * case.batch * ranks)
        barrier()
        found = train(options, folder, gpu, ranks)
        barrier()
    if rank == 0:
        show(options, found)
    return 0


def show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print what was found."""
    if options.json:
        print(json.dumps({"model": options.model, "dry_run": options.dry_run, **found}))
        return
    mfu = "no MFU on a CPU" if found["mfu"] is None else f"MFU {100 * found['mfu']:.1f} %"
    print(
        f"{options.model} at {options.resolution} px, {options.strategy} on {found['ranks']}: {mfu}, "
        f"{found['samples_per_s_per_gpu']:.4g} images/s a GPU, step {1e3 * found['step_s']:.1f} ms"
    )
    for kind, share in found["lost"].items():
        print(f"  {100 * share:5.1f} %  {kind}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
