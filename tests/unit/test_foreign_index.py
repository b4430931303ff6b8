"""`isthmus data index`: what fits is indexed, what does not is one line that says which file, where, and what to do."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus.errors import CorruptShard, DataError, IsthmusError, UsageError
from isthmus.storage.shards import open_dataset, stats, verify
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import EXAMPLE, parse_settings
from isthmus.storage.shards.manifest import Manifest
from isthmus.storage.shards.synthetic import TINY, write_synthetic


def index(folder: Path, *roots: Path, dest: Path | None = None, **changes: Any) -> Manifest:
    settings = parse_settings(foreign.mapped(**changes))
    return index_files([str(folder), *map(str, roots)], dest and str(dest), settings, replace=True)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = foreign.samples(20)
    foreign.write(tmp_path / "files" / "x.parquet", foreign.table(rows[:12]))
    foreign.write(tmp_path / "files" / "y.parquet", foreign.table(rows[12:]))
    return tmp_path / "files"


def test_the_files_stay_as_they_are_and_the_manifest_says_what_they_hold(files):
    before = {path: path.read_bytes() for path in files.iterdir()}
    manifest = index(files)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(path.name for path in files.iterdir() if path not in before) == [
        "_index.parquet",
        "_null.parquet",
        "_prompts.parquet",
        "manifest.json",
    ]
    dataset = open_dataset(str(files))
    assert dataset.manifest == manifest
    assert (manifest.samples, manifest.shards, manifest.blocks) == (20, 2, 3)
    assert manifest.size == sum(map(len, before.values()))
    assert dataset.prompts == []
    assert json.loads((files / "manifest.json").read_text())["schema_version"] == 2
    told = stats(str(files))
    assert told["layout"] == "foreign"
    assert told["resolutions"]["64"]["samples"] == 20  # type: ignore[index]
    report = verify(str(files))
    assert report.ok
    assert (report.files, report.rows, report.size) == (2, 20, manifest.size)


def test_the_fingerprint_covers_files_and_map(files):
    first = index(files).fingerprint
    assert index(files).fingerprint == first
    assert index(files, **{"columns.flipped": None}).fingerprint != first
    foreign.write(files / "y.parquet", foreign.table(foreign.samples(8, first=12, seed=1)))
    assert index(files).fingerprint != first


def test_buckets_are_told_by_columns_names_or_patterns(tmp_path):
    square, wide = foreign.samples(8), foreign.samples(8, first=8, bucket="2:1")
    sides = {"height": "px_h", "width": "px_w"}
    for name, rows, height in (("a/square", square, 64), ("b/wide", wide, 32)):
        ratio = "1:1" if height == 64 else "2:1"
        extra = {
            "px_h": pa.array([height] * 8),
            "px_w": pa.array([64] * 8),
            "aspect": pa.array([ratio] * 8),
            "cells_h": pa.array([height // 8] * 8),
            "cells_w": pa.array([8] * 8),
        }
        foreign.write(tmp_path / f"{name}.parquet", foreign.table(rows, **extra))
    told = []
    for rule in (
        sides,
        {"height": "cells_h", "width": "cells_w", "unit": "latent"},
        {"column": "aspect"},
        {"files": {"a/*": "1:1", "*wide*": "2:1"}},
    ):
        manifest = index(tmp_path, bucket=rule)
        told.append((manifest.latent_shapes, manifest.rows))
    shapes = {"1:1": {64: (4, 8, 8)}, "2:1": {64: (4, 4, 8)}}
    assert told == [(shapes, {"1:1": {64: 8}, "2:1": {64: 8}})] * 4
    # Without statistics the column itself is looked at.
    for path in tmp_path.glob("*/*.parquet"):
        foreign.write(path, pq.read_table(path), write_statistics=False)
    assert index(tmp_path, bucket=sides).latent_shapes == shapes
    assert index(tmp_path, bucket={"column": "aspect"}).latent_shapes == shapes


def test_a_row_group_of_two_shapes_is_refused(tmp_path):
    rows = foreign.samples(8)
    sides = [pa.array([64] * 4 + [32] * 4), pa.array([64] * 8)]
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, px_h=sides[0], px_w=sides[1]))
    with pytest.raises(
        UsageError, match=r"x.parquet: row group 0 mixes shapes: its px_h goes from 32 to 64"
    ) as e:
        index(tmp_path, bucket={"height": "px_h", "width": "px_w"})
    assert "isthmus data convert" in (e.value.hint or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns.key": "ids"}, r"x.parquet: no column ids \(did you mean id\?\)"),
        ({"columns.key": "latent_x"}, r"no column latent_x \(did you mean latent\?\)"),
        ({"columns.latents.64.mean": "text"}, r"column text is neither binary nor a list; it is string"),
        (
            {"columns.latents.64.mean": "clip"},
            r"its first row has 24 values, which is no latent of aspect 1:1",
        ),
        (
            {"columns.latents": {512: "latent"}},
            r"8 x 8 cells are 64 x 64 pixels, which is no bucket at 512 px",
        ),
        ({"autoencoder.latent_channels": 3}, r"its first row has 256 values: no \[3, H, W\] of bucket 1:1"),
        (
            {"autoencoder.latent_channel": 4},
            r"autoencoder.latent_channel is not a field \(did you mean latent_ch",
        ),
        ({"autoencoder.factor": 0}, r"factor must be a whole number from 1"),
        ({"text.t5.width": 9}, r"column t5: it has 24 values, not at most 27, a multiple of 9"),
        (
            {"text.clip_l.pooled_width": None},
            r"captions.0.clip_l has a pooled vector, its pooled_width is None",
        ),
        ({"columns.captions.0.clip_l.pooled": None}, r"clip_l has no pooled vector, its pooled_width is 5"),
        ({"columns.captions.0.t5": None}, r"captions.0 does not say where the tokens of t5 are"),
        ({"columns.captions.0.t55": "t5"}, r"captions.0.t55 is not a field \(did you mean t5\?\)"),
        ({"columns.captions.0.t5.tokens": None}, r"captions.0.t5.tokens must be a column's name, not None"),
        (
            {"columns.captions.0.clip_l.length": "text"},
            r"column text does not hold whole numbers; it is string",
        ),
        ({"columns.flipped": "text"}, r"column text is neither true and false nor whole numbers"),
        ({"columns.crop": ["top", "left"]}, r"columns.crop must be \[TOP, LEFT, HEIGHT, WIDTH\]"),
        ({"columns.latents": None}, r"columns.latents must be a mapping"),
        ({"bucket": None}, r"does not say the bucket"),
        ({"bucket": "wide"}, r"no \[4, H, W\] of bucket wide \(tell it: `shapes: "),
        ({"bucket": "4:3"}, r"its first row has 256 values, which is no latent of aspect 4:3"),
        ({"bucket": {"files": {"z*": "1:1"}}}, r"x.parquet: no pattern of bucket.files fits its name"),
        ({"bucket": {"column": "text", "height": "h"}}, r"bucket needs one of"),
        ({"bucket": {"height": "h", "width": "w"}}, r"row group 0 mixes shapes"),
        ({"shapes": {"1:1": [4, 8]}}, r"shapes.1:1 must be \[CHANNELS, HEIGHT, WIDTH\]"),
        ({"shapes": {"1:1": [4, 8, 4]}}, r"its first row has 256 values, not \[4, 8, 4\]"),
        ({"shapes": {"3:2": [4, 8, 4]}}, r"shapes.3:2: the files have no such bucket, but 1:1"),
        ({"null_text": None}, r"does not say the embedding of the empty caption"),
        ({"null_text": "nothing.npz"}, r"nothing.npz: null_text: there is no such file"),
        ({"null_text": {"key": "nobody"}}, r"no row has the key 'nobody'"),
        (
            {"columns.latents.64.mean": {"column": "latent", "dtype": "float32"}},
            r"128 values, which is no latent",
        ),
    ],
)
def test_a_map_that_does_not_fit_is_one_clear_line(files, changes, message):
    with pytest.raises(IsthmusError, match=message) as error:
        index(files, **changes)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == (1 if isinstance(error.value, CorruptShard) else 2)
    assert not (files / "manifest.json").exists()


def test_shapes_may_be_told_where_a_name_does_not_tell_them(files):
    assert index(files, bucket="odd", shapes={"odd": [4, 4, 16]}).latent_shapes == {"odd": {64: (4, 4, 16)}}


def test_row_groups_too_large_to_be_read_at_once_are_refused(tmp_path):
    table = foreign.table(foreign.samples(2))
    foreign.write(tmp_path / "x.parquet", pa.concat_tables([table] * 2050), row_group_size=5000)
    with pytest.raises(
        UsageError, match=r"row group 0 has 4100 rows; a block is read at once and has at most 4096"
    ):
        index(tmp_path)


def test_empty_files_and_row_groups_are_left_out(tmp_path):
    table = foreign.table(foreign.samples(8))
    foreign.write(tmp_path / "a.parquet", table.slice(0, 0))
    with pq.ParquetWriter(tmp_path / "b.parquet", table.schema) as writer:
        for rows in (0, 3, 0, 5):
            writer.write_table(table.slice(0, rows))
    manifest = index(tmp_path)
    dataset = open_dataset(str(tmp_path))
    assert (manifest.samples, manifest.shards) == (8, 1)
    assert dataset.index.rows.tolist() == [3, 5]
    assert ForeignReader(dataset, 64).read(1).strings["key"] == [f"f{n}" for n in range(5)]
    assert verify(str(tmp_path)).ok
    for path in tmp_path.glob("b.*"):
        path.unlink()
    with pytest.raises(UsageError, match="the files have no rows"):
        index(tmp_path)
    with pytest.raises(UsageError, match="no file named"):
        index_files([str(tmp_path / "nothing")], None, parse_settings(foreign.MAP))


def test_an_index_elsewhere_lists_the_roots_after_it(files, tmp_path):
    more = tmp_path / "more"
    foreign.write(more / "deep" / "z.parquet", foreign.table(foreign.samples(8, first=20)))
    index(files, more, dest=tmp_path / "dest")
    assert not (files / "manifest.json").exists()
    roots = [str(tmp_path / "dest"), str(files), str(more)]
    dataset = open_dataset(roots)
    reader = ForeignReader(dataset, 64)
    keys = [key for block in range(len(dataset.index)) for key in reader.read(block).strings["key"]]
    # By name, whatever the root.
    assert sorted(keys) == sorted(f"f{number}" for number in range(28))
    assert verify(roots).ok
    foreign.write(more / "x.parquet", foreign.table(foreign.samples(8)))
    with pytest.raises(UsageError, match=r"has a file x.parquet, too"):
        index(files, more, dest=tmp_path / "other")


def test_an_own_dataset_is_never_replaced(tmp_path, files):
    write_synthetic(str(tmp_path / "own"), 8)
    with pytest.raises(UsageError, match="there is a dataset already"):
        index(files, dest=tmp_path / "own")
    settings = parse_settings(foreign.MAP)
    index_files([str(files)], None, settings)
    with pytest.raises(UsageError, match=r"there is an index already \(--replace"):
        index_files([str(files)], None, settings)
    index_files([str(files)], None, settings, replace=True)


def safetensors(arrays: dict[str, Any]) -> bytes:
    header, body = {}, b""
    for name, array in arrays.items():
        data = array.tobytes()
        kind = {"float16": "F16", "float32": "F32", "int64": "I64", "uint16": "BF16"}[str(array.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_the_null_embedding_from_files_rows_zeros_and_another_dataset(files, tmp_path):
    clip = np.arange(18, dtype=np.float32).reshape(3, 6)
    arrays = {
        "clip_l_tokens": clip,
        "clip_l_pooled": np.ones((1, 5), np.float16),
        "t5_tokens": (np.full((1, 3, 8), 1.5, np.float32).view(np.uint32) >> 16).astype(np.uint16),
        "t5_length": np.array(2),
    }
    (tmp_path / "null.safetensors").write_bytes(safetensors(arrays))
    np.savez(tmp_path / "null.npz", **{**arrays, "t5_tokens": np.full((1, 3, 8), 1.5)})
    for name in ("null.safetensors", "null.npz"):
        index(files, null_text=str(tmp_path / name))
        null = open_dataset(str(files)).null_text
        assert null["clip_l"].tokens[0, :3].tolist() == clip.tolist()
        assert not null["clip_l"].tokens[0, 3:].any()
        assert null["clip_l"].length.tolist() == [3]
        assert null["t5"].tokens.tolist() == [[[1.5] * 8] * 3]
        assert null["t5"].length.tolist() == [2]
    index(files, null_text={"key": "f13"})
    row = foreign.samples(1, first=13)[0].text[0]
    null = open_dataset(str(files)).null_text
    assert null["clip_l"].tokens[0].tobytes() == row["clip_l"][0].tobytes()
    assert null["clip_l"].pooled is not None
    assert null["clip_l"].pooled[0].tobytes() == row["clip_l"][2].tobytes()  # type: ignore[union-attr]
    assert null["t5"].length.tolist() == [row["t5"][1]]
    index(files, null_text="zeros")
    assert open_dataset(str(files)).null_text["t5"].length.tolist() == [3]
    np.savez(tmp_path / "pickled.npz", clip_l_tokens=np.array([{}], object))
    (tmp_path / "cut.safetensors").write_bytes(safetensors(arrays)[:40])
    for name in ("pickled.npz", "cut.safetensors"):
        with pytest.raises(UsageError, match=r"null_text: not such an .npz or .safetensors file"):
            index(files, null_text=str(tmp_path / name))
    write_synthetic(str(tmp_path / "own"), 8)
    like = open_dataset(str(tmp_path / "own"))
    told = foreign.mapped(autoencoder=None, text=None, null_text=None)
    index_files([str(files)], None, parse_settings(told, like=like.spec), replace=True, like=like)
    mine = open_dataset(str(files))
    assert mine.spec.text == TINY.text
    assert mine.null_text["t5"].tokens.tobytes() == like.null_text["t5"].tokens.tobytes()


def test_a_hostile_index_cannot_lead_out_of_the_root(files):
    index(files)
    from isthmus.storage.shards.foreign_index import wrong_name

    assert wrong_name("a/b.parquet") is None
    for name in ("", "/etc/x", "../x", "a/../../x", "a//b", "a\\b", "a\0b", "x" * 2000):
        assert wrong_name(name)
    manifest = json.loads((files / "manifest.json").read_text())
    manifest["columns"]["key"] = "text"
    (files / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="not a valid manifest"):
        open_dataset(str(files))


def test_verify_finds_what_is_wrong(files):
    index(files)
    rows = foreign.samples(12)
    rows[9].latents[64][0][0, 0, 0] = np.nan
    foreign.write(files / "x.parquet", foreign.table(rows))
    first = verify(str(files))
    assert [problem.shard for problem in first.problems] == ["x.parquet"]  # replaced
    index(files)
    (problem,) = verify(str(files)).problems
    assert str(
        problem
    ) == "x.parquet, row_group 1, row 1, column latent_mean: latent_mean at 64 px is not finite".replace(
        "row_group", "row group"
    )
    (files / "y.parquet").unlink()
    problems = {problem.shard: problem.message for problem in verify(str(files)).problems}
    assert problems["y.parquet"] == "the file is missing"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isthmus", "data", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_command(files, tmp_path):
    (tmp_path / "map.yaml").write_text(json.dumps(foreign.MAP))
    done = run(
        "index", str(files), "--columns", str(tmp_path / "map.yaml"), "--dest", str(tmp_path / "d"), "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["dataset"] == [str(tmp_path / "d"), str(files)]
    assert told["samples"] == 20
    assert told["buckets"] == {"1:1": {"samples": 20, "latents": {"64": [4, 8, 8]}}}
    (tmp_path / "map.yaml").write_text(json.dumps(foreign.mapped(bucket=None)))
    wrong = run("index", str(files), "--columns", str(tmp_path / "map.yaml"))
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[0] == f"error: {tmp_path}/map.yaml: the map file does not say the bucket"
    assert run("verify", str(tmp_path / "d"), str(files)).returncode == 0


def test_the_example_is_a_map():
    from isthmus.core.recipe.document import parse

    settings = parse_settings(parse(EXAMPLE).data)
    assert settings.columns.latents[512].mean.column == "latent"
    assert (
        settings.columns.to_json()
        == parse_settings({**parse(EXAMPLE).data, "columns": settings.columns.to_json()}).columns.to_json()
    )


def test_files_and_index_in_a_store(files):
    import fsspec

    store = fsspec.filesystem("memory")
    for path in files.iterdir():
        store.pipe_file(f"/theirs/deep/{path.name}", path.read_bytes())
    index_files(["memory://theirs"], "memory://dest", parse_settings(foreign.MAP))
    roots = ["memory://dest", "memory://theirs"]
    assert verify(roots).ok
    dataset = open_dataset(roots)
    assert dataset.index.shard_names == ("deep/x.parquet", "deep/y.parquet")
    assert ForeignReader(dataset, 64).read(2).strings["key"] == [f"f{number}" for number in range(12, 20)]
    store.rm("/theirs", recursive=True)
    store.rm("/dest", recursive=True)
