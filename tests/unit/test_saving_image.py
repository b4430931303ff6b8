"""The memory that is staged is the file that DCP's own writer would have made."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from isthmus.core.train import saving_image
from isthmus.core.train.saving_plan import Planned, plan, signature


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of tensor that a checkpoint may hold."""
    made = torch.Generator().manual_seed(seed)
    return {
        "float": torch.randn(33, 7, generator=made),
        "half": torch.randn(5, generator=made).bfloat16(),
        "step": torch.tensor(float(seed)),
        "count": torch.tensor([seed, 2**40]),
        "flags": torch.tensor([True, False, seed > 0]),
        "empty": torch.zeros(0, 4),
        "turned": torch.randn(4, 6, generator=made).t(),
        "image": torch.randn(2, 3, 4, 5, generator=made).to(memory_format=torch.channels_last),
    }


def planned(tensors: dict[str, torch.Tensor]) -> Planned:
    return plan(tensors, rank=0, world_size=1, pin=False)


def write(made: Planned, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(made.metadata)
    for name, data in made.image.files().items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("part_bytes", [1 << 30, 1])
def test_dcp_reads_it_whatever_the_kinds_and_the_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(saving_image, "PART_BYTES", part_bytes)
    made = planned(state())
    assert len(made.image.files()) == (1 if part_bytes > 1 else len(state()))
    for seed in (0, 1):  # the same memory, filled again
        made.image.stage(state(seed))
        write(made, tmp_path)
        found = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
        dcp_load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        for name, tensor in state(seed).items():
            assert torch.equal(found[name], tensor), name


def test_every_archive_is_one_of_torch_save() -> None:
    made = planned(state())
    made.image.stage(state(3))
    (content,) = made.image.files().values()
    for index, place in made.image.places.items():
        archive = io.BytesIO(content[place.offset : place.offset + place.length])
        assert torch.equal(torch.load(archive, weights_only=True), state(3)[index.fqn]), index.fqn
        assert place.offset % 64 == 0


def test_what_is_staged_does_not_change_with_the_state() -> None:
    made = planned(state())
    tensors = state(1)
    made.image.stage(tensors)
    before = {name: bytes(data) for name, data in made.image.files().items()}
    for tensor in tensors.values():
        tensor.zero_()
    assert {name: bytes(data) for name, data in made.image.files().items()} == before


def test_another_shape_or_kind_needs_another_plan() -> None:
    first = signature(state())
    assert first == signature(state(5))
    assert first != signature(state() | {"float": torch.randn(33, 8)})
    assert first != signature(state() | {"float": torch.randn(33, 7).double()})
    assert first != signature({**state(), "more": torch.zeros(1)})
