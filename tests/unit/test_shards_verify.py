"""Damage of every kind: `isthmus data verify` finds it, says where in one line, and exits with 1."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.errors import DataError, UsageError
from isthmus.storage.shards import DatasetSpec, open_dataset, verify
from isthmus.storage.shards.manifest import checksum
from isthmus.storage.shards.synthetic import TINY, write_synthetic

SPEC = DatasetSpec(TINY.autoencoder, TINY.text, TINY.resolutions, 2, TINY.buckets)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    place = tmp_path_factory.mktemp("pristine") / "data"
    write_synthetic(str(place), 40, SPEC, size_class_of=lambda number: 32 if number % 4 == 0 else 64)
    return place


@pytest.fixture
def data(pristine, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "data"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def lines(data: Path) -> list[str]:
    return [str(problem) for problem in verify(str(data)).problems]


def test_a_sound_dataset_is_read_whole(data):
    report = verify(str(data))
    assert (report.ok, report.rows, report.files) == (True, 40, 3 * 1 + 4 * 1)


def test_a_flipped_byte_names_shard_row_group_and_column(data):
    dataset = open_dataset(str(data))
    ranges = dataset.index.sibling("32px")
    flip(data / "part-00000.32px.parquet", ranges.start(1, 2) + 100)
    block = dataset.index.row_group[1]
    assert lines(data) == [
        f"part-00000.32px.parquet, row group {block}, column latent_logvar: "
        "its bytes have another checksum than the index lists"
    ]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_flipped_byte_goes_unnoticed(pristine, tmp_path, data):
    """Of any file: values, page headers, footers, magic bytes, index, manifest, embeddings."""
    names = sorted(path.name for path in pristine.iterdir())
    name = data.draw(st.sampled_from(names))
    content = bytearray((pristine / name).read_bytes())
    if not content:
        return
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    place = tmp_path / "data"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(pristine, place)
    (place / name).write_bytes(content)
    try:
        report = verify(str(place))
    except UsageError as error:
        assert "schema version" in str(error)  # noqa: PT017 - one byte makes 1 a 9
        return
    assert report.problems
    assert all("\n" not in str(problem) for problem in report.problems)


def test_a_truncated_file_names_every_row_group_that_is_lost(data):
    path = data / "part-00000.64px.parquet"
    dataset = open_dataset(str(data))
    second = next(
        at
        for at in range(len(dataset.index))
        if dataset.index.file(at, "64px") == path.name and dataset.index.row_group[at] == 1
    )
    with path.open("r+b") as file:
        file.truncate(int(dataset.index.sibling("64px").offset[second]) + 10)
    found = lines(data)
    assert all(path.name in line and "cut short" in line for line in found)
    groups = int(dataset.index.row_group[dataset.index.shard == 0].max()) + 1
    assert len(found) == 1 + groups - 1  # the footer, and all row groups but the first


def test_missing_and_lengthened_files(data):
    (data / "part-00000.text1.parquet").unlink()
    with (data / "part-00001.text.parquet").open("ab") as file:
        file.write(b"more")
    found = lines(data)
    assert found[0] == "part-00000.text1.parquet: the file is missing"
    assert found[1].startswith("part-00001.text.parquet: the file is longer than")
    assert len(found) == 2


def test_siblings_of_another_shard_are_found_by_their_keys(tmp_path):
    """Checksums hold: someone encoded again with another order and mixed the two up, index and all."""
    from isthmus.storage.shards import writer as module

    def swapped(self, group, sample):
        original(self, group, sample)
        if sample.key == "s3":
            group.values["64px"]["key"][group.rows] = "s4"

    original = module.DatasetWriter._fill
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.DatasetWriter, "_fill", swapped)
        write_synthetic(str(tmp_path / "data"), 8)
    assert lines(tmp_path / "data") == [
        "part-00000.64px.parquet, row group 0, row 3, column key: it has key 's4', the text file 's3'"
    ]


def test_a_row_that_is_not_finite_is_named(tmp_path):
    """Written by a broken tool, so that every checksum holds."""
    from isthmus.storage.shards import check

    def damage(sample_, *rest):
        if sample_.key == "s13":
            sample_.latents[64][0][1, 2, 3] = np.nan
            sample_.text[0]["t5"][0][2, 1] = np.inf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus.storage.shards.writer.check_sample", _fill_shapes(check.check_sample, damage))
        write_synthetic(str(tmp_path / "data"), 20)
    assert lines(tmp_path / "data") == [
        "part-00000.text.parquet, row group 1, row 5, column t5_tokens: not finite",
        "part-00000.64px.parquet, row group 1, row 5, column latent_mean: not finite",
    ]


def _fill_shapes(check_sample, damage):
    def checked(sample_, *rest):
        check_sample(sample_, *rest)
        damage(sample_)

    return checked


def test_an_index_of_another_dataset_is_found(data, tmp_path):
    write_synthetic(str(tmp_path / "other"), 41, SPEC)
    shutil.copy(tmp_path / "other" / "_index.parquet", data)
    assert lines(data) == ["_index.parquet: its contents are not those that the manifest lists"]
    (data / "_index.parquet").unlink()
    assert lines(data) == ["_index.parquet: the file is missing"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.pop("samples"), '"samples" is not a count'),
        (lambda m: m.update(samples=-1), '"samples" is not a count'),
        (lambda m: m.update(samples=39), "it has 40 rows, the manifest 39"),
        (lambda m: m.update(blocks=3), "blocks, the manifest 3"),
        (lambda m: m.update(format="webdataset"), '"format" is not "isthmus-latents"'),
        (lambda m: m.update(fingerprint="0" * 64), "fingerprint is not the sha256 of the index"),
        (lambda m: m["text"][0].update(width=1 << 40), "width of clip_l must be a whole number"),
        (lambda m: m["text"][0].update(name="../../etc"), "text encoder name"),
        (lambda m: m["text"][0].update(surprise=1), "surprise"),
        (lambda m: m["buckets"].append("../x"), "bucket name '../x'"),
        (lambda m: m["latent_shapes"]["1:1"].update({"64": [4, 1 << 30, 8]}), "latent shape"),
        (lambda m: m["latent_shapes"]["1:1"].update({"64": [4, 8, 9]}), "do not fit its rows"),
        (
            lambda m: m["files"].update({"../../secret": m["files"]["_null.parquet"]}),
            "not a file of a dataset",
        ),
        (lambda m: m["rows"]["1:1"].update({"64": 7}), "rows, the manifest 7"),
    ],
)
def test_a_manifest_that_lies_is_refused_and_says_which_field(data, change, says):
    manifest = json.loads((data / "manifest.json").read_text())
    change(manifest)
    manifest["checksum"] = checksum(manifest)
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError) as raised:
        open_dataset(str(data))
    assert says in str(raised.value)
    assert verify(str(data)).problems


def test_shard_names_in_the_index_cannot_leave_the_root(data):
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    def rewrite(**columns):
        table = pq.read_table(data / "_index.parquet")
        for name, value in columns.items():
            at = table.column_names.index(name)
            table = table.set_column(at, name, pa.array([value] * table.num_rows, table[name].type))
        pq.write_table(table, data / "_index.parquet", store_schema=False)
        content = (data / "_index.parquet").read_bytes()
        manifest = json.loads((data / "manifest.json").read_text())
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"]["_index.parquet"] = {"size": len(content), "sha256": digest}
        manifest["fingerprint"] = digest
        manifest["checksum"] = checksum(manifest)
        (data / "manifest.json").write_text(json.dumps(manifest))

    original = (data / "_index.parquet").read_bytes()
    for columns, says in [
        ({"shard": "../../part-00000"}, "is not like part-00017"),
        ({"rows": 1 << 30}, "rows are not within"),
        ({"32px/offset": 1 << 60}, "do not fit its rows"),
        ({"32px/latent_mean/length": 1 << 40}, "do not fit its rows"),
    ]:
        (data / "_index.parquet").write_bytes(original)
        rewrite(**columns)
        with pytest.raises(DataError, match=says):
            open_dataset(str(data))


def test_a_newer_schema_is_told_apart_from_damage(data):
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["schema_version"] = 99
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UsageError, match=r"schema version 99, this isthmus reads up to 2 \(upgrade isthmus\)"
    ):
        open_dataset(str(data))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isthmus", "data", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_commands(data):
    sound = run("verify", str(data))
    assert sound.returncode == 0
    assert "40 rows in 7 files" in sound.stdout
    told = json.loads(run("stats", str(data), "--json").stdout)
    assert told["samples"] == 40
    assert told["resolutions"]["64"]["samples"] == 30
    assert told["fingerprint"] == open_dataset(str(data)).fingerprint
    assert "40 samples in 2 shards" in run("stats", str(data)).stdout

    flip(data / "part-00000.64px.parquet", 2000)
    (data / "part-00000.text.parquet").unlink()
    broken = run("verify", str(data))
    assert broken.returncode == 1
    assert len(broken.stdout.splitlines()) == 3
    as_json = run("verify", str(data), "--json")
    assert as_json.returncode == 1
    report = json.loads(as_json.stdout)
    assert report["ok"] is False
    assert {problem["shard"].split(".")[1] for problem in report["problems"]} == {"text", "64px"}

    absent = run("verify", str(data.parent / "nowhere"))
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "no latent dataset here" in absent.stderr
    assert "Traceback" not in absent.stderr
