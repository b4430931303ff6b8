"""What the moving average costs a step: the trainer's own loop with and without its update, in turn.

    python benchmarks/ema_cost.py [--json] [--rounds N] [--case NAME]

Steps with and without the average are paired and alternate in one process, on the same weights and data. The claim:
the median of the extra time is at most 3 % of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

LIMIT = 1.03
NEVER = 10**9
"""`ema.update_every` of a step without an update."""


def measure(case_name: str, rounds: int, warm_up: int = 5) -> dict[str, Any]:
    """The ratio of a step with the average's update to one without."""
    import torch
    from training_cases import CASES, interval, make_dataset, make_loop, recipe_of

    from isthmus.core.recipe.stages import EMA

    torch.set_num_threads(1)
    case = CASES[case_name]
    settings = {True: EMA(decay=0.999), False: EMA(decay=0.999, update_every=NEVER)}
    times: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        make_dataset(case, f"{folder}/data")
        loop, loader = make_loop(recipe_of(case, folder, 1), folder)
        for index in range(warm_up + rounds):
            for averaged in (True, False) if index % 2 else (False, True):
                loop.ema_settings = settings[averaged]
                started = time.perf_counter()
                loop.advance(loader)
                if index >= warm_up:
                    times[averaged].append(time.perf_counter() - started)
        updates = loop.setup.ema.updates
        loader.close()
        loop.close()
    assert updates == warm_up + rounds, "every second step must have been averaged"
    ratios = [one / other for one, other in zip(times[True], times[False], strict=True)]
    median, low, high = interval(ratios)
    return {
        "case": case_name,
        "ratio": round(median, 4),
        "interval": [round(low, 4), round(high, 4)],
        "step_ms": round(1e3 * sorted(times[False])[rounds // 2], 2),
        "rounds": rounds,
        "holds": median <= LIMIT,
    }


def main() -> int:
    """Print the results; 1 when the claim does not hold."""
    sys.path.insert(0, str(Path(__file__).parent))
    from training_cases import CASES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps")
    parser.add_argument("--case", choices=sorted(CASES), help="only this model")
    options = parser.parse_args()
    results = []
    for name in [options.case] if options.case else CASES:
        found = measure(name, options.rounds)
        results.append(found)
        if not options.json:
            low, high = found["interval"]
            print(
                f"moving average, {name}: a step of {found['step_ms']} ms takes {found['ratio']}x "
                f"(95 % {low} to {high}) with it over {found['rounds']} pairs; claimed: at most {LIMIT}: "
                f"{'holds' if found['holds'] else 'DOES NOT HOLD'}",
                flush=True,
            )
    if options.json:
        print(json.dumps({"limit": LIMIT, "results": results}))
    return 0 if all(found["holds"] for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
