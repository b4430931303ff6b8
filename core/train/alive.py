"""What keeps a training loop alive, behind one object: watchdog, stragglers, loss spikes, disk, trackers, last words.

The loop writes the phase it is in and calls a few methods; everything else happens here or in the modules below.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from isthmus.core.models.calling import plain
from isthmus.core.models.memory import Images, Setting
from isthmus.core.models.profiles import profile
from isthmus.core.recipe.schema import Recipe
from isthmus.core.telemetry.disk import cannot_fit
from isthmus.core.telemetry.reading import INTERVAL_S
from isthmus.core.train.agreement import is_shared, lost_peer, shared
from isthmus.core.train.checkpoint import flat_state
from isthmus.core.train.memory_error import (
    Footprint,
    Situation,
    is_out_of_memory,
    out_of_memory,
)
from isthmus.core.train.parallel import shard_size
from isthmus.core.train.spikes import Spike, SpikeDetector
from isthmus.core.train.stragglers import BlockTimer, StragglerMeter, StragglerWatch, figures
from isthmus.core.train.trackers import Trackers
from isthmus.core.train.watchdog import Beat, Watchdog, connect_store
from isthmus.core.train.weights import local
from isthmus.errors import IsthmusError, TrainingFailed
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.loader import Loader

if TYPE_CHECKING:
    from isthmus.core.train.setup import Setup
    from isthmus.core.train.step import StepResult
    from isthmus.core.train.trainer_state import TrainerState


class Alive:
    """Around a whole training: a context manager that watches it, and turns its failures into last words."""

    def __init__(self, recipe: Recipe, run: RunDirectory) -> None:
        self.recipe, self.run = recipe, run
        self.beat = Beat()
        """The loop writes its phase here."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._watchdog = Watchdog(
            self.beat,
            recipe.watchdog.limit_s(recipe.data.wait_limit),
            run,
            rank=self.rank,
            world_size=self.world_size,
            attempt=os.environ.get("ISTHMUS_ATTEMPT", "1"),
            connect=connect_store,
        )
        self._setup: Setup | None = None
        self._stage = 0
        self._timer: BlockTimer | None = None
        self._meter: StragglerMeter | None = None
        self._stragglers: StragglerWatch | None = None
        self._ranks: Any = None
        self._checkpoint_bytes = 0
        self.spikes: SpikeDetector | None = None
        """Of the losses, where the recipe asks for it; the same on every rank."""
        self.trackers: Trackers | None = None
        """On rank 0, where the recipe names some."""

    # -- the loop's

    def attach(self, setup: Setup) -> Alive:
        """Everything is open: what needs a model, a run and an attempt begins."""
        self._setup = setup
        recipe, engine = setup.recipe, setup.engine
        lead = engine.rank == 0
        if engine.world_size > 1:
            compiled = bool(recipe.parallel.compile)
            self._timer = BlockTimer(plain(engine.model), engine.device, engine.model, compiled=compiled)
            self._meter = StragglerMeter(engine.rank, engine.world_size, self._timer)
            watched = recipe.watchdog
            self._stragglers = StragglerWatch(
                watched.straggler_factor, watched.straggler_for, self._timer.count
            )
            if lead:
                self._ranks = self.run.metrics("ranks", writer=f"attempt{setup.attempt}")
        self.watch_losses(setup.state)
        if lead:
            tensors = flat_state(engine, setup.ema).values()
            self._checkpoint_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if recipe.trackers:
                self.trackers = Trackers(recipe, self.run, attempt=setup.attempt, step=setup.state.step)
                self.trackers.start()
        return self

    def watch_losses(self, state: TrainerState) -> None:
        """Judges losses from a checkpoint's state on."""
        settings = self.recipe.on_loss_spike
        self.spikes = None if settings is None else SpikeDetector(settings, state.losses)

    def reads(self, loader: Loader) -> None:
        """The loader that batches come from, from here on."""
        self.beat.doing = loader.waiting_for

    @property
    def interval(self) -> float:
        """Seconds between rows of how ranks read and how long they take."""
        return min(INTERVAL_S, self.recipe.watchdog.straggler_for / 4)

    def stepped(self, result: StepResult, *, stage: int, seconds: float, data: float) -> None:
        """A step of `seconds` was done, of which so much went to data."""
        self._stage = stage
        if self._meter is not None:
            wait = result.exposed_s or 0.0
            self._meter.add(seconds=seconds, data=data, wait=wait)

    def spike(self, step: int, result: StepResult) -> Spike | None:
        """A loss spike that global step `step` (1 after the first) completed; the same on every rank."""
        if self.spikes is None:
            return None
        return self.spikes.observe(step, result.loss, finite=result.applied)

    def timing(self, on: bool) -> None:
        """Whether forward passes are those of a training step."""
        if self._timer is None:
            return
        if on:
            self._timer.begin()
        else:
            self._timer.wanted = False

    def take_parts(self) -> list[float]:
        """This rank's parts of the interval; to be summed over ranks."""
        return self._meter.take() if self._meter is not None else []

    def judge_parts(self, step: int, seconds: float, summed: list[float]) -> None:
        """On rank 0: the row of all ranks' parts, and alarms of those that are slow."""
        if self._meter is None or self._stragglers is None or self._ranks is None or not summed:
            return
        parts = self._meter.by_rank(summed)
        self._ranks.write({"step": step, "seconds": seconds, **figures(parts)})
        for found in self._stragglers.observe(parts, seconds):
            fields = found.event_fields()
            self.run.event(found.event_type, **fields)
            _say(fields["message"])

    def before_checkpoint(self, state: TrainerState) -> TrainerState:
        """The state to be written; says first when the disk has no room for it."""
        if self._setup is not None and self._setup.engine.rank == 0:
            problem = cannot_fit(self.run.local_path(), self._checkpoint_bytes)
            if problem is not None:
                self.run.event("alarm", metric="disk_free", step=state.step, message=problem)
                _say(problem)
        return state.but(losses=self.spikes.losses) if self.spikes is not None else state

    def row(self, kind: str, row: dict[str, Any]) -> None:
        """Hands a row of metrics to the trackers; returns at once."""
        if self.trackers is not None:
            self.trackers.row(kind, row)

    def picture(self, step: int, png: bytes) -> None:
        """Hands a sample grid to the trackers; returns at once."""
        if self.trackers is not None:
            self.trackers.picture(step, png)

    def close(self) -> None:
        """Training has ended, however: what is buffered goes out."""
        if self._ranks is not None:
            self._ranks.close()
        if self.trackers is not None:
            self.trackers.close()

    # -- around all of it

    def __enter__(self) -> Alive:
        self._watchdog.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._last_words(error)
        finally:
            self._watchdog.stop()

    def _last_words(self, error: Exception) -> None:
        """Raises what says more than the error itself, where there is something; tells the other ranks."""
        if is_out_of_memory(error) and (said := self._out_of_memory()) is not None:
            self._watchdog.tell(str(said))
            raise said from error
        if is_shared(error):
            return
        if lost_peer(error) is None:
            line = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
            self._watchdog.tell(" ".join(line.split())[:1000])
            return
        told = self._watchdog.heard()
        if told is not None and told["rank"] != self.rank:
            echo = TrainingFailed(f"rank {told['rank']} failed: {told['cause']}")
            vars(echo)["culprit"] = told["rank"]
            raise shared(echo) from None

    def _out_of_memory(self) -> TrainingFailed | None:
        setup = self._setup
        if setup is None:
            return None
        try:
            return out_of_memory(self._situation(setup))
        except Exception:  # noqa: BLE001 - the arithmetic must not hide the error it explains
            return None

    def _situation(self, setup: Setup) -> Situation:
        engine, parallel = setup.engine, setup.recipe.parallel
        stage = setup.recipe.stages[self._stage]
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", engine.world_size))
        held = sum(local(weight.detach()).nbytes for weight in engine.parameters.values())
        moments = sum(
            local(value).nbytes
            for state in engine.optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        )
        average = sum(local(shadow).nbytes for shadow in setup.ema.shadow.values())
        cuda = engine.device.type == "cuda"
        return Situation(
            footprint=Footprint(
                weights=held,
                gradients=held,
                optimizer=moments,
                ema=average,
                staging=0 if cuda else held + moments + average,
            ),
            images=Images.of(profile(setup.recipe.model), stage.resolution, parallel.precision),
            setting=Setting(
                micro_batch_size=stage.micro_batch_size,
                checkpointing=parallel.activation_checkpointing,
                strategy=parallel.strategy,
                shards=shard_size(parallel, engine.world_size, local_world),
            ),
            capacity=torch.cuda.mem_get_info(engine.device)[1] if cuda else _memory() // local_world,
            rank=engine.rank,
            world_size=engine.world_size,
            step=self.beat.step,
            stage=self._stage,
            rank_batch_size=stage.global_batch_size // engine.world_size,
        )


def _memory() -> int:
    """Bytes of this machine's memory, or of the container's share of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            with open(f"/sys/fs/cgroup/{name}") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):
            continue
    return total


def _say(text: str) -> None:
    # One write, so that lines of several threads do not mix.
    sys.stderr.write(f"warning: {text}\n")
    sys.stderr.flush()
