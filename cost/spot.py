"""Interruptions: how long a run takes with them, how often to checkpoint, and when spot stops being cheaper.

Each node is taken away (or breaks) after an exponentially distributed time, independent of the others; a run of n nodes
stands still when one goes, so it is interrupted n times as often. An interruption costs the work since the last checkpoint
and the restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_FAR = 700.0
"""exp() of more than this overflows: the run never ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """What interrupts a run, and what each time costs; all in hours."""

    per_node_hour: float
    """Interruptions of one node in an hour; 0 for none."""
    nodes: int
    checkpoint_h: float
    """How long training stands still for a checkpoint."""
    interval_h: float
    """Training between checkpoints."""
    restart_h: float
    """From an interruption until training goes on where the checkpoint was."""

    def __post_init__(self) -> None:
        for name in ("per_node_hour", "checkpoint_h", "restart_h"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name):g}")
        if not self.interval_h > 0 or self.nodes < 1:
            raise ValueError("the interval must be above zero, and there must be a node")

    @property
    def mean_h(self) -> float:
        """Hours between interruptions of the run; infinite without any."""
        rate = self.per_node_hour * self.nodes
        return 1 / rate if rate > 0 else math.inf


def expected_hours(work_h: float, by: Interruptions) -> float:
    """Hours that `work_h` hours of training are expected to take, checkpoints and restarts included.

    Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, section 3):
    T = M exp(R / M) (exp((tau + delta) / M) - 1) W / tau, where restarts may be interrupted, too. Without interruptions it
    is the limit W (tau + delta) / tau. To first order in 1 / M it is work + interruptions x (restart + half an interval).
    Infinite where the work between two interruptions is never enough.
    """
    if work_h < 0:
        raise ValueError(f"work must not be negative, got {work_h:g}")
    mean, interval = by.mean_h, min(by.interval_h, work_h) if work_h else by.interval_h
    cycle = interval + by.checkpoint_h
    pieces = work_h / interval
    if math.isinf(mean) or cycle / mean < 1e-12:
        return pieces * cycle
    if (by.restart_h + cycle) / mean > _FAR:
        return math.inf
    return mean * math.exp(by.restart_h / mean) * math.expm1(cycle / mean) * pieces


def expected_interruptions(work_h: float, by: Interruptions) -> float:
    """How many interruptions a run of that much work is expected to meet: its hours over the mean between them."""
    return 0.0 if math.isinf(by.mean_h) else expected_hours(work_h, by) / by.mean_h


def young_interval(checkpoint_h: float, mean_h: float) -> float:
    """Hours of training between checkpoints that lose least: sqrt(2 delta M) (Young 1974, CACM 17(9), page 530)."""
    return math.sqrt(2 * checkpoint_h * mean_h)


def daly_interval(checkpoint_h: float, mean_h: float) -> float:
    """The same to a higher order (Daly 2006, equation 37); infinite without interruptions.

    tau = sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta for delta < 2M, and M beyond.
    """
    if math.isinf(mean_h):
        return math.inf
    if checkpoint_h >= 2 * mean_h:
        return mean_h
    ratio = checkpoint_h / (2 * mean_h)
    return young_interval(checkpoint_h, mean_h) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_h


def break_even_rate(
    work_h: float, *, spot_usd_h: float, other_usd_h: float, other_hours: float, by: Interruptions
) -> float | None:
    """Interruptions of a node in an hour at which spot costs as much as the other price; above it spot costs more.

    By bisection: :func:`expected_hours` grows with the rate.

    Args:
        work_h: hours of training.
        spot_usd_h, other_usd_h: of all nodes.
        other_hours: that the run takes at the other price, its own interruptions included.
        by: all but the rate, which is looked for.

    Returns:
        None when spot costs more even without an interruption.
    """
    budget = other_usd_h * other_hours

    def usd(rate: float) -> float:
        changed = Interruptions(
            per_node_hour=rate,
            nodes=by.nodes,
            checkpoint_h=by.checkpoint_h,
            interval_h=by.interval_h,
            restart_h=by.restart_h,
        )
        return spot_usd_h * expected_hours(work_h, changed)

    if usd(0.0) >= budget:
        return None
    low, high = 0.0, 1e-4
    while usd(high) < budget:
        low, high = high, high * 2
        if high > 1e6:
            return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if usd(middle) < budget else (low, middle)
    return (low + high) / 2
