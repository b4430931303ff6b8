"""Lightning's litData: its own chunks of 64 MB, and its reader of parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import rows
from peers.harness import Reader, Request


def load() -> None:
    """Imports what reading needs."""
    import litdata  # noqa: F401


def _group(start: int) -> Iterator[dict[str, Any]]:
    import torch

    for row in rows.rows(start, min(start + 64, _COUNT)):
        fields = row._asdict()
        yield fields | {name: torch.from_numpy(fields[name].copy()) for name in rows.ARRAYS}


_COUNT = 0


def make(case: str, folder: Path, count: int) -> None:
    """Writes chunks, or plain parquet with litData's index beside it."""
    import litdata

    if case == "parquet":
        from peers.parquet import write_parquet

        write_parquet(folder, count)
        litdata.index_parquet_dataset(str(folder))
        return
    global _COUNT
    _COUNT = count
    litdata.optimize(
        _group,
        list(range(0, count, 64)),
        str(folder),
        chunk_bytes="64MB",
        num_workers=1,
        start_method="fork",
    )


def _collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    def column(name: str, shape: tuple[int, ...]) -> Any:
        values = [torch.frombuffer(row[name], dtype=torch.float16).view(shape) for row in batch]
        return torch.stack(values)

    return {
        "key": [row["key"] for row in batch],
        "caption": [row["caption"] for row in batch],
        "length": [row["length"] for row in batch],
        **{name: column(name, shape) for name, shape in rows.ARRAYS.items()},
    }


def open_reader(request: Request) -> Reader:
    """StreamingDataset with its shuffle (chunks, then rows within a chunk) and its DataLoader."""
    import litdata

    more: dict[str, Any] = {}
    how: dict[str, Any] = {}
    if request.case == "litdata_parquet":
        from litdata.streaming.item_loader import ParquetLoader

        more = {"item_loader": ParquetLoader(low_memory=True)}
        how = {"collate_fn": _collate}
        if request.workers:
            how["multiprocessing_context"] = "spawn"  # polars does not survive a fork, and litData says so
    dataset = litdata.StreamingDataset(request.folder, shuffle=True, seed=rows.SEED, drop_last=False, **more)
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=request.batch,
        num_workers=request.workers,
        **how,
    )
    if request.state is not None:
        loader.load_state_dict(request.state)
    return Reader(iter(loader), state=lambda steps: loader.state_dict())
