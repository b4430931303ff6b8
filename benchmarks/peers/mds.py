"""MosaicML streaming: MDS shards of 64 MB (its default), columns as fp16 arrays of fixed shape."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from peers import rows
from peers.harness import Reader, Request


def _torchvision() -> None:
    """Stands in for torchvision, which `streaming` imports for its image classes and must match torch's build."""
    stand_ins = {
        "datasets": {"VisionDataset": object},
        "transforms": {},
        "transforms.functional": {"to_tensor": None},
    }
    for name in ("", *stand_ins):
        full = f"torchvision.{name}".rstrip(".")
        module = types.ModuleType(full)
        module.__spec__ = ModuleSpec(full, None)
        vars(module).update(stand_ins.get(name, {}))
        sys.modules[full] = module


def load() -> None:
    """Imports what reading needs, and removes shared memory that a killed run left."""
    _torchvision()
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()


def make(case: str, folder: Path, count: int) -> None:
    """Writes the rows."""
    _torchvision()
    from streaming import MDSWriter

    kinds = {name: "ndarray:float16:" + ",".join(map(str, shape)) for name, shape in rows.ARRAYS.items()}
    columns = {"key": "str", "caption": "str", **kinds, "length": "int"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for row in rows.rows(0, count):
            writer.write(row._asdict())


def open_reader(request: Request) -> Reader:
    """StreamingDataset with its shuffle (py1e: shards, then rows within spans of shards) and its DataLoader."""
    from streaming import StreamingDataLoader, StreamingDataset

    where: dict[str, Any] = {"local": request.folder}
    if "://" in request.folder:
        import tempfile

        where = {
            "remote": request.folder,
            "local": tempfile.mkdtemp(prefix="mds-"),
            "predownload": 16 * request.batch,
        }
    dataset = StreamingDataset(**where, shuffle=True, shuffle_seed=rows.SEED, batch_size=request.batch)
    loader = StreamingDataLoader(dataset, batch_size=request.batch, num_workers=request.workers)
    if request.state is not None:
        loader.load_state_dict(request.state)
    return Reader(iter(loader), state=lambda steps: loader.state_dict())
