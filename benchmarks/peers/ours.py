"""Our shards and loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from peers import rows
from peers.harness import Batch, Reader, Request

LANES, WINDOW = 8, 1024
MEMORY_LIMIT = 500_000_000
"""What this order needs, and half as much again to read ahead in."""
REMOTE_MEMORY_LIMIT = 2_000_000_000
"""Over HTTP sixteen reads are in flight, which is what a rank's default of 4 GB is for."""
ROWS_PER_GROUP = 64


def make(case: str, folder: Path, count: int) -> None:
    """Writes the rows with the dataset writer."""
    import numpy as np

    from isthmus.storage.shards import (
        AutoencoderSpec,
        DatasetSpec,
        DatasetWriter,
        EncoderSpec,
        Sample,
        TextColumn,
    )

    spec = DatasetSpec(
        autoencoder=AutoencoderSpec("diffusers", "benchmark", rows.LATENT[0], 8, 0.13025),
        text=(EncoderSpec("clip", *rows.TOKENS),),
        resolutions=(8 * rows.LATENT[1],),
    )
    with DatasetWriter(
        str(folder), spec, rows_per_shard=rows.SHARD_ROWS, rows_per_group=ROWS_PER_GROUP
    ) as writer:
        for row in rows.rows(0, count):
            writer.add(
                Sample(
                    key=row.key,
                    captions=[row.caption],
                    text=[{"clip": (row.tokens, row.length, None)}],
                    latents={8 * rows.LATENT[1]: (row.latent_mean, row.latent_logvar)},
                )
            )
        empty = np.zeros((1, *rows.TOKENS), np.float16)
        writer.finish({"clip": TextColumn(empty, np.full(1, 2, np.int32))})


def load() -> None:
    """Imports what reading needs."""
    import isthmus.storage.shards
    import isthmus.storage.stream  # noqa: F401


def open_reader(request: Request) -> Reader:
    """The loader as a world of one rank: rows shuffled in windows of 1024 over eight lanes."""
    import torch

    from isthmus.storage.shards import open_dataset
    from isthmus.storage.stream import Loader, Plan, Segment

    loader = Loader(
        [open_dataset(request.folder)],
        [1],
        seed=rows.SEED,
        lanes=LANES,
        shuffle_window=WINDOW,
        stages=[8 * rows.LATENT[1]],
        plan=Plan((Segment(0, 0, 0, request.batch),)),
        memory_limit=REMOTE_MEMORY_LIMIT if "://" in request.folder else MEMORY_LIMIT,
        depth=request.depth,
        check=request.case == "ours_checked",
        start_step=0 if request.state is None else request.state,
    )

    def batches() -> Iterator[Batch]:
        for batch in loader:
            text = batch.text["clip"]
            yield {
                "key": batch.keys,
                "caption": batch.captions,
                "latent_mean": torch.from_numpy(batch.latent_mean),
                "latent_logvar": torch.from_numpy(batch.latent_logvar),
                "tokens": torch.from_numpy(text.tokens),
                "length": torch.from_numpy(text.length),
            }

    return Reader(batches(), state=lambda steps: steps, close=loader.close, stats=loader.stats)
