"""One rank of an encode job: `python -m isthmus.core.encode.rank --recipe FILE --run URI`, started by the worker's torchrun.

The recipe's section `encode` says what; the ranks share the units of the source and end when the dataset is whole. Told to end
(SIGTERM), a rank ends at once: what it loses is the unit that it was at, which the next attempt encodes from its start.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from isthmus.core.outcome import FOLDER_VARIABLE, write_outcome
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.process import to_the_end

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Recipe

PATIENCE_S = 60.0
"""For which the run directory's store may be away."""
_ENDINGS = ("preempted", "stopped", "failed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Encodes this rank's share, and waits for the others'. Raises IsthmusError."""
    parser = argparse.ArgumentParser(prog="python -m isthmus.core.encode.rank", description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--run", required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)

    from isthmus.core.cluster.joining import Attempt
    from isthmus.core.encode.encode import encode_share
    from isthmus.core.encode.job import Progress
    from isthmus.core.encode.sources import open_source
    from isthmus.core.encode.team import METRIC, JobTeam, Seat
    from isthmus.core.recipe import load_recipe
    from isthmus.core.train.control import BudgetWatch, spent_hours, usd_per_hour

    recipe = load_recipe(Path(options.recipe)).recipe
    section = recipe.encode
    if section is None:
        raise UsageError("the recipe has no section `encode`", where=options.recipe)
    assert isinstance(section.source, str)
    assert isinstance(section.dest, str)
    run = RunDirectory(options.run, patience=PATIENCE_S)
    seat = Seat(
        rank=int(os.environ["RANK"]),
        ranks=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_ranks=int(os.environ["LOCAL_WORLD_SIZE"]),
        attempt=Attempt.of(os.environ).number,
    )
    spent = 0.0
    if seat.rank == 0:
        # Of attempts before, to their last word; of this one, from where its worker started: torch and encoders are loaded on
        # machines that are paid for.
        rows = [*run.read_metrics(METRIC, all_attempts=True), *_endings(run)]
        spent = spent_hours(run.events("started"), rows, seat.attempt, now=time.time())
    budget = BudgetWatch(recipe.budget, spent, usd_per_hour())
    every = float(os.environ.get("ISTHMUS_LOOK_EVERY_S") or 10.0)
    device = _device(recipe, seat.local_rank)
    with JobTeam(run, seat, Path(os.environ[FOLDER_VARIABLE]), budget, every=every) as team:
        last = [Progress()]

        def note(progress: Progress) -> None:
            last[:] = [progress]
            if not progress.before:  # the last word of all tells of the whole dataset
                team.note(progress)

        manifest = encode_share(
            open_source(section.source, recipe.data.pictures, origin=section.origin),
            section.dest,
            recipe,
            captions=section.captions,
            device=device,
            bf16=section.precision == "bf16",
            batch_size=section.batch_size,
            rank=seat.rank,
            ranks=seat.ranks,
            threads=section.threads or _threads(seat.local_ranks, device),
            unit_bytes=section.unit,
            progress=note,
            interval=min(every, 5.0),
            team=team,
        )
        assert manifest is not None
        if seat.rank == 0:
            team.finish(manifest, last[0])
    return 0


def _endings(run: RunDirectory) -> list[dict[str, Any]]:
    """Events that tell how an attempt ended, and so when; one that was killed told none."""
    return [event for event in run.events() if event["type"] in _ENDINGS and "attempt" in event]


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    # Nothing needs saving: closed units are in the ledger, and no half of one is ever read.
    write_outcome("preempted", cause="ended while encoding; what is done stays done")
    os._exit(0)


def _device(recipe: Recipe, local_rank: int) -> str:
    """This rank's GPU; the CPU where the recipe asks for none and there is none."""
    import torch

    if not torch.cuda.is_available():
        if recipe.compute.gpu != "none":
            raise UsageError(
                f"compute.gpu is {recipe.compute.gpu}, and torch sees no CUDA device here",
                hint="an image whose torch fits the driver, or --set compute.gpu=none",
            )
        return "cpu"
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def _threads(local_ranks: int, device: str) -> int:
    from isthmus.core.encode.ahead import default_threads

    return default_threads(local_ranks, on_gpu=device != "cpu")


if __name__ == "__main__":
    sys.exit(to_the_end(main))
