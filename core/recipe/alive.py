"""Sections of the recipe about staying alive: watchdog, loss spikes, trackers."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from isthmus.core.recipe.stages import Positive, Section
from isthmus.core.recipe.units import Duration, Size

MARGIN_S = 60.0
"""What the watchdog waits beyond `data.wait_limit`, so that the loader, which knows more, speaks first."""


class Watchdog(Section):
    """What notices that training hangs, drags or is about to run out of disk."""

    limit: Literal["auto"] | Duration = "auto"
    """How long a rank may be without progress before all end with a report of who is where; auto: data.wait_limit and a minute, at least 10 min. Starting and validation may take three times that, a checkpoint six times."""
    collective_timeout: Literal["auto"] | Duration = "auto"
    """Of the process groups, the last resort when a watchdog is dead too; auto: six times `limit`, and 5 min."""
    nonfinite_steps: Positive = 100
    """Steps in a row without a finite loss and gradient norm, after which training has failed."""
    straggler_factor: Annotated[float, Field(gt=1)] = 1.5
    """A rank that needs this many times the median of all ranks is named in an alarm."""
    straggler_for: Duration = 120.0
    """How long it must be that slow."""
    disk_free: Literal["auto"] | Size = "auto"
    """Free bytes below which a node's disk raises an alarm; auto: 2 GB, or what two checkpoints need."""

    def limit_s(self, wait_limit: float) -> float:
        """`limit` in seconds, given `data.wait_limit`."""
        return max(600.0, wait_limit + MARGIN_S) if self.limit == "auto" else self.limit

    def collective_timeout_s(self, wait_limit: float) -> float:
        """`collective_timeout` in seconds, given `data.wait_limit`."""
        if self.collective_timeout == "auto":
            return 6 * self.limit_s(wait_limit) + 300.0
        return self.collective_timeout


class LossSpike(Section):
    """What to do when the loss leaves its range and stays outside. Rewinding follows PaLM (Chowdhery et al. 2022, 5.1)."""

    action: Literal["alarm", "rewind"] = "alarm"
    """alarm: an event; rewind: also back to a checkpoint from before the spike, and on without its samples."""
    z_score: Annotated[float, Field(gt=0)] = 8.0
    """Above the median of the window by this many robust standard deviations (1.4826 x median absolute deviation)."""
    window: Annotated[int, Field(ge=8, le=10_000)] = 200
    """Steps before, over which median and deviation are taken; nothing is judged until there are half as many."""
    lasts: Positive = 3
    """Steps in a row that make a spike."""
    skip: Positive = 100
    """rewind: steps whose samples are left out, counted back from the spike's last; the checkpoint is from before them."""
    max_rewinds: Positive = 3
    """rewind: how often in a run; after that a spike is only told."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Tracker(Section):
    """Somewhere else to show a run's figures; rank 0 sends them, credentials come from the environment."""

    name: Literal["tensorboard", "mlflow", "wandb"]
    """tensorboard: event files in the run directory; mlflow: by MLflow's own variables, such as Azure ML sets; wandb: Weights & Biases."""
    project: str | None = None
    """MLflow's experiment or the project of Weights & Biases; null: the recipe's name."""
    every: Positive = 1
    """Steps between two points of a curve."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Further arguments of Accelerate's tracker: of `wandb.init`, of MLflow's `start_run`, of TensorBoard's writer."""


NamedTracker = Annotated[Tracker, BeforeValidator(_named)]
"""A tracker, or only its name."""
