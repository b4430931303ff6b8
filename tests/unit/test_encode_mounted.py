"""A source that its cloud mounts or copies for a job: read under the names of where it is from."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from isthmus.core.encode import pieces
from isthmus.core.encode.sources import ImageRecord, Rejected, open_source


def picture() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (20, 20)).save(data, "png")
    return data.getvalue()


def tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def taken(source: Any) -> dict[str, ImageRecord]:
    return {one.key: one for one in source if isinstance(one, ImageRecord)}


def refused(source: Any) -> dict[str, str]:
    return {one.key: one.reason for one in source if isinstance(one, Rejected)}


def test_a_mounted_copy_is_read_as_what_it_is_a_copy_of(tmp_path: Path) -> None:
    """Names, keys, references and units are those of the origin; that a copy is younger tells nothing."""
    origin, folder = "s3://bucket/some/pets", tmp_path / "source"
    for name in ("tars", "rows", "files"):
        (folder / name).mkdir(parents=True)
    tar(folder / "tars" / "0.tar", [("0.png", picture()), ("0.txt", b"a cat")])
    (folder / "rows" / "x.png").write_bytes(picture())
    names = [f"{origin}/rows/x.png", "x.png", f"{folder}/rows/x.png"]
    pq.write_table(pa.table({"image": names, "text": ["a cat"] * 3}), folder / "rows" / "0.parquet")
    (folder / "files" / "a.png").write_bytes(picture())
    (folder / "files" / "a.txt").write_text("a cat")

    def units() -> list[str]:
        return [
            unit.digest
            for name in ("tars", "rows", "files")
            for unit in pieces.units_of(opened(name), max_bytes=1, max_pieces=1)
        ]

    def opened(name: str) -> Any:
        return open_source(str(folder / name), origin=f"{origin}/{name}")

    found = {name: opened(name) for name in ("tars", "rows", "files")}
    assert [found[name].description for name in found] == [
        "WebDataset tars of tars", "parquet files of rows", "pictures of the folder files",
    ]  # fmt: skip
    assert {key: record.source for key, record in taken(found["tars"]).items()} == {"0/0": "tars"}
    assert refused(found["rows"]) == {"0.parquet#0:2": "escapes"}  # as it would be where it is from
    assert list(taken(found["files"])) == ["a.png"]
    before = units()
    for file in folder.rglob("*.*"):
        os.utime(file, (1, 1))
    assert units() == before
    assert open_source(str(folder / "tars")).description == "WebDataset tars of tars"
