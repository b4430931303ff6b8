"""What is told of samples after encoding: kept beside the shards, carried by every rewriting, in stats and predicates."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rewriting
from rewriting import files_of, rows_of

from isthmus.cli.app import main
from isthmus.errors import CorruptShard, DatasetMismatch, UsageError
from isthmus.storage.shards import DatasetWriter, field_stats, open_dataset, stats, verify
from isthmus.storage.shards.blocks import Block
from isthmus.storage.shards.field_stats import _Numbers, _Words
from isthmus.storage.shards.fields import scan, split_page, take
from isthmus.storage.shards.foreign_build import index_files
from isthmus.storage.shards.foreign_convert import convert_files
from isthmus.storage.shards.foreign_settings import parse_settings
from isthmus.storage.shards.layout import Column
from isthmus.storage.shards.rewrite import Options, filtered, merge, repack, split
from isthmus.storage.shards.rewrite_plan import Sizes
from isthmus.storage.shards.rewrite_source import source_of
from isthmus.storage.shards.sample_check import verify_sample
from isthmus.storage.shards.spec import FieldSpec
from isthmus.storage.shards.synthetic import TINY, random_text, sample, write_synthetic
from isthmus.storage.transfer.known import vouched_for

FIELDS = (FieldSpec("aesthetic", "number"), FieldSpec("licence", "text"))
SPEC = replace(rewriting.SPEC, fields=FIELDS)
OPTIONS = Options(Sizes(group_rows=5, shard_rows=15), threads=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewriting.write(tmp_path_factory.mktemp("fields") / "data", spec=SPEC)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def told(folder: Path) -> dict[str, tuple[float | None, str | None]]:
    """Key -> both fields, as pyarrow reads them."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.fields.parquet"))]
    return {row["key"]: (row["aesthetic"], row["licence"]) for t in tables for row in t.to_pylist()}


def expected(number: int) -> tuple[float | None, str | None]:
    return None if number % 5 == 4 else number / 2, None if number % 4 == 3 else f"licence {number % 3}"


def test_fields_are_a_sibling_that_pyarrow_reads_with_nulls(data: Path) -> None:
    assert told(data) == {f"s{number}": expected(number) for number in range(60)}
    schema = pq.read_schema(next(data.glob("*.fields.parquet")))
    assert [(f.name, str(f.type), f.nullable) for f in schema] == [
        ("key", "string", False),
        ("aesthetic", "double", True),
        ("licence", "string", True),
    ]
    assert verify(str(data)).ok
    assert open_dataset(str(data)).spec == SPEC
    assert any(name.endswith("fields.parquet") for name in vouched_for(str(data)).files)


def test_training_reads_the_same_rows_with_and_without_fields(data: Path, tmp_path: Path) -> None:
    plain = rewriting.write(tmp_path / "plain")
    mine, theirs = files_of(plain), files_of(data)
    shards = [name for name in mine if name.startswith("part-")]
    assert all(mine[name] == theirs[name] for name in shards)
    assert "fields" not in json.loads((plain / "manifest.json").read_text())


def test_damage_to_a_field_is_found_and_named(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    name = sorted(copy.glob("*.fields.parquet"))[0]
    ranges = open_dataset(str(copy)).index.sibling("fields")
    content = bytearray(name.read_bytes())
    content[ranges.start(0, 2) - 1] ^= 1  # the last byte of the first row group's numbers
    name.write_bytes(content)
    report = verify(str(copy))
    assert [(p.column, p.row_group) for p in report.problems] == [("aesthetic", 0)]
    with pytest.raises(CorruptShard, match="another checksum"):
        list(scan(source_of(open_dataset(str(copy))), ["aesthetic"]))
    with pytest.raises(CorruptShard, match="aesthetic"):
        filtered([str(copy)], str(tmp_path / "out"), "aesthetic > 1")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_repacking_keeps_them_to_the_bit(data: Path, tmp_path: Path, compression: str) -> None:
    source = data
    if compression != "none":  # one size class only
        source = tmp_path / "large"
        filtered([str(data)], str(source), "size_class = 64")
    dest = tmp_path / "out"
    repack([str(source)], str(dest), replace(OPTIONS, compression=compression))
    assert verify(str(dest)).ok
    assert open_dataset(str(dest)).spec.fields == FIELDS
    if compression == "none":
        assert rows_of(dest) == rows_of(source)
        return
    damaged = tmp_path / "damaged"
    shutil.copytree(dest, damaged)
    broken = sorted(damaged.glob("part-*.parquet"))[0]
    at = pq.read_metadata(broken).row_group(0).column(pq.read_schema(broken).names.index("licence"))
    content = bytearray(broken.read_bytes())
    content[at.data_page_offset + at.total_compressed_size - 1] ^= 1
    broken.write_bytes(content)
    for report in (verify(str(damaged)), verify_sample(str(damaged), 1000)):
        assert [(p.column, p.row_group) for p in report.problems] == [("licence", 0)]
    there = pq.read_table(next(dest.glob("*.parquet"))).to_pylist()
    assert {row["key"]: (row["aesthetic"], row["licence"]) for row in there}.items() <= told(source).items()
    assert filtered([str(dest)], str(tmp_path / "few"), "aesthetic >= 10").left_out > 0
    repack([str(dest)], str(tmp_path / "again"), OPTIONS)
    assert told(tmp_path / "again") == told(source)
    repack([str(source)], str(tmp_path / "plain"), OPTIONS)
    assert files_of(tmp_path / "again") == files_of(tmp_path / "plain")
    assert stats(str(dest))["fields"] == stats(str(source))["fields"]


def test_filter_and_split_by_fields(data: Path, tmp_path: Path) -> None:
    done = filtered(
        [str(data)], str(tmp_path / "a"), "aesthetic >= 5.5 and licence in ('licence 0')", OPTIONS
    )
    wanted = {
        f"s{n}": expected(n)
        for n in range(60)
        if (expected(n)[0] or 0) >= 5.5 and expected(n)[1] == "licence 0"
    }
    assert told(tmp_path / "a") == wanted
    assert done.left_out == 60 - len(wanted)
    assert verify(str(tmp_path / "a")).ok
    split([str(data)], str(tmp_path / "b"), "where", OPTIONS, where="aesthetic is null or licence is null")
    untold = {f"s{n}" for n in range(60) if None in expected(n)}
    assert set(told(tmp_path / "b" / "true")) == untold
    assert set(told(tmp_path / "b" / "false")) == {f"s{n}" for n in range(60)} - untold
    # What nobody told is neither above nor below anything, nor different from it.
    filtered(
        [str(data)], str(tmp_path / "c"), "aesthetic != 3 or aesthetic < 0 or aesthetic between 0 and 99"
    )
    assert set(told(tmp_path / "c")) == {f"s{n}" for n in range(60) if n % 5 != 4}
    with pytest.raises(UsageError, match="did you mean aesthetic"):
        filtered([str(data)], str(tmp_path / "d"), "aestetic > 1")


def test_merging_unites_fields_and_refuses_two_kinds_of_one(data: Path, tmp_path: Path) -> None:
    further = (FieldSpec("licence", "text"), FieldSpec("watermark", "number"))
    rewriting.write(tmp_path / "b", 12, spec=replace(SPEC, fields=further), prefix="b")
    rewriting.write(tmp_path / "c", 12, spec=replace(SPEC, fields=()), prefix="c")
    merge([str(data), str(tmp_path / "b"), str(tmp_path / "c")], str(tmp_path / "all"), OPTIONS)
    assert verify(str(tmp_path / "all")).ok
    spec = open_dataset(str(tmp_path / "all")).spec
    assert spec.fields == (*FIELDS, FieldSpec("watermark", "number"))
    rows = {
        row["key"]: (row["aesthetic"], row["licence"], row["watermark"])
        for path in (tmp_path / "all").glob("*.fields.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    assert rows == {
        **{f"s{n}": (*expected(n), None) for n in range(60)},
        **{f"b{n}": (None, expected(n)[1], expected(n)[0]) for n in range(12)},
        **{f"c{n}": (None, None, None) for n in range(12)},
    }
    other = (FieldSpec("licence", "number"),)
    rewriting.write(tmp_path / "d", 12, spec=replace(SPEC, fields=other), prefix="d")
    with pytest.raises(DatasetMismatch, match="field licence is of kind number, not text"):
        merge([str(data), str(tmp_path / "d")], str(tmp_path / "no"), OPTIONS)


def test_a_killed_rewriting_goes_on_to_the_same_bytes(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from isthmus.storage.shards import rewrite_write

    repack([str(data)], str(tmp_path / "whole"), OPTIONS)
    real, calls = rewrite_write._write_shard, []

    def fails(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the disk is gone")
        return real(*given)

    monkeypatch.setattr(rewrite_write, "_write_shard", fails)
    with pytest.raises(OSError, match="the disk"):
        repack([str(data)], str(tmp_path / "half"), replace(OPTIONS, threads=1))
    monkeypatch.undo()
    repack([str(data)], str(tmp_path / "half"), replace(OPTIONS, threads=1))
    assert files_of(tmp_path / "half") == files_of(tmp_path / "whole")


def test_stats_say_what_fields_hold(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: Any = stats(str(data))["fields"]
    numbers = sorted(value for n in range(60) if (value := expected(n)[0]) is not None)
    assert found["aesthetic"] == {
        "kind": "number", "told": 48, "null": 12, "least": 0.0, "most": 29.0, "mean": sum(numbers) / 48, "exact": True,
        "quantiles": {
            "0.01": 0.0, "0.05": 0.5, "0.25": numbers[11], "0.5": numbers[23], "0.75": numbers[35], "0.95": numbers[45],
            "0.99": 29.0,
        },
    }  # fmt: skip
    assert found["licence"]["most_frequent"] == {"licence 0": 15, "licence 1": 15, "licence 2": 15}
    assert (found["licence"]["told"], found["licence"]["null"]) == (45, 15)
    out = run(capsys, "stats", str(data))[1]
    assert "field aesthetic: 48 numbers, 12 null; 0 to 29, median 14, mean 14.5" in out
    assert "field licence: 45 texts, 15 null, 3 different: licence 0 15" in out


def test_quantiles_are_right_to_a_two_thousandth_and_words_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(field_stats, "EXACT", 2_000)
    random = np.random.default_rng(3)
    values = np.concatenate([random.lognormal(0, 4, 50_000), -random.lognormal(0, 2, 30_000), np.zeros(100)])
    sums = _Numbers()
    for part in np.array_split(random.permutation(values), 50):
        sums.add(np.concatenate([part, [np.nan]]))
    found = sums.result()
    assert (found["told"], found["exact"]) == (len(values), False)
    for q, value in found["quantiles"].items():
        exact = np.quantile(values, float(q), method="inverted_cdf")
        assert abs(value - exact) <= abs(exact) / 2047
    words = _Words()
    words.add([f"w{number}" for number in range(10_000)])
    words.add(["w3", "new", ""])
    result = words.result()
    assert (result["told"], result["different"], result["more_than_counted"]) == (10_002, 10_000, True)
    assert next(iter(result["most_frequent"].items())) == ("w3", 2)


@pytest.mark.parametrize("share", [0.0, 0.003, 0.5, 1.0])
@pytest.mark.parametrize("rows", [1, 8, 1000, 4096])
def test_pages_with_nulls_decode_as_pyarrow_wrote_them(share: float, rows: int, tmp_path: Path) -> None:
    random = np.random.default_rng(rows)
    null = random.random(rows) < share
    spec = replace(TINY, fields=FIELDS, resolutions=(32,))
    with DatasetWriter(str(tmp_path / "d"), spec, rows_per_shard=rows, rows_per_group=rows) as writer:
        one = sample(spec, 0)
        for number in range(rows):
            fields = {} if null[number] else {"aesthetic": float(number), "licence": f"ä{number}"}
            writer.add(replace(one, key=f"k{number}", fields=fields))
        writer.finish(random_text(spec, 1))
    ((block, found),) = scan(source_of(open_dataset(str(tmp_path / "d"))), ["aesthetic", "licence"])
    assert block == 0
    numbers: Any = found["aesthetic"]
    np.testing.assert_array_equal(np.isnan(numbers), null)
    np.testing.assert_array_equal(numbers[~null], np.flatnonzero(~null))
    assert found["licence"] == ["" if null[n] else f"ä{n}" for n in range(rows)]


@pytest.mark.parametrize(
    "page",
    [b"", b"\x01\x00", b"\x09\x00\x00\x00\x02\x01", b"\x02\x00\x00\x00\x02\x07", b"\x01\x00\x00\x00\x03",
     b"\x05\x00\x00\x00\xff\xff\xff\xff\xff", b"\x02\x00\x00\x00\x00\x01", b"\x02\x00\x00\x00\x01\x01"],
)  # fmt: skip
def test_damaged_levels_are_refused(page: bytes) -> None:
    with pytest.raises(ValueError, match="definition levels"):
        split_page(memoryview(page), 3)


def test_a_page_of_too_few_numbers_is_refused() -> None:
    body = b"\x02\x00\x00\x00\x06\x01" + bytes(16)  # three rows are told, two numbers are there
    head = b"\x15\x00" + b"\x15" + bytes([2 * len(body)]) + b"\x15" + bytes([2 * len(body)]) + b"\x00"
    with pytest.raises(ValueError, match="one number for each row"):
        take(Block(3), Column("a", "number?"), np.frombuffer(head + body, np.uint8))


@pytest.mark.parametrize("name", ["key", "Caption3", "width", "latent_mean", "in", "a b", "", "1a", "x" * 65])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="field"):
        FieldSpec(name, "number")


def test_names_of_encoders_and_twins_are_refused() -> None:
    for names in (("clip_l_length",), ("CLIP_L_tokens1",), ("a", "A")):
        with pytest.raises(UsageError, match="name"):
            replace(TINY, fields=tuple(FieldSpec(name, "text") for name in names))


def test_a_sample_with_other_fields_is_refused(tmp_path: Path) -> None:
    spec = replace(TINY, fields=FIELDS)
    with DatasetWriter(str(tmp_path / "d"), spec) as writer:
        for fields in ({"other": 1.0}, {"aesthetic": "5"}, {"licence": 5.0}):
            with pytest.raises(UsageError, match="field"):
                writer.add(replace(sample(spec, 0), fields=fields))


def test_parquet_of_others_has_fields_by_its_map(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    rows = 20
    table = pa.table(
        {
            "id": [f"k{n}" for n in range(rows)],
            "text": ["words"] * rows,
            "AESTHETIC": pa.array([None if n == 3 else n / 4 for n in range(rows)], pa.float32()),
            "LICENSE": pa.array([None if n == 5 else f"cc{n % 2}" for n in range(rows)]),
            "safe": pa.array([n % 2 == 0 for n in range(rows)]),
            "tokens": pa.array([np.zeros((4, 6), "<f2").tobytes()] * rows, pa.binary(48)),
            "latent": pa.array([np.zeros((4, 8, 8), "<f2").tobytes()] * rows, pa.binary(512)),
        }
    )
    pq.write_table(table, source / "a.parquet", row_group_size=8)
    raw: dict[str, Any] = {
        "autoencoder": {"kind": "diffusers", "latent_channels": 4, "factor": 8, "scaling_factor": 0.5},
        "text": {"clip": {"max_tokens": 4, "width": 6}}, "bucket": "1:1", "null_text": "zeros",
        "columns": {
            "key": "id", "captions": {"caption": "text", "clip": "tokens"}, "latents": {64: "latent"},
            "fields": {
                "aesthetic": {"column": "AESTHETIC", "kind": "number"}, "licence": {"column": "LICENSE", "kind": "text"},
                "safe": "number",
            },
        },
    }  # fmt: skip
    settings = parse_settings(raw)
    index_files([str(source)], str(tmp_path / "d"), settings)
    roots = [str(tmp_path / "d"), str(source)]
    assert verify(roots).ok
    found: Any = stats(roots)["fields"]
    assert (found["aesthetic"]["null"], found["aesthetic"]["most"], found["safe"]["mean"]) == (1, 4.75, 0.5)
    assert found["licence"]["most_frequent"] == {"cc0": 10, "cc1": 9}
    filtered(roots, str(tmp_path / "few"), "aesthetic >= 2.5 and licence = 'cc0' and safe = 1")
    kept = {n for n in range(rows) if n >= 10 and n % 2 == 0}
    assert set(told(tmp_path / "few")) == {f"k{n}" for n in kept}
    convert_files([str(source)], str(tmp_path / "own"), settings)
    repack(roots, str(tmp_path / "repacked"))
    assert told(tmp_path / "own") == told(tmp_path / "repacked")
    assert told(tmp_path / "own")["k3"] == (None, "cc1")
    assert told(tmp_path / "own")["k5"] == (1.25, None)
    for wrong, match in (
        ({"aesthetic": "float"}, "number or text"),
        ({"aesthetic": {"column": "LICENSE", "kind": "number"}}, "does not hold numbers"),
        ({"aesthetic": {"column": "AESTETIC", "kind": "number"}}, "did you mean AESTHETIC"),
        ({"aesthetic": {"name": "AESTETIC", "kind": "number"}}, "not a field"),
        ({"key": "number"}, "use otherwise"),
    ):
        raw["columns"]["fields"] = wrong
        with pytest.raises(UsageError, match=match):
            index_files([str(source)], str(tmp_path / "no"), parse_settings(raw))


def test_datasets_of_before_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_synthetic(str(tmp_path / "d"), 8)
    assert stats(str(tmp_path / "d"))["fields"] == {}
    code, _, err = run(capsys, "filter", str(tmp_path / "d"), str(tmp_path / "o"), "--where", "aesthetic > 5")
    assert code == 2
    assert "no column aesthetic" in err
