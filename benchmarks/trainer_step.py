"""Isthmus's training step against a bare PyTorch loop: same model, precision, objective, optimizer, EMA and samples.

    python benchmarks/trainer_step.py [--json] [--rounds N] [--case NAME] [--processes N]

A PixArt of 8 blocks and a small UNet built as SDXL's, on one process and on two (gloo), one thread each. Steps are paired
and interleaved in the same processes, in alternating order, so that what else the machine does falls on both. The bare
loop draws noise with one generator, noises, runs the model (DDP on two processes), clips, steps AdamW, averages with one
foreach call, and reads the loss once a step, as any loop that logs does; its batches lie in memory. Ours is the
trainer's own loop: batches from shards on disk through its loader, draws by counter for each sample, the stage's
schedule, agreement of the ranks, the non-finite guard, the metrics row and the progress line.

The claim, for each of the four: the median of the ratios is at most 1.02, the upper end of its 95 % interval 1.04.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

MEDIAN, UPPER = 1.02, 1.04


def measure(case_name: str, folder: str, rounds: int, warm_up: int = 5) -> dict[str, Any]:
    """Step times of both on this rank, and the interval of their ratios; every rank must take part."""
    import torch
    import torch.distributed as dist
    from training_cases import CASES, bare_loop, interval, make_loop, recipe_of

    torch.set_num_threads(1)
    case, ranks = CASES[case_name], int(os.environ.get("WORLD_SIZE", "1"))
    loop, loader = make_loop(recipe_of(case, folder, ranks), folder)
    bare = bare_loop(case, [copy.deepcopy(next(loader)) for _ in range(8)])
    sides: dict[str, Callable[[int], Any]] = {"bare": bare, "isthmus": lambda _: loop.advance(loader)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(warm_up + rounds):
        # The order alternates, so that neither side always runs on the other's caches.
        for name in sorted(sides, reverse=index % 2 == 1):
            if ranks > 1:
                dist.barrier()
            started = time.perf_counter()
            sides[name](index)
            if index >= warm_up:
                times[name].append(time.perf_counter() - started)
    loader.close()
    loop.close()
    ratios = [ours / theirs for ours, theirs in zip(times["isthmus"], times["bare"], strict=True)]
    median, low, high = interval(ratios)
    return {
        "case": case_name,
        "processes": ranks,
        "bare_ms": round(statistics.median(times["bare"]) * 1e3, 2),
        "isthmus_ms": round(statistics.median(times["isthmus"]) * 1e3, 2),
        "ratio": round(median, 4),
        "interval": [round(low, 4), round(high, 4)],
        "rounds": rounds,
        "holds": median <= MEDIAN and high <= UPPER,
        "torch": torch.__version__,
    }


def launch(case_name: str, processes: int, rounds: int) -> dict[str, Any]:
    """Measure in processes of their own."""
    from training_cases import CASES, make_dataset

    with tempfile.TemporaryDirectory() as folder:
        make_dataset(CASES[case_name], f"{folder}/data")
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        worker = ["--worker", folder, "--case", case_name, "--rounds", str(rounds)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*start, __file__, *worker], env=environment, capture_output=True, text=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"error: {case_name} on {processes} processes failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> int:
    """Print the results; 1 when the claim does not hold."""
    sys.path.insert(0, str(Path(__file__).parent))
    from training_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps")
    parser.add_argument("--case", choices=sorted(CASES), help="only this model")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="only this many processes")
    parser.add_argument("--worker", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        found = measure(options.case, options.worker, options.rounds)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        return 0
    results = []
    for name in [options.case] if options.case else CASES:
        for processes in [options.processes] if options.processes else (1, 2):
            found = launch(name, processes, options.rounds)
            results.append(found)
            if not options.json:
                low, high = found["interval"]
                print(
                    f"trainer step, {name} on {processes}: {found['isthmus_ms']} ms, bare loop {found['bare_ms']} ms, "
                    f"ratio {found['ratio']} (95 % {low} to {high}) over {found['rounds']} pairs; claimed: at most "
                    f"{MEDIAN}, upper end {UPPER}: {'holds' if found['holds'] else 'DOES NOT HOLD'}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"limits": [MEDIAN, UPPER], "results": results}))
    return 0 if all(found["holds"] for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
