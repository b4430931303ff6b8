"""Parquet made by others: every layout gives the values that were put in, and what is wrong has its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign
import numpy as np
import pyarrow as pa
import pytest

from isthmus.errors import CorruptShard
from isthmus.storage.shards import Dataset, open_dataset
from isthmus.storage.shards.blocks import Block
from isthmus.storage.shards.foreign import ForeignReader
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.shards.spec import Sample


def indexed(folder: Path, **changes: Any) -> Dataset:
    index_files([str(folder)], None, parse_settings(foreign.mapped(**changes)), replace=True)
    return open_dataset(str(folder))


def blocks(dataset: Dataset, caption: int = 0) -> list[Block]:
    reader = ForeignReader(dataset, 64)
    found = [reader.read(block, caption) for block in range(len(dataset.index))]
    for number, block in enumerate(found):
        held = sum(values.nbytes for values in block.fixed.values())
        assert held <= reader.size(number, caption) <= held + 400 * block.rows
    return found


def check(found: list[Block], rows: list[Sample]) -> None:
    """Every value of every row, bit for bit."""
    wanted = iter(rows)
    for block in found:
        for row in range(block.rows):
            sample = next(wanted)
            assert block.strings["key"][row] == sample.key
            assert block.strings["caption"][row] == sample.captions[0]
            fixed = {name: values[row].tobytes() for name, values in block.fixed.items()}
            mean, logvar = sample.latents[64]
            told = {"latent_mean": mean.tobytes(), "latent_logvar": logvar.tobytes()}
            for name, (tokens, length, pooled) in sample.text[0].items():
                told[f"{name}_tokens"] = tokens.tobytes()
                assert block.numbers[f"{name}_length"][row] == length
                if pooled is not None:
                    told[f"{name}_pooled"] = pooled.tobytes()
            assert fixed == told
            numbers = (
                "original_height",
                "original_width",
                "crop_top",
                "crop_left",
                "crop_height",
                "crop_width",
            )
            assert tuple(int(block.numbers[name][row]) for name in numbers) == (
                *sample.original_size,
                *sample.crop,
            )
            assert bool(block.numbers["flipped"][row]) == sample.flipped
    assert next(wanted, None) is None


@pytest.mark.parametrize("layout", foreign.LAYOUTS, ids=lambda layout: layout.__doc__)
@pytest.mark.parametrize(
    "options",
    [
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "data_page_version": "2.0", "data_page_size": 256},
        {"compression": "snappy", "use_dictionary": True, "dictionary_pagesize_limit": 600},
        {"compression": "lz4", "store_schema": False},
        {"compression": "gzip", "write_page_checksum": True},
    ],
    ids=lambda options: options["compression"],
)
def test_values_come_back_bit_for_bit(tmp_path, layout, options):
    rows = foreign.samples(20)
    # A second file of another row group size; tables in slices give arrays with offsets when they were written.
    foreign.write(tmp_path / "a" / "x.parquet", foreign.table(rows[:13], layout), **options)
    foreign.write(tmp_path / "b.parquet", foreign.table(rows[13:], layout), **options, row_group_size=3)
    dataset = indexed(tmp_path)
    assert dataset.index.shard_names == ("a/x.parquet", "b.parquet")
    assert dataset.index.rows.tolist() == [8, 5, 3, 3, 1]
    check(blocks(dataset), rows)


def test_values_that_repeat_are_in_a_dictionary_and_text_may_be_categories(tmp_path):
    rows = foreign.samples(2) * 4
    table = foreign.table(rows, text=pa.array([row.captions[0] for row in rows]).dictionary_encode())
    foreign.write(tmp_path / "x.parquet", table)
    check(blocks(indexed(tmp_path)), rows)


def test_what_the_files_lack_has_its_default(tmp_path):
    rows = foreign.samples(3)
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, t5_n=None, spread=None, id=None))
    told = dict.fromkeys(["columns.key", "columns.original_size", "columns.crop", "columns.flipped"])
    dataset = indexed(
        tmp_path,
        **told,
        **{"columns.captions.0.t5": "t5", "columns.captions.0.caption": None, "columns.latents.64": "latent"},
    )
    (block,) = blocks(dataset)
    assert block.strings == {"key": [f"x.parquet#0:{row}" for row in range(3)], "caption": [""] * 3}
    assert block.numbers["t5_length"].tolist() == [3, 3, 3]
    assert block.numbers["original_height"].tolist() == block.numbers["crop_width"].tolist() == [64] * 3
    assert block.numbers["crop_top"].tolist() == [0] * 3
    assert not block.numbers["flipped"].any()
    logvar = np.ascontiguousarray(block.fixed["latent_logvar"]).view(np.float16)
    assert (logvar == -30).all()
    # What the trainer adds to a latent: exp(logvar / 2) x noise, nothing beside fp16's own steps.
    assert np.exp(logvar.astype(np.float32) / 2).max() < 1e-6


@pytest.mark.parametrize("layout", [foreign.as_binary, foreign.as_list16, foreign.as_nested])
@pytest.mark.parametrize("by_column", [True, False])
def test_short_tokens_are_padded(tmp_path, layout, by_column):
    rows = foreign.samples(9)
    cut = [row.text[0]["t5"][0][: row.text[0]["t5"][1]] for row in rows]
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, layout, t5=layout(cut)))
    words = {"tokens": "t5", "length": "t5_n"} if by_column else {"tokens": "t5", "ragged": True}
    found = blocks(indexed(tmp_path, **{"columns.captions.0.t5": words}))
    at = 0
    for block in found:
        for tokens, length in zip(block.fixed["t5_tokens"], block.numbers["t5_length"], strict=True):
            wanted = np.zeros((3, 8), np.float16)
            wanted[: len(cut[at])] = cut[at]
            assert tokens.tobytes() == wanted.tobytes()
            assert length == len(cut[at])
            at += 1


def test_raw_fp32_and_scaled_latents(tmp_path):
    rows = foreign.samples(4)
    raw = foreign.as_binary([row.latents[64][0].astype(np.float32) for row in rows])
    scaled = foreign.as_list32([row.latents[64][1].astype(np.float32) * np.float32(0.5) for row in rows])
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, latent=raw, spread=scaled))
    dataset = indexed(
        tmp_path,
        **{"columns.latents.64": {"mean": {"column": "latent", "dtype": "float32"}, "logvar": "spread"}},
    )
    (block,) = blocks(dataset)
    assert [row.tobytes() for row in block.fixed["latent_mean"]] == [
        row.latents[64][0].tobytes() for row in rows
    ]
    dataset = indexed(tmp_path, **{"columns.latents.64": {"mean": "spread", "scaled": True}})
    (block,) = blocks(dataset)
    assert [row.tobytes() for row in block.fixed["latent_mean"]] == [
        row.latents[64][1].tobytes() for row in rows
    ]


def test_several_captions_each_have_their_columns(tmp_path):
    rows, others = foreign.samples(8), foreign.samples(8, seed=5)
    second = foreign.table(others, foreign.as_list16)
    table = foreign.table(rows)
    for name in ("text", "clip", "clip_n", "clip_pooled", "t5", "t5_n"):
        table = table.append_column(f"{name}2", second.column(name))
    foreign.write(tmp_path / "x.parquet", table)
    first = foreign.MAP["columns"]["captions"][0]  # type: ignore[index]
    more = {
        "caption": "text2",
        "clip_l": {"tokens": "clip2", "length": "clip_n2", "pooled": "clip_pooled2"},
        "t5": {"tokens": "t52", "length": "t5_n2"},
    }
    dataset = indexed(tmp_path, **{"columns.captions": [first, more]})
    assert dataset.spec.captions == 2
    check(blocks(dataset), rows)
    for row, other in zip(rows, others, strict=True):
        row.captions, row.text = other.captions, other.text
    check(blocks(dataset, 1), rows)


def test_a_null_caption_is_empty(tmp_path):
    rows = foreign.samples(3)
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, text=pa.array(["a", None, "c"])))
    (block,) = blocks(indexed(tmp_path))
    assert block.strings["caption"] == ["a", "", "c"]


def damaged(values: list[Any], row: int, value: Any) -> Any:
    return pa.array([*values[:row], value, *values[row + 1 :]], pa.binary())


@pytest.mark.parametrize(
    ("column", "array", "message"),
    [
        ("latent", lambda v: damaged(v, 2, None), "row 2, column latent: it is null"),
        ("latent", lambda v: damaged(v, 2, v[2][:-2]), "row 2, column latent: it has 255 values, not 256"),
        ("spread", lambda v: damaged(v, 4, v[4] + b"x"), "row 4, column spread: it has 513 bytes, not 256"),
        ("clip", lambda v: damaged(v, 0, b""), "row 0, column clip_n: . tokens, the row holds 0"),
        (
            "clip",
            lambda v: damaged(v, 0, v[0][:-2]),
            "row 0, column clip: it has 23 values, not at most 24, a m",
        ),
        ("clip_pooled", lambda v: damaged(v, 1, b"12"), "row 1, column clip_pooled: it has 1 values, not 5"),
        ("id", lambda v: pa.array([*v[:3], None, *v[4:]]), "row 3, column id: it is null"),
        (
            "t5_n",
            lambda v: pa.array([*v[:3], 4, *v[4:]], pa.int32()),
            "row 3, column t5_n: 4 is not within 0 to 3",
        ),
        ("h", lambda v: pa.array([*v[:3], -1, *v[4:]]), "row 3, column h: -1 is not within 0"),
        (
            "text",
            lambda v: damaged([t.encode() for t in v], 1, b"\xff"),
            "row 1, column text: it is not UTF-8",
        ),
    ],
)
def test_a_row_that_is_not_as_promised_is_named(tmp_path, column, array, message):
    rows = foreign.samples(13)
    bad = foreign.table(rows[8:])
    bad = bad.set_column(bad.column_names.index(column), column, array(bad.column(column).to_pylist()))
    good = foreign.table(rows[:8])
    if column == "text":
        good = good.set_column(good.column_names.index(column), column, good.column(column).cast(pa.binary()))
    foreign.write(tmp_path / "x.parquet", pa.concat_tables([good, bad], promote_options="permissive"))
    reader = ForeignReader(indexed(tmp_path), 64)
    reader.read(0)
    with pytest.raises(CorruptShard, match=rf"^shard x.parquet, row group 1, .*{message}"):
        reader.read(1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (70000.0, "row 1, column latent: a value is beyond what fp16 holds"),
        (None, "row 1, column latent: it has a null among its values"),
    ],
)
def test_numbers_that_fp16_does_not_hold(tmp_path, value, message):
    rows = foreign.samples(3)
    lists = [row.latents[64][0].ravel().astype(float).tolist() for row in rows]
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, foreign.as_list32))
    indexed(tmp_path)
    lists[1][7] = value
    foreign.write(tmp_path / "x.parquet", foreign.table(rows, latent=pa.array(lists, pa.list_(pa.float32()))))
    with pytest.raises(CorruptShard, match=message):
        indexed(tmp_path)
