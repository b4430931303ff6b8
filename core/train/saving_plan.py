"""Who writes what: DCP's planner, asked once, since the answer depends on names, shapes and placements alone.

DCP's planner knows every sharding; it spreads what ranks hold in common evenly over them (all of it under ddp, each
shard's replicas under hsdp), and its metadata is what lets a checkpoint load on another world size and strategy.
DCP's own writers are not used: they serialise every tensor again for each checkpoint, know no hash, and their
asynchronous form copies on every rank also what another rank will write.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from isthmus.core.train.agreement import shared
from isthmus.core.train.saving_image import Image
from isthmus.errors import TrainingFailed

Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """What :func:`plan` made; good for every state of the same signature."""

    signature: Signature
    image: Image
    metadata: bytes
    """The content of `.metadata`, on rank 0."""


def signature(state: Mapping[str, Tensor]) -> Signature:
    """Names, global shapes and dtypes: the same on all ranks."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in state.items())


def plan(state: Mapping[str, Tensor], *, rank: int, world_size: int, pin: bool) -> Planned:
    """Agree on who writes what, and lay out this rank's files; all ranks must enter.

    Args:
        state: name -> tensor or DTensor.
        rank: of this process.
        world_size: ranks that take part.
        pin: see :class:`Image`.

    Raises:
        TrainingFailed: DCP cannot plan this state, or there is no memory for the files; on all ranks.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), None, is_coordinator=rank == 0)
    plans = _to_rank_0(planner.create_local_plan(), rank, world_size)
    mine: SavePlan | None = None
    metadata: Metadata | None = None
    problem = None
    made: list[Any] = [(None, None)] * world_size
    if plans is not None:
        try:
            agreed, metadata = planner.create_global_plan(plans)
            made = [(part, None) for part in agreed]
        except (ValueError, RuntimeError, AssertionError) as error:
            made = [(None, f"DCP cannot plan the checkpoint: {error}")] * world_size
    mine, problem = _from_rank_0(made, world_size)
    image = None
    if mine is not None:
        try:
            image = Image(mine.items, rank, pin=pin)
        except (RuntimeError, MemoryError, TypeError) as error:
            problem = f"rank {rank} cannot lay out its part of a checkpoint: {error}"
    places = _to_rank_0((image.places if image else {}, problem), rank, world_size)
    answers: list[Any] = [None] * world_size
    if places is not None:
        answers = [next((problem for _, problem in places if problem), None)] * world_size
    problem = _from_rank_0(answers, world_size)
    if problem is not None or image is None:
        raise shared(TrainingFailed(str(problem)))
    content = b""
    if metadata is not None and places is not None:
        metadata.storage_data = {index: place for part, _ in places for index, place in part.items()}
        content = pickle.dumps(metadata)
    return Planned(signature(state), image, content)


def _to_rank_0(value: Any, rank: int, world_size: int) -> list[Any] | None:
    """Every rank's value, on rank 0. Not to all: the plans of 128 ranks are large."""
    if world_size == 1:
        return [value]
    values: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def _from_rank_0(values: list[Any], world_size: int) -> Any:
    if world_size == 1:
        return values[0]
    box: list[Any] = [None]
    dist.scatter_object_list(box, values, src=0)
    return box[0]
