"""Fits the estimator to published rows: ``python -m isthmus.cost.fit`` writes ``cost/data/efficiency.json``.

    python -m isthmus.cost.fit --check     # exit 1 if the file is not what this makes
    python -m isthmus.cost.fit --report    # errors on rows that were left out, beside simpler methods

One efficiency, a factor for each model family and each chip, the overlap and the latency of `cost/speed.py`: twelve
numbers from fifty rows, so all but the efficiency are drawn to a prior (partial pooling). Rows weigh less at scale,
where the same hardware differs more from submitter to submitter, and far ones count linearly (Huber).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.cost.rows import Row, published
from isthmus.cost.speed import Work, step_seconds

FILE = Path(__file__).with_name("data") / "efficiency.json"

# Prior mean and standard deviation: of logarithms, but for the overlap.
EFFICIENCY = (float(np.log(0.6)), 1.0)
OVERLAP = (1.3, 0.15)
LATENCY = (float(np.log(1.5e-3)), 0.5)
FAMILY = (0.0, 0.3)
CHIP = (0.0, 0.15)
NOISE, NOISE_AT_SCALE = 0.03, 0.10
HUBER = 2.0
"""Residuals beyond this many standard deviations count linearly."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a fit found. A family or chip without rows has no entry: its factor is 1."""

    efficiency: float
    overlap: float
    latency: float
    families: dict[str, float]
    chips: dict[str, float]

    def step_seconds(self, row: Row) -> tuple[float, float]:
        """Seconds of a row's step, and those in which the GPU computes."""
        total, compute = step_seconds(
            row.work,
            efficiency=self.efficiency * self.families.get(row.family, 1.0),
            speed=self.chips.get(row.gpu.chip, 1.0),
            overlap=self.overlap,
            latency=self.latency,
        )
        return float(total), float(compute)


class _Problem:
    """The rows as arrays, and the layout of the parameters: efficiency, overlap, latency, families, chips."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.families = sorted({row.family for row in rows})
        self.chips = sorted({row.gpu.chip for row in rows})
        self.family = np.array([self.families.index(row.family) for row in rows])
        self.chip = np.array([self.chips.index(row.gpu.chip) for row in rows])
        fields = Work.__dataclass_fields__
        self.work = Work(**{name: np.array([getattr(row.work, name) for row in rows]) for name in fields})
        self.observed = np.log([row.step_s for row in rows])
        self.noise = np.array([NOISE_AT_SCALE if row.at_scale else NOISE for row in rows])
        priors = [EFFICIENCY, OVERLAP, LATENCY]
        priors += [FAMILY] * len(self.families) + [CHIP] * len(self.chips)
        self.mean, self.spread = (np.array(column) for column in zip(*priors, strict=True))

    def residuals(self, at: Array) -> Array:
        """Of each row, in standard deviations."""
        factors = at[3 : 3 + len(self.families)]
        step, _ = step_seconds(
            self.work,
            efficiency=np.exp(at[0] + factors[self.family]),
            speed=np.exp(at[3 + len(self.families) :][self.chip]),
            overlap=max(1.0, at[1]),
            latency=np.exp(at[2]),
        )
        found: Array = (np.log(step) - self.observed) / self.noise
        return found

    def penalised(self, at: Array, weights: Array) -> Array:
        """Residuals with the distance from the priors behind them."""
        return np.concatenate([self.residuals(at) * np.sqrt(weights), (at - self.mean) / self.spread])


def fit(rows: Sequence[Row]) -> Coefficients:
    """The coefficients that explain the rows best: Levenberg-Marquardt within reweighting. Deterministic."""
    problem = _Problem(rows)
    at, weights = problem.mean.copy(), np.ones(len(rows))
    for _ in range(30):
        at = _least_squares(lambda x, w=weights: problem.penalised(x, w), at)  # type: ignore[misc]
        far = np.abs(problem.residuals(at))
        before, weights = weights, np.minimum(1.0, HUBER / np.maximum(far, 1e-9))
        if np.abs(weights - before).max() < 1e-4:
            break
    families = len(problem.families)
    return Coefficients(
        efficiency=float(np.exp(at[0])),
        overlap=float(max(1.0, at[1])),
        latency=float(np.exp(at[2])),
        families=dict(zip(problem.families, np.exp(at[3 : 3 + families]).tolist(), strict=True)),
        chips=dict(zip(problem.chips, np.exp(at[3 + families :]).tolist(), strict=True)),
    )


def _least_squares(residuals: Callable[[Array], Array], at: Array) -> Array:
    damping, here = 1e-3, residuals(at)
    for _ in range(50):
        columns = [(residuals(at + step) - here) / 1e-6 for step in np.eye(len(at)) * 1e-6]
        jacobian = np.stack(columns, axis=1)
        while True:
            normal = jacobian.T @ jacobian + damping * np.eye(len(at))
            move = np.linalg.solve(normal, -jacobian.T @ here)
            there = residuals(at + move)
            if there @ there < here @ here:
                break
            damping *= 4
            if damping > 1e8:
                return at
        gained = here @ here - there @ there
        at, here, damping = at + move, there, damping / 5
        if gained < 1e-9:
            break
    return at


def left_out(rows: Sequence[Row], group: Callable[[Row], object]) -> list[float]:
    """Log of published over predicted images/s of every row, by a fit without the rows of its group."""
    errors = [0.0] * len(rows)
    for name in {group(row) for row in rows}:
        found = fit([row for row in rows if group(row) != name])
        for index, row in enumerate(rows):
            if group(row) == name:
                errors[index] = float(np.log(found.step_seconds(row)[0] / row.step_s))
    return errors


def make() -> dict[str, Any]:
    """The content of ``efficiency.json``."""
    from isthmus.cost.spread import spreads

    rows = published()
    found = fit(rows)
    return {
        "made_by": "python -m isthmus.cost.fit",
        "rows": len(rows),
        "efficiency": _round(found.efficiency),
        "overlap": _round(found.overlap),
        "latency_s": _round(found.latency),
        "families": {name: _round(value) for name, value in found.families.items()},
        "chips": {name: _round(value) for name, value in found.chips.items()},
        "rows_by_chip": {chip: sum(row.gpu.chip == chip for row in rows) for chip in found.chips},
        "pairs": dict(sorted(Counter(f"{row.gpu.chip} {row.family}" for row in rows).items())),
        "spread": {
            name: _round(value) if isinstance(value, float) else {k: _round(v) for k, v in value.items()}
            for name, value in spreads(rows, found).items()
        },
    }


def _round(value: float) -> float:
    # Solvers of different libraries differ in the last digits; what is stored must not.
    return float(f"{value:.4g}")


def same(stored: Any, made: Any) -> bool:
    """Whether two contents agree, numbers to one part in a thousand."""
    if isinstance(stored, dict) and isinstance(made, dict):
        return stored.keys() == made.keys() and all(same(stored[key], made[key]) for key in stored)
    if isinstance(stored, float) and isinstance(made, float):
        return abs(stored - made) <= 1e-3 * max(abs(stored), abs(made))
    return bool(stored == made)


def main(arguments: Sequence[str]) -> int:
    """Write, check or report; the exit code."""
    if "--report" in arguments:
        from isthmus.cost.fit_report import report

        print(report())
        return 0
    made = make()
    if "--check" in arguments:
        stored = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
        up_to_date = same(stored, made)
        print(f"{FILE.name} is up to date" if up_to_date else f"{FILE.name} is out of date")
        return 0 if up_to_date else 1
    FILE.write_text(json.dumps(made, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
