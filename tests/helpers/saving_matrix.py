"""Processes that write checkpoints under each strategy of their world size, and read everybody's, bit for bit.

    torchrun --nproc-per-node=N saving_matrix.py FOLDER write read

Every tensor is filled with numbers of its own, so that a piece in the wrong place or of the wrong rank is seen.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from saving import IDENTITY
from torch.distributed.tensor import DTensor, distribute_tensor
from training import MODELS

from isthmus.core.models.families import build_from_config
from isthmus.core.models.presets import CLASSES
from isthmus.core.recipe.schema import Checkpoint, Parallel
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.checkpoint import Checkpoints, TrainerState, flat_state
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine, prepare
from isthmus.core.train.weights import full, local
from isthmus.storage.rundir import RunDirectory

WRITERS = [("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4), ("hsdp", 4)]


def engine(strategy: str) -> tuple[Engine, EMA]:
    """A small model; its scale-shift tables of six and of two rows are nothing that four ranks share evenly."""
    config = MODELS["dit"] | {"num_layers": 1}
    parallel = Parallel.model_validate(
        {"strategy": strategy, "precision": "fp32", "shard_size": 2 if strategy == "hsdp" else None}
    )
    made = prepare(build_from_config(CLASSES["dit"], config, 0), Optimizer(), parallel, cpu=True)
    return made, EMA(made.parameters)


def numbers(name: str, tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The whole tensor of that name in the checkpoint of that seed."""
    made = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
    return torch.randn(tensor.shape, generator=made).to(tensor.dtype)


def write(folder: Path, strategy: str) -> None:
    """Fill the state, begin a checkpoint of it in the background, spoil the state, and wait."""
    made, ema = engine(strategy)
    seed = WRITERS.index((strategy, made.world_size))
    with torch.no_grad():
        for name, tensor in flat_state(made, ema).items():
            whole = numbers(name, tensor, seed)
            if isinstance(tensor, DTensor):
                whole = local(distribute_tensor(whole, tensor.device_mesh, tensor.placements))
            local(tensor).copy_(whole)
    run = RunDirectory(folder / f"{strategy}-{made.world_size}")
    flight = Checkpoints(run, made, ema, Checkpoint(), None).begin(TrainerState(IDENTITY, step=seed))
    with torch.no_grad():
        for tensor in flat_state(made, ema).values():
            local(tensor).zero_()
    assert flight.ended.wait(60)
    if flight.error is not None:
        raise flight.error


def read(folder: Path, strategy: str) -> int:
    """Load every checkpoint there is and compare all its tensors; returns how many."""
    made, ema = engine(strategy)
    count = 0
    for seed, (writer, world_size) in enumerate(WRITERS):
        run = RunDirectory(folder / f"{writer}-{world_size}")
        found = Checkpoints(run, made, ema, Checkpoint(), None).load(IDENTITY)
        assert found is not None
        assert found.world_size == world_size
        assert found.step == seed
        for name, tensor in flat_state(made, ema).items():
            equal = torch.equal(full(tensor).cpu(), numbers(name, tensor, seed))
            assert equal, f"{name} of {writer} on {world_size} under {strategy} on {made.world_size}"
        count += 1
    return count


def main() -> None:
    """See the module."""
    folder, actions = Path(sys.argv[1]), sys.argv[2:]
    size = int(os.environ.get("WORLD_SIZE", "1"))
    for action in actions:
        for strategy, world_size in WRITERS:
            if world_size != size:
                continue
            if action == "write":
                write(folder, strategy)
            else:
                count = read(folder, strategy)
                if dist.get_rank() == 0:
                    print(f"{strategy} on {size} read {count}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
