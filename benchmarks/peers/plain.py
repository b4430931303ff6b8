"""What is read with no library of loaders: the limit, and what one writes by hand over our files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peers import rows
from peers.harness import Batch, Reader, Request

WINDOW_BUFFERS = 16
"""As many batches as a shuffle window of 1,024 rows has."""


def load() -> None:
    """Imports what reading needs."""
    import pyarrow.parquet  # noqa: F401
    import torch.utils.data  # noqa: F401


def open_reader(request: Request) -> Reader:
    """`readinto`, or a torch Dataset over row groups."""
    if request.case == "by_hand":
        return _by_hand(request)
    return Reader(_readinto(request, 1 if request.case == "readinto" else WINDOW_BUFFERS), whole=False)


def _readinto(request: Request, count: int) -> Iterator[Batch]:
    """Our files front to back into `count` buffers of a batch's size, in turn; no shuffle, no columns."""
    import torch

    size = request.batch * rows.ROW_BYTES
    buffers = [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
    keys = [""] * request.batch
    names = list(rows.ARRAYS)
    ends = [request.batch * rows.LATENT_BYTES, 2 * request.batch * rows.LATENT_BYTES]
    parts = [dict(zip(names, torch.tensor_split(buffer, ends), strict=True)) for buffer in buffers]
    paths = sorted(Path(request.folder).glob("part-*.parquet"))
    at = filled = 0
    view = memoryview(buffers[0].numpy())
    while True:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while got := file.readinto(view[filled:]):
                    filled += got
                    if filled == size:
                        yield {"key": keys, **parts[at]}
                        filled, at = 0, (at + 1) % count
                        view = memoryview(buffers[at].numpy())


def _by_hand(request: Request) -> Reader:
    """An IterableDataset over row groups, shuffled, rows shuffled within each; torch's own DataLoader."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    def tensor(column: Any, shape: tuple[int, ...]) -> Any:
        array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        values = np.frombuffer(array.buffers()[1], np.float16)
        return torch.from_numpy(values).view(len(array), *shape)

    class Groups(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[dict[str, Any]]:
            worker = get_worker_info()
            mine, of = (worker.id, worker.num_workers) if worker else (0, 1)
            paths = sorted(Path(request.folder).glob("part-*.text.parquet"))
            groups = [(path, at) for path in paths for at in range(pq.ParquetFile(path).num_row_groups)]
            np.random.default_rng(rows.SEED).shuffle(groups)
            files: dict[Path, Any] = {}
            for path, at in groups[mine::of]:
                pixels = path.with_name(path.name.replace(".text.", f".{8 * rows.LATENT[1]}px."))
                for file in (path, pixels):
                    if file not in files:
                        files[file] = pq.ParquetFile(file)
                text, latents = (files[file].read_row_group(at) for file in (path, pixels))
                tokens = tensor(text["clip_tokens"], rows.TOKENS)
                mean, logvar = (tensor(latents[name], rows.LATENT) for name in list(rows.ARRAYS)[:2])
                keys, captions = text["key"].to_pylist(), text["caption"].to_pylist()
                lengths = text["clip_length"].to_pylist()
                for row in np.random.default_rng(at).permutation(len(keys)):
                    yield {
                        "key": keys[row],
                        "caption": captions[row],
                        "latent_mean": mean[row],
                        "latent_logvar": logvar[row],
                        "tokens": tokens[row],
                        "length": lengths[row],
                    }

    return Reader(iter(DataLoader(Groups(), batch_size=request.batch, num_workers=request.workers)))
