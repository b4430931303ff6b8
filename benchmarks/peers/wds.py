"""webdataset: tar shards of 64 MB with .npy members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers import rows
from peers.harness import Reader, Request


def load() -> None:
    """Imports what reading needs."""
    import webdataset  # noqa: F401


def make(case: str, folder: Path, count: int) -> None:
    """Writes the rows as tar files."""
    import webdataset

    folder.mkdir(parents=True)
    with webdataset.ShardWriter(
        f"{folder}/part-%05d.tar", maxsize=64 << 20, maxcount=1 << 30, verbose=0
    ) as writer:
        for row in rows.rows(0, count):
            arrays = {f"{name}.npy": getattr(row, name) for name in rows.ARRAYS}
            writer.write({"__key__": row.key, "txt": row.caption, **arrays, "cls": row.length})


def open_reader(request: Request) -> Reader:
    """Shards shuffled, then rows through a buffer of 1024; its WebLoader."""
    import torch
    import webdataset

    def collate(batch: list[Any]) -> dict[str, Any]:
        columns = [list(column) for column in zip(*batch, strict=True)]
        arrays = (torch.stack([torch.from_numpy(value) for value in column]) for column in columns[3:])
        named = dict(zip(rows.ARRAYS, arrays, strict=True))
        return {"key": columns[0], "caption": columns[1], "length": columns[2], **named}

    shards = sorted(map(str, Path(request.folder).glob("*.tar")))
    members = [f"{name}.npy" for name in rows.ARRAYS]
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=100, seed=rows.SEED)
        .shuffle(1024)
        .decode()
        .to_tuple("__key__", "txt", "cls", *members)
    )
    loader = iter(
        webdataset.WebLoader(
            dataset, batch_size=request.batch, num_workers=request.workers, collate_fn=collate
        )
    )
    for _ in range(request.state or 0):  # there is no state to load: what came before is read again
        next(loader)
    return Reader(loader, state=lambda steps: steps)
