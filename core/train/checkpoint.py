"""Checkpoints: complete or not there, verified when read, for any world size and strategy.

A checkpoint is a flat dictionary of tensors under clean names (`model.`, `ema.`, `optimizer.`), written by DCP as
shards, and `trainer.json`. Nothing in it depends on the number of ranks or on how the model was wrapped.
The state is copied while training stands still; the rest is the background's (:mod:`saving_flight`).
"""

from __future__ import annotations

import datetime
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from isthmus.core.recipe.schema import Checkpoint as CheckpointSettings
from isthmus.core.train import manifest
from isthmus.core.train.agreement import everywhere, on_rank_0, shared
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine
from isthmus.core.train.phases import phase
from isthmus.core.train.saving_flight import Flight, as_shared
from isthmus.core.train.saving_plan import Planned, Signature, plan, signature
from isthmus.core.train.trainer_state import Identity, TrainerState, check_identity, read_state
from isthmus.core.train.weights import clean, local
from isthmus.errors import CheckpointError, IsthmusError, StorageError
from isthmus.storage.ranges.causes import words_of
from isthmus.storage.rundir.patience import may_pass, persistently
from isthmus.storage.uploads import Uploads

Result = TypeVar("Result")

WRITE_LIMIT_S = 3600.0
"""No part of a checkpoint takes longer than this, or it has failed: what ranks wait for each other at most."""


__all__ = [
    "Checkpoints", "Identity", "Run", "TrainerState", "check_identity", "flat_state", "live_state", "read_state",
    "read_weights",
]  # fmt: skip


class Run(Protocol):
    """What is used of a run directory."""

    uri: str

    def checkpoints(self) -> list[int]: ...
    def checkpoint_uri(self, step: int) -> str: ...
    def commit_checkpoint(
        self, step: int, manifest: Mapping[str, Any], *, token: str | None = None
    ) -> None: ...
    def read_commit(self, step: int) -> dict[str, Any]: ...
    def remove_checkpoint(self, step: int) -> None: ...
    def check_token(self, token: str) -> None: ...
    def event(self, type: str, /, **fields: Any) -> Any: ...


def live_state(engine: Engine, ema: EMA) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its clean name: the ones that are trained, not to be kept."""
    state: dict[str, Tensor] = {f"model.{name}": weight for name, weight in engine.parameters.items()}
    for name, buffer in _buffers(engine).items():
        state[f"model.{name}"] = buffer
    state |= {f"ema.{name}": shadow for name, shadow in ema.shadow.items()}
    for name, weight in engine.parameters.items():
        for moment, value in engine.optimizer.state[weight].items():
            state[f"optimizer.{name}.{moment}"] = value
    return state


def flat_state(engine: Engine, ema: EMA) -> dict[str, Tensor]:
    """The same without gradients, sharing memory with the training state."""
    return {name: tensor.detach() for name, tensor in live_state(engine, ema).items()}


def _buffers(engine: Engine) -> dict[str, Tensor]:
    # Not from state_dict(), which takes longer than the copy of a small model's whole state.
    found = {}
    for prefix, module in engine.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[clean(f"{prefix}.{name}" if prefix else name)] = buffer
    return found


class Checkpoints:
    """Writes and reads a run's checkpoints. Every method must be entered by all ranks.

    Raises, when made:
        StorageError, RuntimeError: the ranks cannot reach each other.
    """

    def __init__(
        self, run: Run, engine: Engine, ema: EMA, settings: CheckpointSettings, token: str | None
    ) -> None:
        self.run = run
        self.engine = engine
        self.ema = ema
        self.settings = settings
        self.token = token
        """The lease's, checked before committing; None where there is no lease."""
        self._planned: Planned | None = None
        self._uploads: Uploads | None = None
        self._prune_failed = False
        self._flight: Flight | None = None
        self._group = (
            dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=WRITE_LIMIT_S))
            if engine.world_size > 1
            else None
        )

    def prepare(self) -> None:
        """Plan who writes what, make the memory for it and a client, so that the first checkpoint need not.

        Raises:
            TrainingFailed: there is no memory for the copy; on all ranks.
        """
        self._plan(signature(live_state(self.engine, self.ema)))
        self._sender()

    def begin(
        self,
        state: TrainerState,
        *,
        background: bool = True,
        before_commit: Callable[[], None] | None = None,
        facts: Callable[[], Mapping[str, Any]] = dict,
    ) -> Flight:
        """Copy the state, then write it; one at a time: the one before must have ended.

        Args:
            state: of the trainer, its step names the checkpoint.
            background: return when the copy is made, rather than when the checkpoint is there.
            before_commit: called on rank 0 when all files are there.
            facts: more for the event, asked after the commit.

        Returns:
            What to wait for; its `error` is set when it could not be written. Older checkpoints are untouched then.
        """
        if self._flight is not None and not self._flight.ended.is_set():
            raise RuntimeError("a checkpoint is still being written from the same memory")
        started = time.perf_counter()
        state = state.but(ema_updates=self.ema.updates, world_size=self.engine.world_size)
        live = live_state(self.engine, self.ema)
        planned = self._plan(signature(live))
        with torch.no_grad():
            planned.image.stage({name: local(tensor) for name, tensor in live.items()})
        phase("staged", state.step)
        self._flight = flight = Flight(
            run=self.run,
            uploads=self._sender(),
            step=state.step,
            state=json.dumps(asdict(state), indent=1).encode(),
            planned=planned,
            group=self._group,
            rank=self.engine.rank,
            world_size=self.engine.world_size,
            token=self.token,
            retry_budget=self.settings.retry_budget,
            stall_s=time.perf_counter() - started,
            before_commit=before_commit,
            prune=self._prune,
            facts=facts,
        )
        if background:
            flight.start()
        else:
            flight.fly()
        return flight

    def save(self, state: TrainerState) -> float:
        """Write and commit a checkpoint of `state.step`; returns the seconds it took.

        Raises:
            StorageError: a rank could not write; raised on all ranks. Older checkpoints are untouched.
            LeaseLost: another attempt owns the run; nothing was committed.
        """
        started = time.perf_counter()
        flight = self.begin(state, background=False)
        if flight.error is not None:
            raise as_shared(flight.error)
        return time.perf_counter() - started

    def load(
        self, identity: Identity, *, before: int | None = None, allow_changed_data: bool = False
    ) -> TrainerState | None:
        """Read the newest checkpoint that verifies into model, optimizer and EMA; None when there is none.

        A damaged one is named in an event and the one before is taken.

        Args:
            identity: of the run that reads.
            before: only checkpoints of steps before this one; the others stay.
            allow_changed_data: accept one that was trained on other data.

        Raises:
            CheckpointError: all are damaged, or the model is another one, or it is a newer version's.
            DatasetMismatch: it was trained on other data.
            StorageError: the store is away, which says nothing about the checkpoints.
        """
        if self._flight is not None:
            self._flight.ended.wait(WRITE_LIMIT_S)
        steps = on_rank_0(lambda: self._patiently(self.run.checkpoints))
        on_rank_0(lambda: self._remove_leftovers(steps))
        problems = []
        for step in reversed(steps):
            if before is not None and step >= before:
                continue
            problem = self._problem(step)
            if problem is None:
                return self._read(step, identity, allow_changed_data)
            problems.append(f"step {step}: {problem}")
            message = f"checkpoint of step {step} is damaged and was passed over: {problem}"
            on_rank_0(partial(self._note, step, message))
        if problems:
            error = CheckpointError(
                f"every checkpoint is damaged; {'; '.join(problems)}",
                where=self.run.uri,
                hint="restore one from a copy, or remove checkpoints/ to start from scratch",
            )
            raise shared(error)
        return None

    def _sender(self) -> Uploads:
        if self._uploads is None:
            parent = self.run.checkpoint_uri(0).rsplit("/", 1)[0]
            self._uploads = Uploads(parent, budget_s=self.settings.retry_budget)
        return self._uploads

    def _plan(self, wanted: Signature) -> Planned:
        if self._planned is None or self._planned.signature != wanted:
            self._planned = None  # its memory first
            self._planned = plan(
                flat_state(self.engine, self.ema),
                rank=self.engine.rank,
                world_size=self.engine.world_size,
                pin=self.engine.device.type == "cuda",
            )
        return self._planned

    def _prune(self, step: int) -> None:
        """Remove what is not to be kept. A store that refuses is no reason to end training: it is said, once."""
        try:
            # A later one is of a course that was given up, damaged perhaps: it must not push a good one out.
            steps = [found for found in self.run.checkpoints() if found <= step]
            forever = self.settings.keep_every
            newest = set(steps[-self.settings.keep :])
            for old in steps:
                if old not in newest and not (forever and old % forever == 0):
                    self.run.remove_checkpoint(old)
        except StorageError as error:
            if not self._prune_failed:
                self._prune_failed = True
                self._note(step, f"older checkpoints could not be removed: {error}")

    def _remove_leftovers(self, committed: list[int]) -> None:
        if self.token is not None:
            self.run.check_token(self.token)  # what looks like a leftover may be another attempt's
        parent = self.run.checkpoint_uri(0).rsplit("/", 1)[0]
        for name in manifest.file_names(parent):
            number = name.removeprefix("step-")
            if number != name and number.isdigit() and int(number) not in committed:
                self.run.remove_checkpoint(int(number))

    def _note(self, step: int, message: str) -> None:
        print(f"warning: {message}", flush=True)
        self.run.event("note", message=message, step=step)

    def _problem(self, step: int) -> str | None:
        """What is wrong with a committed checkpoint, or None."""
        uri = self.run.checkpoint_uri(step)

        def look() -> dict[str, Any] | str:
            try:
                listed = self._patiently(lambda: self.run.read_commit(step))
                return manifest.check_list(listed) or listed
            except CheckpointError as error:
                error.where = uri
                raise
            except IsthmusError as error:
                if isinstance(error, StorageError) and may_pass(error):
                    raise
                return f"COMMITTED: {error.message}"

        listed = on_rank_0(look)
        if isinstance(listed, str):
            return listed
        found = everywhere(
            lambda: manifest.check_files(
                uri,
                listed,
                self.engine.rank,
                self.engine.world_size,
                retry_budget=self.settings.retry_budget,
            )
        )
        return next((problem for problem in found if problem), None)

    def _read(self, step: int, identity: Identity, allow_changed_data: bool) -> TrainerState:
        uri = self.run.checkpoint_uri(step)
        state = on_rank_0(lambda: read_state(uri))
        on_rank_0(
            lambda: check_identity(uri, state.identity, identity, allow_changed_data=allow_changed_data)
        )
        tensors = flat_state(self.engine, self.ema)
        try:
            dcp_load(tensors, storage_reader=manifest.reader(uri))
        except CheckpointException as error:
            failure = next((found[0] for found in error.failures.values()), error)
            if isinstance(failure, OSError):
                raise shared(StorageError(f"cannot read: {words_of(failure)}", where=uri)) from error
            raise shared(CheckpointError(f"does not fit: {failure}", where=uri)) from error
        self.ema.updates = state.ema_updates
        return state

    def _patiently(self, work: Callable[[], Result]) -> Result:
        return persistently(work, self.settings.retry_budget)


def read_weights(run: Run, step: int, which: str = "ema") -> dict[str, Tensor]:
    """Verified weights of a committed checkpoint, whole, on the CPU, in one process without a process group.

    Args:
        run: the run directory.
        step: one of `run.checkpoints()`.
        which: `ema` or `model`.

    Returns:
        Parameter name of the diffusers class -> float32 tensor. Buffers that a checkpoint holds come with `model`.

    Raises:
        CheckpointError: it is damaged; names the file.
    """
    uri = run.checkpoint_uri(step)
    try:
        listed = run.read_commit(step)
        problem = manifest.check_list(listed) or manifest.check_files(uri, listed, 0, 1)
    except StorageError as error:
        problem = f"COMMITTED: {error.message}"
    if problem:
        raise CheckpointError(f"damaged: {problem}", where=uri)
    source = manifest.reader(uri)
    prefixes = ("ema.", "model.") if which == "ema" else ("model.",)
    tensors: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for prefix in reversed(prefixes):  # EMA over the model: buffers are not averaged.
        for key, facts in source.read_metadata().state_dict_metadata.items():
            if key.startswith(prefix) and isinstance(facts, TensorStorageMetadata):
                names[key.removeprefix(prefix)] = key
                tensors[key] = torch.empty(facts.size, dtype=facts.properties.dtype)
    wanted = {key: tensors[key] for key in names.values()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(wanted, storage_reader=manifest.reader(uri), no_dist=True)
    return {name: wanted[key] for name, key in names.items()}
