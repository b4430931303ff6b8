"""The training loop: data, step, what is due after it, and how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from isthmus.core.recipe.schema import Monitor, Recipe
from isthmus.core.recipe.stages import Stage
from isthmus.core.telemetry.thresholds import Thresholds
from isthmus.core.train.agreement import barrier, on_rank_0, shared
from isthmus.core.train.alive import Alive
from isthmus.core.train.control import BudgetWatch, Rhythm, Signals, stop_requested
from isthmus.core.train.data import make_loader
from isthmus.core.train.objective import Objective
from isthmus.core.train.optimizers import reset_optimizer
from isthmus.core.train.phases import phase, start_tracing
from isthmus.core.train.progress import Progress
from isthmus.core.train.reading import ReadingLog
from isthmus.core.train.rewind import GoBack, answer, go_back
from isthmus.core.train.saving import Saving
from isthmus.core.train.setup import Setup, set_up
from isthmus.core.train.sources import epochs_left
from isthmus.core.train.stage_model import StageModel
from isthmus.core.train.stages import follow_plan, samples_before, with_stages_to_come
from isthmus.core.train.stall import CHECKPOINT, COMPUTE, DATA, ENDING, REDUCE, STARTING, VALIDATION
from isthmus.core.train.step import Stepper, StepResult
from isthmus.core.train.throughput import Throughput, shares
from isthmus.core.train.validation import Interrupted, Validator
from isthmus.errors import TrainingFailed
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.stream.loader import Loader

Ending = Literal["finished", "preempted", "stopped"]


def train(
    recipe: Recipe, run: RunDirectory, *, signals: Signals | None = None, cpu: bool | None = None
) -> Ending:
    """Train `recipe` in this process, one rank of torchrun's or alone; resumes what is in `run`.

    Args:
        recipe: resolved for a backend.
        run: the run directory; may be empty.
        signals: noticing SIGTERM and SIGINT; without it nothing interrupts.
        cpu: see :func:`isthmus.core.train.setup.set_up`.

    Returns:
        How it ended, the same on all ranks.
    """
    with Alive(recipe, run) as alive:
        ending = Loop(set_up(recipe, run, cpu=cpu), signals or Signals(), alive).train()
        barrier()
    return ending


class Loop:
    """Trains from the state in `setup` to the end of the schedule, or until told to end."""

    def __init__(self, setup: Setup, signals: Signals, alive: Alive | None = None) -> None:
        self.alive = (alive or Alive(setup.recipe, setup.run)).attach(setup)
        self.beat = self.alive.beat
        self.setup = setup
        self.recipe = setup.recipe
        self.run = setup.run
        self.engine = setup.engine
        self.schedule = setup.schedule
        self.state = setup.state
        self.signals = signals
        self.lead = setup.engine.rank == 0
        self.stepper = Stepper(setup.engine, setup.ema, setup.inputs, setup.randomness)
        self.stage_model = StageModel(setup.recipe, setup.engine, setup.inputs, self.stepper)
        self.validator = Validator(
            setup.recipe,
            setup.engine,
            setup.ema,
            setup.inputs,
            setup.randomness,
            setup.sources,
            setup.held_out,
            self._interrupts_validation,
        )
        self.validation_rhythm = Rhythm(self.recipe.validation.every)
        self.budget = BudgetWatch(self.recipe.budget, setup.spent_hours, setup.usd_per_hour)
        self.progress = Progress(self.schedule.total_steps, quiet=not self.lead)
        self.thresholds = Thresholds(Monitor(data_wait=self.recipe.monitor.data_wait))
        self.stage: Stage = self.recipe.stages[0]
        self.objective = Objective(self.stage.objective_over(self.recipe.objective), self.engine.device)
        self.ema_settings = self.recipe.ema
        self.reading: ReadingLog | None = None
        self._settled = False
        on_gpu = self.engine.device.type == "cuda"
        self.throughput = Throughput(self.recipe, self.engine.world_size, cuda=on_gpu and self.lead)
        self._rows = self.run.metrics("train", writer=f"attempt{setup.attempt}") if self.lead else None
        self._keys = (
            self.run.metrics(f"keys-rank{self.engine.rank}", writer=f"attempt{setup.attempt}", part_seconds=0)
            if os.environ.get("ISTHMUS_RECORD_KEYS") == "1"
            else None
        )
        start_tracing(self.run, self.engine.rank)
        self.saving = Saving(
            setup.checkpoints,
            signals,
            saved_step=self.state.step if setup.resumed else -1,
            say=self.progress.say,
            before_commit=None if self._rows is None else self._rows.flush,
        )

    def train(self) -> Ending:
        """Train to the end; says how it ended.

        Raises:
            TrainingFailed: too many steps in a row were not finite.
            StorageError, LeaseLost, DataError: as they come.
        """
        loader = self.begin()
        try:
            if self.setup.resumed and self._validation_missing():
                self._validate()
            while True:
                try:
                    ending = self._steps(loader)
                    break
                except GoBack as back:
                    loader.close()
                    loader = self._go_back(back)
            self.beat.phase = ENDING
            if self.reading is not None:
                self.reading.record(self.state.step)
            return ending
        except Interrupted:
            return self._leave(over_budget=False)
        finally:
            loader.close()
            self.close()

    def begin(self) -> Loader:
        """Take up the plan and the stage of the next step; returns the loader that delivers from there."""
        plan = on_rank_0(lambda: follow_plan(self.run, self.schedule, self.state.step))
        self.state = self.state.but(samples=samples_before(plan, self.state.step))
        if self.state.step < self.schedule.total_steps:
            self.setup.checkpoints.prepare()
        self._enter_stage()
        followed = with_stages_to_come(plan, self.schedule)
        loader = make_loader(
            self.recipe,
            self.setup.sources,
            followed,
            [stage.resolution for stage in self.recipe.stages],
            rank=self.engine.rank,
            world_size=self.engine.world_size,
            start_step=self.state.step,
            epochs_left=epochs_left(self.recipe, self.setup.sources, self.state.step),
            pinned=self.engine.device.type == "cuda",
        )
        self.reading = ReadingLog(
            self.recipe,
            self.engine,
            self.run,
            self.setup.sources,
            loader,
            followed,
            attempt=self.setup.attempt,
            step=self.state.step,
            alive=self.alive,
        )
        self.alive.reads(loader)
        return loader

    def _go_back(self, back: GoBack) -> Loader:
        """Take up the state from before a loss spike; returns the loader of what comes instead."""
        self.beat.phase = CHECKPOINT
        self.saving.land()
        self.state = go_back(back, self.setup)
        self.saving.saved_step = self.state.step
        self.alive.watch_losses(self.state)
        if self.reading is not None:
            self.reading.close()
        return self.begin()

    def close(self) -> None:
        """Write out the metrics and leave the progress bar."""
        self.saving.close()
        for writer in (self._rows, self._keys, self.reading, self.alive):
            if writer is not None:
                writer.close()
        self.progress.close()

    def _steps(self, batches: Iterator[Any]) -> Ending:
        while self.state.step < self.schedule.total_steps:
            if self.schedule.stage_at(self.state.step) != self.state.stage:
                on_rank_0(lambda: follow_plan(self.run, self.schedule, self.state.step))
                self._enter_stage()
            told, checkpoint_due, validation_due, over_budget = self.advance(batches)
            step, last = self.state.step, self.state.step == self.schedule.total_steps
            if last or told or over_budget or checkpoint_due or self.saving.rhythm.due(step):
                self._save(last=bool(last or told or over_budget), told=bool(told))
            if not (told or over_budget) and (last or validation_due or self.validation_rhythm.due(step)):
                self._validate()
            if (told or over_budget) and not last:
                return self._leave(over_budget=over_budget and not told)
        return "finished"

    def advance(self, batches: Iterator[Any]) -> list[bool]:
        """Do one step with the next batch and record it; returns what ranks told each other, see `_signals`."""
        started = time.perf_counter()
        beat, beat.step, beat.phase = self.beat, self.state.step + 1, DATA
        batch = next(batches)
        waited = time.perf_counter() - started
        beat.phase = COMPUTE if self._settled else STARTING
        if not self._settled:
            self.stepper.settle(batch, self.objective, self.stage.micro_batch_size)
            self._settled = True
        self.alive.timing(True)
        result = self.stepper.step(
            batch,
            self.objective,
            micro_batch_size=self.stage.micro_batch_size,
            learning_rate=self.schedule.learning_rate(self.state.step),
            max_grad_norm=self.stage.max_grad_norm,
            ema=self.ema_settings,
            signals=self._signals,
        )
        self._count(result)
        seconds = time.perf_counter() - started
        self.alive.stepped(result, stage=self.state.stage, seconds=seconds, data=waited)
        self._record(batch, result, waited, seconds)
        *told, save_failed, reading_due = [value > 0 for value in result.signals]
        self.saving.check(save_failed)
        if reading_due and self.reading is not None:
            self.reading.record(self.state.step)
        spike = self.alive.spike(self.state.step, result)
        if spike is not None and (back := answer(spike, self.recipe, self.run)) is not None:
            raise back
        return told

    def _signals(self) -> list[float]:
        """What ranks tell each other along with the loss: asked to end; and by rank 0's clock, what is due."""
        lead = self.lead
        self.beat.phase = REDUCE
        checkpoint_due, save_failed = self.saving.signals_of_rank()
        return [
            float(self.signals.received is not None),
            checkpoint_due,
            float(lead and self.validation_rhythm.clock_due()),
            float(lead and self.budget.reached() is not None),
            save_failed,
            float(lead and self.reading is not None and self.reading.due()),
        ]

    def _enter_stage(self) -> None:
        """Take up the stage of the next step; apply `on_enter` unless the checkpoint was already within it."""
        index = self.schedule.stage_at(self.state.step)
        self.stage = self.recipe.stages[index]
        self.objective = Objective(self.stage.objective_over(self.recipe.objective), self.engine.device)
        self.ema_settings = self.stage.ema.over(self.recipe.ema)
        self.stage_model.enter(index)
        if self.state.stage == index:
            return
        phase("stage-change", self.state.step)
        if index > 0 and self.state.step == self.schedule.borders[index]:
            if self.stage.on_enter.optimizer == "reset":
                reset_optimizer(self.engine.optimizer)
            if self.stage.on_enter.ema == "reset":
                self.setup.ema.reset()
        self.state = self.state.but(stage=index)
        self.progress.say(
            f"stage {self.stage.name}: {self.stage.resolution} px, steps "
            f"{self.schedule.borders[index]} to {self.schedule.borders[index + 1]}, "
            f"batch {self.stage.global_batch_size}"
        )

    def _count(self, result: StepResult) -> None:
        state = self.state
        in_a_row = 0 if result.applied else state.skipped_in_a_row + 1
        self.state = state.but(
            step=state.step + 1,
            samples=state.samples + self.stage.global_batch_size,
            skipped=state.skipped + (not result.applied),
            skipped_in_a_row=in_a_row,
        )
        if in_a_row >= self.recipe.watchdog.nonfinite_steps:
            error = TrainingFailed(
                f"{in_a_row} steps in a row had a loss or gradient that was not finite, up to step {state.step + 1}",
                hint="lower the learning rate, lengthen the warm-up, or look at the data of these steps",
            )
            raise shared(error)

    def _record(self, batch: Any, result: StepResult, waited: float, seconds: float) -> None:
        state = self.state
        if self._keys is not None:
            self._keys.write(
                {
                    "step": state.step,
                    "keys": list(batch.keys),
                    "positions": batch.positions.tolist(),
                    "world_size": self.engine.world_size,
                    "attempt": self.setup.attempt,
                }
            )
        if self._rows is None:
            return
        finite = result.applied
        row: dict[str, Any] = {
            "step": state.step,
            "stage": state.stage,
            "loss": result.loss if finite else None,
            "grad_norm": result.grad_norm if finite else None,
            "learning_rate": self.schedule.learning_rate(state.step - 1),
            "samples": state.samples,
            **self.throughput.figures(self.stage, batch.latent_mean.shape, seconds),
            "step_s": seconds,
            "data_wait_s": waited,
            "exposed_communication_s": result.exposed_s,
            "checkpoint_stall_s": self.saving.take_stall(),
            "bucket": batch.bucket,
            "skipped": not finite,
            "attempt": self.setup.attempt,
            "time": time.time(),
        }
        self._rows.write(row)
        self.alive.row("train", row)
        for alarm in self.thresholds.observe(row):
            cause = self.reading.cause(alarm.for_s) if self.reading and not alarm.over else None
            self.run.event(alarm.event_type, **replace(alarm, cause=cause).event_fields())
        self.progress.step(
            state.step,
            stage=self.stage.name,
            loss=result.loss,
            samples_per_s=row["samples_per_s"],
            seconds=seconds,
            shares=lambda: shares(row),
        )

    def _validation_missing(self) -> bool:
        """Whether the run ended between a checkpoint and the validation that was due with it."""
        step = self.state.step

        def missing() -> bool:
            due = self.validation_rhythm.due(step) or step == self.schedule.total_steps
            settings = self.recipe.validation
            done = bool(self.run.read_file(f"samples/step-{step:08d}.png")) or not settings.prompts
            if settings.loss_by_timestep:
                done = done and any(row["step"] == step for row in self.run.read_metrics("validation"))
            return due and not done

        return on_rank_0(missing)

    def _save(self, *, last: bool, told: bool) -> None:
        self.beat.phase = CHECKPOINT
        self.saving.save(self.alive.before_checkpoint(self.state), last=last, told=told)

    def _interrupts_validation(self) -> bool:
        self.beat.ticks += 1
        return self.signals.received is not None

    def _validate(self) -> None:
        self.beat.phase = VALIDATION
        self.alive.timing(False)
        settings, stage = self.recipe.validation, self.state.stage
        step = self.state.step
        phase("validating", step)
        if settings.loss_by_timestep:
            bins = self.stage.validation.timestep_bins or settings.timestep_bins
            row = self.validator.loss(stage, self.objective, bins)
            if self.lead:
                with self.run.metrics("validation", writer=f"attempt{self.setup.attempt}") as writer:
                    row |= {"step": step, "attempt": self.setup.attempt, "time": time.time()}
                    writer.write(row)
                    self.alive.row("validation", row)
            kind = "held-out" if row["held_out"] else "training"
            self.progress.say(f"validation at step {step}: loss {row['loss']:.4f} over {kind} samples")
        prompts = self.stage.validation.prompts or settings.prompts
        if prompts:
            title = f"step {step}, stage {self.stage.name}"
            picture = self.validator.grid(stage, self.objective, prompts, title)
            if picture is not None:
                self.run.write_file(f"samples/step-{step:08d}.png", picture)
                self.alive.picture(step, picture)
        self.validation_rhythm.done()

    def _leave(self, *, over_budget: bool) -> Ending:
        """Checkpoint and say why training ends before its end."""
        self._save(last=True, told=not over_budget)
        reason = self.budget.reached() if self.lead and over_budget else None

        def ending() -> Ending:
            if reason is not None:
                self.run.event("stop-requested", by="budget", reason=reason)
                self.progress.say(reason)
                return "stopped"
            return "stopped" if stop_requested(self.run.events()) else "preempted"

        return on_rank_0(ending)
