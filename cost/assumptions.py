"""What an estimate takes for granted beside prices and speed: start-up, interruptions, how fast bytes move.

Every figure can be said otherwise (`--assume name=value`); those without a source are ours, and an estimate lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from isthmus.errors import UsageError

ALLOCATION_S = {"azure": 600.0, "sagemaker": 300.0, "local": 0.0}
"""Seconds from submission until all nodes are there, when there is capacity; ours."""
BILLED_ALLOCATION = {"azure": True, "sagemaker": False, "local": False}
"""Azure bills a node from when it runs, also while the others still come; SageMaker from TrainingStartTime, before image and
data are fetched (AWS API reference, DescribeTrainingJob)."""
IDLE_S = {"azure": 600.0}
"""Azure ML's nodes stand idle after a job before they are taken down (`idle_time_before_scale_down`): 600 s on clusters that
isthmus creates (`backends.azure.cluster.idle`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The figures; the docstring of each says its source."""

    image_gb: float = 10.0
    """Compressed size of the training image."""
    pull_gb_per_s: float = 0.1
    """Of one node, from the registry, unpacking included."""
    allocation_s: float = -1.0
    """Until all nodes are there; below zero: by backend."""
    start_s: float = 60.0
    """Processes, process group, dataset's index, first batch."""
    compile_s: float = 120.0
    """torch.compile of the blocks, once a stage and start."""
    host_copy_gb_per_s: float = 10.0
    """Of one rank, when a checkpoint is copied to memory of the host."""
    store_gb_per_s: float = 1.0
    """Of one node, to and from the object store, for checkpoints."""
    stall_s: float = 0.5
    """Of every checkpoint, whatever its size: the step that is waited for, the agreement of the ranks."""
    stream_gb_per_s: float = 2.5
    """Of one node, range reads from the object store: `data.access: stream`."""
    mount_gb_per_s: float = 1.0
    """Of one node through FastFile or ro_mount: `data.access: mount`."""
    download_gb_per_s: float = 4.0
    """Of one node, from its own disk: `data.access: download`."""
    move_gb_per_s: float = 1.0
    """Of a copy from one cloud to the other."""
    spot_interruptions: float = 0.01
    """Of one spot node in an hour. Nobody publishes it for these machines; it moves by region, week and hour."""
    spot_interruptions_low: float = 0.002
    """For the lower end of the interval."""
    spot_interruptions_high: float = 0.05
    """For the upper end of the interval."""
    failures: float = 1.6e-4
    """Of any node in an hour: 419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3 Herd of Models, 2024,
    section 3.3.4), taken as nodes of 8."""
    idle_s: float = -1.0
    """Nodes after the end, before they are taken down; below zero: by backend."""
    kept_months: float = 1.0
    """For how long dataset and checkpoints are kept after the run."""

    def of(self, backend: str) -> Assumptions:
        """With what depends on the backend filled in."""
        return replace(
            self,
            allocation_s=ALLOCATION_S.get(backend, 300.0) if self.allocation_s < 0 else self.allocation_s,
            idle_s=IDLE_S.get(backend, 0.0) if self.idle_s < 0 else self.idle_s,
            # Nothing is pulled to the machine that one sits at, and nobody takes it away.
            **({"image_gb": 0.0, "failures": 0.0} if backend == "local" else {}),
        )

    def read_gb_per_s(self, access: str) -> float:
        """What the storage path of `data.access` gives one node."""
        return {"stream": self.stream_gb_per_s, "mount": self.mount_gb_per_s}.get(
            access, self.download_gb_per_s
        )

    def interruptions(self, tier: str) -> tuple[float, float, float]:
        """Of one node in an hour: low, expected, high."""
        if tier in ("spot", "low_priority"):
            ends = (self.spot_interruptions_low, self.spot_interruptions, self.spot_interruptions_high)
            low, expected, high = (rate + self.failures for rate in ends)
            return min(low, expected), expected, max(high, expected)
        return self.failures, self.failures, self.failures


def assumptions(overrides: Sequence[str] = ()) -> Assumptions:
    """The defaults with `name=value` over them; spot_interruptions=V alone sets all three rates, so that it is exact.

    Raises:
        UsageError: no such name, or no number at or above zero.
    """
    from difflib import get_close_matches

    known = [field.name for field in fields(Assumptions)]
    chosen: dict[str, float] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        where = f"--assume {name}"
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError("no such assumption", where=where, hint=hint)
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{text!r} is not a number", where=where) from None
        if not 0 <= value < 1e9 or (value == 0 and name.endswith("_per_s")):
            raise UsageError(f"{text} cannot be; it must not be negative", where=where)
        chosen[name] = value
    if "spot_interruptions" in chosen:
        rate = chosen["spot_interruptions"]
        chosen = {"spot_interruptions_low": rate, "spot_interruptions_high": rate, **chosen}
    return replace(Assumptions(), **_floats(chosen))


def _floats(chosen: Mapping[str, float]) -> dict[str, float]:
    return dict(chosen)
