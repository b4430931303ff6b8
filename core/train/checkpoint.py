"""Checkpoints: complete or not there, verified when read, for any world size and strategy.

A checkpoint is a flat dictionary of tensors under clean names (`model.`, `ema.`, `optimizer.`), written by DCP as
shards, and `trainer.json`. Nothing in it depends on the number of ranks or on how the model was wrapped.
A step's order: all ranks write, each hashes what it wrote, rank 0 checks that it still holds the lease and writes
COMMITTED; only then are old ones removed. Whatever fails before leaves the older checkpoints as they were.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from isthmus.core.recipe.schema import Checkpoint as CheckpointSettings
from isthmus.core.train import manifest
from isthmus.core.train.agreement import agree, everywhere, gather, on_rank_0, shared
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine
from isthmus.errors import CheckpointError, DatasetMismatch, IsthmusError, StorageError
from isthmus.storage import filesystems

_STATE = "trainer.json"


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
    def event(self, type: str, /, **fields: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must share with the run that reads it."""

    model: str
    """Hash of the diffusers class and its configuration."""
    datasets: tuple[str, ...]
    """Fingerprints of the sources, in order."""
    recipe_version: int


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state beside the tensors. The data's state is the step and the plan."""

    identity: Identity
    step: int = 0
    """Optimizer steps done over all stages."""
    stage: int = -1
    """The stage last entered; -1 before the first."""
    samples: int = 0
    """Samples trained on."""
    skipped: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    ema_updates: int = 0
    world_size: int = 1
    """Of the run that wrote it; any may read it."""

    def but(self, **changes: Any) -> TrainerState:
        """A copy with changes."""
        return replace(self, **changes)


def flat_state(engine: Engine, ema: EMA) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its clean name, sharing memory with the training state."""
    state: dict[str, Tensor] = {
        f"model.{name}": weight.detach() for name, weight in engine.parameters.items()
    }
    for name, buffer in _buffers(engine).items():
        state[f"model.{name}"] = buffer
    state |= {f"ema.{name}": shadow for name, shadow in ema.shadow.items()}
    for name, weight in engine.parameters.items():
        for moment, value in engine.optimizer.state[weight].items():
            state[f"optimizer.{name}.{moment}"] = value
    return state


def _buffers(engine: Engine) -> dict[str, Tensor]:
    from isthmus.core.train.weights import clean

    persistent = {clean(name) for name in engine.model.state_dict()}
    return {clean(n): b for n, b in engine.model.named_buffers() if clean(n) in persistent}


class Checkpoints:
    """Writes and reads a run's checkpoints. Every method must be entered by all ranks."""

    def __init__(
        self, run: Run, engine: Engine, ema: EMA, settings: CheckpointSettings, token: str | None
    ) -> None:
        self.run = run
        self.engine = engine
        self.ema = ema
        self.settings = settings
        self.token = token
        """The lease's, checked before committing; None where there is no lease."""

    def save(self, state: TrainerState) -> float:
        """Write and commit a checkpoint of `state.step`; returns the seconds it took.

        Raises:
            StorageError: a rank could not write; raised on all ranks. Older checkpoints are untouched.
            LeaseLost: another attempt owns the run; nothing was committed.
        """
        started = time.perf_counter()
        state = state.but(ema_updates=self.ema.updates, world_size=self.engine.world_size)
        uri = self.run.checkpoint_uri(state.step)
        # What is there is an attempt's leftover, or one that was found damaged: its step is being done again.
        on_rank_0(lambda: self.run.remove_checkpoint(state.step))
        with _storage_errors(uri):
            dcp_save(flat_state(self.engine, self.ema), storage_writer=manifest.writer(uri))
        with _storage_errors(uri):
            parts = everywhere(lambda: self._describe_own(uri, state))
        listed = {name: facts for part in parts for name, facts in part.items()}
        size = sum(int(facts["size"]) for facts in listed.values())

        def commit() -> None:
            facts = {"step": state.step, "bytes": size, "world_size": state.world_size}
            self.run.commit_checkpoint(state.step, manifest.make(listed, **facts), token=self.token)

        on_rank_0(commit)
        seconds = time.perf_counter() - started
        on_rank_0(lambda: self._after_commit(state.step, seconds, size))
        return seconds

    def load(self, identity: Identity) -> TrainerState | None:
        """Read the newest checkpoint that verifies into model, optimizer and EMA; None when there is none.

        A damaged one is named in an event and the one before is taken.

        Raises:
            CheckpointError: all are damaged, or the model is another one.
            DatasetMismatch: it was trained on other data.
        """
        steps = on_rank_0(self.run.checkpoints)
        on_rank_0(lambda: self._remove_leftovers(steps))
        problems = []
        for step in reversed(steps):
            problem = self._problem(step)
            if problem is None:
                return self._read(step, identity)
            problems.append(f"step {step}: {problem}")
            message = f"checkpoint of step {step} is damaged and was passed over: {problem}"
            on_rank_0(partial(self._name_damaged, step, message))
        if problems:
            error = CheckpointError(
                f"every checkpoint is damaged; {'; '.join(problems)}",
                where=self.run.uri,
                hint="restore one from a copy, or remove checkpoints/ to start from scratch",
            )
            raise shared(error)
        return None

    def _describe_own(self, uri: str, state: TrainerState) -> dict[str, dict[str, Any]]:
        prefix = f"__{self.engine.rank}_"
        try:
            return self._describe(uri, prefix, state)
        except OSError as error:
            raise StorageError(_reason(error), where=uri) from error

    def _describe(self, uri: str, prefix: str, state: TrainerState) -> dict[str, dict[str, Any]]:
        names = [name for name in manifest.file_names(uri) if name.startswith(prefix)]
        if self.engine.rank == 0:
            files, path = filesystems.filesystem(uri)
            files.pipe_file(f"{path}/{_STATE}", json.dumps(asdict(state), indent=1).encode())
            names += [".metadata", _STATE]
        return manifest.describe(uri, names)

    def _after_commit(self, step: int, seconds: float, size: int) -> None:
        self.run.event("checkpoint-committed", step=step, seconds=round(seconds, 3), bytes=size)
        steps = self.run.checkpoints()
        forever = self.settings.keep_every
        newest = set(steps[-self.settings.keep :])
        for old in steps:
            if old not in newest and not (forever and old % forever == 0):
                self.run.remove_checkpoint(old)

    def _remove_leftovers(self, committed: list[int]) -> None:
        parent = self.run.checkpoint_uri(0).rsplit("/", 1)[0]
        for name in manifest.file_names(parent):
            number = name.removeprefix("step-")
            if number != name and number.isdigit() and int(number) not in committed:
                self.run.remove_checkpoint(int(number))

    def _name_damaged(self, step: int, message: str) -> None:
        print(f"warning: {message}", flush=True)
        self.run.event("note", message=message, step=step)

    def _problem(self, step: int) -> str | None:
        listed: Any = None
        if self.engine.rank == 0:
            try:
                listed = self.run.read_commit(step)
                listed = manifest.check_list(listed) or listed
            except IsthmusError as error:
                listed = f"COMMITTED: {error.message}"
        listed = agree(listed)
        if isinstance(listed, str):
            return listed
        uri = self.run.checkpoint_uri(step)
        found = manifest.check_files(uri, listed, self.engine.rank, self.engine.world_size)
        return next((problem for problem in gather(found) if problem), None)

    def _read(self, step: int, identity: Identity) -> TrainerState:
        uri = self.run.checkpoint_uri(step)
        state = on_rank_0(lambda: read_state(uri))
        on_rank_0(lambda: check_identity(uri, state.identity, identity))
        tensors = flat_state(self.engine, self.ema)
        try:
            dcp_load(tensors, storage_reader=manifest.reader(uri))
        except CheckpointException as error:
            cause = next((str(failure[0]) for failure in error.failures.values()), str(error))
            raise shared(CheckpointError(f"does not fit: {cause}", where=uri)) from error
        self.ema.updates = state.ema_updates
        return state


def check_identity(uri: str, written: Identity, wanted: Identity) -> None:
    """Raise what tells a checkpoint of another model, dataset or recipe format."""
    if written.model != wanted.model:
        raise CheckpointError(
            "is of another model configuration",
            where=uri,
            hint="choose another run directory for another model",
        )
    if written.datasets != wanted.datasets:
        raise DatasetMismatch(
            f"was trained on datasets {_short(written.datasets)}, the recipe's are {_short(wanted.datasets)}",
            where=uri,
            hint="data that has changed needs a new run",
        )
    if written.recipe_version != wanted.recipe_version:
        raise CheckpointError(
            f"was written under recipe version {written.recipe_version}, this is {wanted.recipe_version}",
            where=uri,
        )


def read_state(uri: str) -> TrainerState:
    """The trainer's state in a checkpoint. Raises CheckpointError when it cannot be read."""
    files, path = filesystems.filesystem(uri)
    try:
        found = json.loads(files.cat_file(f"{path}/{_STATE}"))
        identity = found.pop("identity")
        known = {field.name for field in fields(TrainerState)}
        identity["datasets"] = tuple(identity["datasets"])
        return TrainerState(
            identity=Identity(**identity), **{key: value for key, value in found.items() if key in known}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{_STATE} cannot be read: {error}", where=uri) from error


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


@contextmanager
def _storage_errors(uri: str) -> Iterator[None]:
    """DCP tells every rank which ranks failed; one line of it, the first cause."""
    try:
        yield
    except CheckpointException as error:
        reasons = [_reason(failure[0]) for failure in error.failures.values()]
        message = f"cannot write the checkpoint: {reasons[0]}"
        raise shared(StorageError(message, where=uri)) from error
    except StorageError as error:
        message = f"cannot write the checkpoint: {error.message}"
        raise shared(StorageError(message, where=uri)) from error


def _reason(error: BaseException) -> str:
    """The store's own cause in words, however deep DCP has wrapped it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in filesystems.REASONS:
            return filesystems.REASONS[seen.errno]
        seen = seen.__cause__ or seen.__context__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."


def _short(fingerprints: tuple[str, ...]) -> str:
    return ", ".join(fingerprint[:12] for fingerprint in fingerprints) or "none"
