"""The files that a rank writes of a checkpoint, as memory: laid out once, filled anew for every checkpoint.

A file of ours is what DCP's own writer makes: archives of `torch.save`, one for each tensor, one behind the other.
Everything in it but the tensors' values depends on names, shapes and dtypes alone. So the bytes around the values are
made once, and a checkpoint is a copy of the values to their places: what lies in memory then is the file, ready to be
hashed and sent in large pieces, without serialising anything and without a line of Python for each tensor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

PART_BYTES = 1 << 30
"""A file ends with the tensor that brings it to this size or beyond."""
_ALIGNMENT = 64
"""Of archives within a file. torch.save aligns values within an archive to the same, so that they can be views."""


@dataclass(frozen=True, slots=True)
class _Archive:
    """A `torch.save` file of one tensor without its values."""

    before: bytes
    values: int
    """Bytes of the tensor's values, between `before` and `after`."""
    after: bytes

    @property
    def size(self) -> int:
        return len(self.before) + self.values + len(self.after)


class _Recorder:
    """What `torch.save` writes to; where it would write values, it seeks."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.values = 0
        self.after = bytearray()

    def write(self, data: bytes) -> int:
        (self.after if self.values else self.before).extend(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> None:
        if whence != os.SEEK_CUR or self.values:
            raise OSError("torch.save was expected to leave room for one tensor's values, once")
        self.values = offset

    def flush(self) -> None:
        """Nothing is held back."""


def _archive(shape: torch.Size, dtype: torch.dtype) -> _Archive:
    recorder = _Recorder()
    empty = torch.empty(shape, dtype=dtype)  # never touched, so it takes no memory
    with torch.serialization.skip_data():
        torch.save(empty, recorder)  # type: ignore[arg-type]
    if recorder.values != empty.nbytes or (recorder.values and len(recorder.before) % dtype.itemsize):
        raise RuntimeError(f"this torch.save lays out a tensor of {shape} in another way than expected")
    return _Archive(bytes(recorder.before), recorder.values, bytes(recorder.after))


class Image:
    """This rank's files of a checkpoint.

    Args:
        items: DCP's plan for this rank: what it writes.
        rank: names the files `__<rank>_<number>.distcp`, as DCP does.
        pin: page-lock the memory, for copies from a GPU at the full rate of its bus.
    """

    def __init__(self, items: Sequence[WriteItem], rank: int, *, pin: bool = False) -> None:
        self.places: dict[MetadataIndex, _StorageInfo] = {}
        """Where each tensor's archive is, for DCP's metadata."""
        archives: dict[tuple[torch.Size, torch.dtype], _Archive] = {}
        layout: list[list[tuple[WriteItem, int, _Archive]]] = []
        sizes: list[int] = []
        for item in items:
            if item.tensor_data is None:
                raise TypeError(f"{item.index.fqn}: a checkpoint holds tensors only")
            key = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
            archive = archives.get(key) or archives.setdefault(key, _archive(*key))
            if not sizes or sizes[-1] >= PART_BYTES:
                layout.append([])
                sizes.append(0)
            start = -(-sizes[-1] // _ALIGNMENT) * _ALIGNMENT
            layout[-1].append((item, start, archive))
            sizes[-1] = start + archive.size
        self._files: dict[str, Tensor] = {}
        self._keys: list[str] = []
        self._targets: list[Tensor] = []
        for number, (part, size) in enumerate(zip(layout, sizes, strict=True)):
            name = f"__{rank}_{number}.distcp"
            # Zeros that are written, so that the first copy into it does not wait for the kernel to find pages.
            memory = torch.empty(size, dtype=torch.uint8).fill_(0)
            if pin:
                _pin(memory)
            self._files[name] = memory
            for item, start, archive in part:
                self._place(name, memory, item, start, archive)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(memory.numel() for memory in self._files.values())

    def files(self) -> dict[str, memoryview]:
        """File name -> its bytes, valid until the next `stage`."""
        return {name: memory.numpy().data for name, memory in self._files.items()}

    def stage(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's values to their places; when it returns, `state` may change.

        Args:
            state: key -> the part of the tensor that this rank holds, on any device.
        """
        sources = [state[key] for key in self._keys]
        with torch.no_grad():
            if sources:
                torch._foreach_copy_(self._targets, sources, non_blocking=True)
            for device in {source.device for source in sources if source.device.type == "cuda"}:
                torch.cuda.current_stream(device).synchronize()

    def _place(self, name: str, memory: Tensor, item: WriteItem, start: int, archive: _Archive) -> None:
        assert item.tensor_data is not None
        begin = start + len(archive.before)
        end = begin + archive.values
        view = memory.numpy().data
        view[start:begin] = archive.before
        view[end : end + len(archive.after)] = archive.after
        self.places[item.index] = _StorageInfo(name, start, archive.size)
        if archive.values:
            values = memory[begin:end].view(item.tensor_data.properties.dtype)
            self._keys.append(item.index.fqn)
            self._targets.append(values.view(item.tensor_data.chunk.sizes))


def _pin(memory: Tensor) -> None:
    """Page-locks memory as it is: torch's own allocator of pinned memory rounds up to a power of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    # Refused (a limit on locked memory): the copies still work, at a lower rate.
    runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
