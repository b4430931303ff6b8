"""What ranks tell each other about plain values and errors. Every function must be entered by all ranks.

An error that one rank meets while the others wait is raised on all of them, so that they end together with
the same cause instead of with a timeout each. Without a process group all of it is local.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from isthmus.errors import IsthmusError, StorageError

T = TypeVar("T")


def rank() -> int:
    """This process's rank."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agree(value: T) -> T:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    agreed: T = box[0]
    return agreed


def gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value, by rank, on every rank. `group`: a process group of all ranks other than the default one."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def barrier() -> None:
    """Wait for every rank."""
    if world_size() > 1:
        dist.barrier()


def on_rank_0(work: Callable[[], T]) -> T:
    """Do it on rank 0; its result, or its error, reaches every rank."""
    result: Any = None
    error: IsthmusError | None = None
    if dist.is_initialized() and rank() != 0:
        result, error = agree((result, error))
    else:
        result, error = agree(_attempt(work))
    if error is not None:
        raise shared(error)
    done: T = result
    return done


def everywhere(work: Callable[[], T], group: Any = None) -> list[T]:
    """Do it on every rank; all results by rank, or the first error, on every rank. `group`: as in :func:`gather`."""
    pairs = gather(_attempt(work), group)
    for _, error in pairs:
        if error is not None:
            raise shared(error)
    return [result for result, _ in pairs]


def shared(error: IsthmusError) -> IsthmusError:
    """Mark an error that every rank raises, so that one of them says it."""
    vars(error)["on_all_ranks"] = True
    return error


def is_shared(error: BaseException) -> bool:
    """Whether every rank raises this error."""
    return bool(vars(error).get("on_all_ranks"))


def lost_peer(error: BaseException) -> str | None:
    """In words, when `error` is a collective's way of saying that another rank is gone; else None."""
    text = " ".join(str(error).split())
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting",
        "Broken pipe",
        "NCCL",
    )
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    ):
        return f"rank {rank()} lost contact with another rank ({text[:120]})"
    return None


def _attempt(work: Callable[[], Any]) -> tuple[Any, IsthmusError | None]:
    try:
        return work(), None
    except IsthmusError as error:
        error.__cause__ = error.__context__ = None  # May hold what cannot be sent.
        return None, error
    except OSError as error:
        return None, StorageError(" ".join(str(error).split()))
