"""`isthmus data convert`: what cannot be read where it is becomes a dataset of our own, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import foreign
import numpy as np
import pyarrow as pa
import pytest

from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.shards import open_dataset, verify
from isthmus.storage.shards.foreign_convert import convert_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.shards.synthetic import sample
from isthmus.storage.shards.whole_reads import read_blocks

RULE = {"height": "px_h", "width": "px_w"}


def write_mixed(folder: Path, rows: int = 100, **replaced: Any) -> None:
    """One row group of two shapes, its rows in turns."""
    samples = [
        sample(foreign.TINY, n, bucket="2:1" if n % 3 == 0 else "1:1", prefix="f") for n in range(rows)
    ]
    sides = {
        "px_h": pa.array([32 if n % 3 == 0 else 64 for n in range(rows)]),
        "px_w": pa.array([64] * rows),
        "url": pa.array([f"https://example.org/{n}" for n in range(rows)]),
    }
    foreign.write(folder / "x.parquet", foreign.table(samples, **sides, **replaced), row_group_size=rows)


def test_mixed_row_groups_become_buckets(tmp_path):
    write_mixed(tmp_path / "theirs")
    settings = parse_settings(
        foreign.mapped(bucket=RULE, null_text={"key": "f7"}, **{"columns.source": "url"})
    )
    manifest = convert_files([str(tmp_path / "theirs")], str(tmp_path / "ours"), settings)
    assert manifest.columns is None
    assert manifest.rows == {"1:1": {64: 66}, "2:1": {64: 34}}
    assert verify(str(tmp_path / "ours")).ok
    dataset = open_dataset(str(tmp_path / "ours"))
    keys = []
    for number, block in enumerate(read_blocks(dataset, 64, range(len(dataset.index)))):
        bucket = dataset.spec.buckets[int(dataset.index.bucket[number])]
        for row, key in enumerate(block.strings["key"]):
            told = sample(foreign.TINY, int(key[1:]), bucket=bucket, prefix="f")
            keys.append(key)
            assert block.strings["caption"][row] == told.captions[0]
            assert block.strings["source"][row] == f"https://example.org/{key[1:]}"
            assert block.fixed["latent_mean"][row].tobytes() == told.latents[64][0].tobytes()
            assert block.fixed["latent_logvar"][row].tobytes() == told.latents[64][1].tobytes()
            for name, (tokens, length, pooled) in told.text[0].items():
                assert block.fixed[f"{name}_tokens"][row].tobytes() == tokens.tobytes()
                assert block.numbers[f"{name}_length"][row] == length
                if pooled is not None:
                    assert block.fixed[f"{name}_pooled"][row].tobytes() == pooled.tobytes()
            assert block.numbers["crop_height"][row] == told.crop[2]
            assert block.numbers["flipped"][row] == told.flipped
    assert sorted(keys) == sorted(f"f{number}" for number in range(100))
    null = sample(foreign.TINY, 7, prefix="f").text[0]["t5"]
    assert dataset.null_text["t5"].tokens[0].tobytes() == null[0].tobytes()


def test_what_is_wrong_has_its_place_and_leaves_no_dataset(tmp_path):
    values = [
        sample(foreign.TINY, n, bucket="2:1" if n % 3 == 0 else "1:1").latents[64][0] for n in range(100)
    ]
    raw = [value.tobytes() for value in values]
    raw[88] = raw[88][:-2]
    write_mixed(tmp_path / "theirs", latent=pa.array(raw, pa.binary()))
    settings = parse_settings(foreign.mapped(bucket=RULE))
    with pytest.raises(
        CorruptShard, match=r"x.parquet, row group 0, row 88, column latent: it has 255 values, not 256"
    ):
        convert_files([str(tmp_path / "theirs")], str(tmp_path / "ours"), settings)
    assert not (tmp_path / "ours" / "manifest.json").exists()
    foreign.write(tmp_path / "theirs" / "x.parquet", foreign.table(foreign.samples(3)))
    with pytest.raises(UsageError, match="no column px_h"):
        convert_files([str(tmp_path / "theirs")], str(tmp_path / "ours"), settings)
    settings = parse_settings(foreign.mapped(null_text={"key": "nobody"}))
    with pytest.raises(UsageError, match="no row has the key 'nobody'"):
        convert_files([str(tmp_path / "theirs")], str(tmp_path / "ours"), settings)
    assert not (tmp_path / "ours" / "manifest.json").exists()


def test_the_command(tmp_path):
    foreign.write(tmp_path / "theirs" / "x.parquet", foreign.table(foreign.samples(5), foreign.as_nested))
    (tmp_path / "map.yaml").write_text(json.dumps(foreign.MAP))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "isthmus",
            "data",
            "convert",
            str(tmp_path / "theirs"),
            "--columns",
            str(tmp_path / "map.yaml"),
            "--dest",
            str(tmp_path / "ours"),
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 5
    (block,) = read_blocks(open_dataset(str(tmp_path / "ours")), 64, [0])
    latents = np.stack([row.latents[64][0] for row in foreign.samples(5)])
    assert block.fixed["latent_mean"].tobytes() == latents.tobytes()
