"""HF datasets: Arrow files that are memory-mapped, and parquet that is streamed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from peers import rows
from peers.harness import LISTING, Batch, Reader, Request


def load() -> None:
    """Imports what reading needs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    import torchdata.stateful_dataloader  # noqa: F401

    datasets.disable_progress_bars()
    # A pause of seconds at the end of an epoch, which would be counted as reading.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0


def make(case: str, folder: Path, count: int) -> None:
    """Writes parquet, or Arrow files as `save_to_disk` does."""
    if case == "parquet":
        from peers.parquet import write_parquet

        write_parquet(folder, count)
        return
    load()
    import datasets
    from datasets.arrow_writer import ArrowWriter

    from peers.parquet import table

    folder.mkdir(parents=True)
    for shard, start in enumerate(range(0, count, rows.SHARD_ROWS)):
        with ArrowWriter(path=str(folder / f"part-{shard:05d}.arrow")) as writer:
            for at in range(start, min(start + rows.SHARD_ROWS, count), 64):
                writer.write_table(table(at, min(at + 64, start + rows.SHARD_ROWS, count)))
            writer.finalize()
    del datasets


def _tensor(column: Any, shape: tuple[int, ...]) -> Any:
    import numpy as np
    import pyarrow as pa
    import torch

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    if pa.types.is_fixed_size_binary(array.type):
        values = np.frombuffer(array.buffers()[1], np.float16)
        start = array.offset * int(np.prod(shape))
    else:
        values = np.frombuffer(array.buffers()[2], np.float16)
        start = np.frombuffer(array.buffers()[1], np.int32 if pa.types.is_binary(array.type) else np.int64)
        start = int(start[array.offset]) // 2
    values = values[start : start + len(array) * int(np.prod(shape))]
    return torch.from_numpy(values).view(len(array), *shape)


def _arrow_batch(table: Any) -> Batch:
    return {
        "key": table["key"].to_pylist(),
        "caption": table["caption"].to_pylist(),
        "length": table["length"].to_pylist(),
        **{name: _tensor(table[name], shape) for name, shape in rows.ARRAYS.items()},
    }


def _collate(batch: list[dict[str, Any]]) -> Batch:
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
    """hf_arrow: rows drawn at random; hf_parquet: a buffer of 1024 rows; hf_arrow_in_order: no shuffle."""
    import datasets
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    more: dict[str, Any] = {"batch_size": request.batch, "num_workers": request.workers}
    if request.case == "hf_parquet":
        if "://" in request.folder:
            with urlopen(f"{request.folder}/{LISTING}") as answer:
                names = json.load(answer)["files"]
            files = [f"{request.folder}/{name}" for name in names]
        else:
            files = sorted(map(str, Path(request.folder).glob("*.parquet")))
        stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
        source = stream.shuffle(seed=rows.SEED, buffer_size=1024)
        loader = StatefulDataLoader(source, collate_fn=_collate, **more)
    else:
        paths = sorted(map(str, Path(request.folder).glob("*.arrow")))
        whole = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in paths])
        if request.case == "hf_arrow":
            loader = StatefulDataLoader(whole, shuffle=True, collate_fn=_collate, **more)
        elif request.case == "hf_arrow_tables":

            class Tables(torch.utils.data.Dataset):  # type: ignore[misc]
                arrow = whole.with_format("arrow")

                def __len__(self) -> int:
                    return len(self.arrow)

                def __getitems__(self, indices: list[int]) -> Batch:
                    return _arrow_batch(self.arrow[indices])

            loader = StatefulDataLoader(Tables(), shuffle=True, collate_fn=lambda batch: batch, **more)
        else:

            class InOrder(torch.utils.data.IterableDataset):  # type: ignore[misc]
                def __iter__(self) -> Iterator[Batch]:
                    for table in whole.with_format("arrow").iter(batch_size=request.batch):
                        yield _arrow_batch(table)

            loader = StatefulDataLoader(InOrder(), batch_size=None, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return Reader(iter(loader), state=lambda steps: loader.state_dict())
