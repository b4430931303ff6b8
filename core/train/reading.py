"""The metric stream's rows of how the data is read (kind `data`): all ranks' loaders, on rank 0."""

from __future__ import annotations

import time
from typing import Any

import torch

from isthmus.core.recipe.schema import Recipe
from isthmus.core.telemetry.reading import INTERVAL_S, ReadingMeter
from isthmus.core.train.alive import Alive
from isthmus.core.train.describing import make_describer
from isthmus.core.train.parallel import Engine
from isthmus.core.train.sources import Sources
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.describe import Describer
from isthmus.storage.stream.loader import Loader
from isthmus.storage.stream.plan import Plan


class ReadingLog:
    """Collects the loader's figures over the ranks and writes them.

    Args:
        loader: this rank's.
        plan: that it follows.
        step: steps that were done before.
        alive: whose parts of steps ride along.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        run: RunDirectory,
        sources: Sources,
        loader: Loader,
        plan: Plan,
        *,
        attempt: int,
        step: int,
        alive: Alive | None = None,
    ) -> None:
        self._step, self._alive = step, alive
        self._engine, self._attempt, self._sources = engine, attempt, sources
        watched, depth = recipe.monitor.data_wait, recipe.data.read_depth
        self._fixed_depth = depth if isinstance(depth, int) else None
        self._meter = ReadingMeter(
            loader.stats,
            rank=engine.rank,
            world_size=engine.world_size,
            history_s=watched.for_ if watched else 0.0,
            interval=INTERVAL_S if alive is None else alive.interval,
        )
        lead = engine.rank == 0
        if lead:
            for fit in loader.fits:
                print(fit, flush=True)
        self._writer = run.metrics("data", writer=f"attempt{attempt}") if lead else None
        self._describer: Describer | None = None
        if lead and len(sources.datasets) > 1:
            self._describer = make_describer(recipe, sources, plan)

    def due(self) -> bool:
        """Whether rank 0 wants a row."""
        return self._writer is not None and self._meter.due()

    def record(self, step: int) -> None:
        """Write how all ranks read since the last row, up to the `step` steps done; to be entered by all of them."""
        if step == self._step:
            return
        self._step = step
        figures = self._meter.take()
        parts = [] if self._alive is None else self._alive.take_parts()
        mine = torch.tensor([*figures, *parts], dtype=torch.float64, device=self._engine.device)
        summed = self._engine.all_reduce(mine).tolist()
        if self._writer is None:
            return
        row: dict[str, Any] = {"step": step, **self._meter.row(summed[: len(figures)])}
        if self._alive is not None:
            self._alive.judge_parts(step, row["seconds"], summed[len(figures) :])
        if self._describer is not None and step > 0:
            shares = self._describer.mix(0, step).shares
            uris = [dataset.uri for dataset in self._sources.datasets]
            row["mix"] = dict(zip(uris, shares, strict=True))
        self._writer.write(row | {"attempt": self._attempt, "time": time.time()})

    def cause(self, seconds: float) -> str | None:
        """Why data came late in the last `seconds`, as far as the counters tell."""
        return self._meter.cause(seconds, fixed_depth=self._fixed_depth)

    def close(self) -> None:
        """Write out the rows."""
        if self._writer is not None:
            self._writer.close()
