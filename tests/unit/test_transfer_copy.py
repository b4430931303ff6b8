"""Copies between real stores (moto, Azurite) and this machine: what is copied, what is not, and what is refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from servers import Store
from training import make_latents
from transfers import MIB, QUICK, contents, copied, fetched, make_tree, planned

from isthmus.errors import DataError, StorageError, UsageError
from isthmus.storage.shards.verify import verify
from isthmus.storage.transfer.estimate import End, end_of, estimate
from isthmus.storage.transfer.known import vouched_for


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "source")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_from_here_through_both_clouds_and_back(
    tree: Path, tmp_path: Path, state: Path, s3: Store, blob: Store
) -> None:
    ways = [
        (str(tree), s3.root),
        (s3.root, blob.root),
        (blob.root, str(tmp_path / "back")),
        (str(tree), blob.root + "2"),
        (blob.root + "2", s3.root + "2"),
        (s3.root + "2", str(tmp_path / "again")),
    ]
    for source, target in ways:
        plan, done = copied(source, target, state)
        assert {item.why for item in plan.items} == {"missing"}
        assert (done.files, done.bytes) == (5, sum(map(len, contents(tree).values())))
        # Of the small ones from S3 to a disk, S3's own checksum was compared as they came.
        assert set(done.checked) <= {"checksum", "parts"}, (source, target)
        assert done.checked["checksum"] == 5 or target.startswith(str(tmp_path))
        plan, done = copied(source, target, state)
        assert (done.files, done.bytes, done.same) == (0, 0, 5)
    wanted = contents(tree)
    assert contents(tmp_path / "back") == contents(tmp_path / "again") == wanted
    assert fetched(s3, "data") == fetched(s3, "data2") == wanted
    assert fetched(blob, "data") == fetched(blob, "data2") == wanted


def test_a_store_copies_within_itself(tree: Path, state: Path, s3: Store) -> None:
    copied(tree, s3.root, state)
    _, done = copied(s3.root, s3.root + "-copy", state)
    assert fetched(s3, "data-copy") == contents(tree)
    # All but the empty file, whose one part there is nothing to fetch of.
    assert (done.by_service, done.parts_sent) == (8, 1)
    _, done = copied(s3.root, s3.root + "-here", state, replace(QUICK, by_service=False))
    assert (done.by_service, done.parts_sent) == (0, 9)
    assert fetched(s3, "data-here") == contents(tree)


def test_only_what_differs_is_copied_and_nothing_is_removed_unasked(
    tree: Path, tmp_path: Path, state: Path
) -> None:
    target = tmp_path / "target"
    copied(tree, target, state)
    (target / "mine").write_text("only here")
    (tree / "small.txt").write_bytes(b"0123456789ab")  # another size
    os.utime(tree / "empty", ns=(1, 1))
    (tree / "deep/er/part-00001.bin").write_bytes(b"x" * 5 * MIB)  # the same size, later
    plan, done = copied(tree, target, state)
    assert {item.entry.name: item.why for item in plan.items} == {
        "deep/er/part-00001.bin": "newer",
        "small.txt": "size",
    }
    assert (done.deleted, [entry.name for entry in plan.extra]) == (0, ["mine"])
    assert (target / "mine").exists()
    plan, done = copied(tree, target, state, replace(QUICK, delete=True))
    assert (done.files, done.deleted) == (0, 1)
    assert contents(target) == contents(tree)


def test_by_checksum_a_file_of_the_same_size_and_a_later_time_is_found_out(
    tree: Path, tmp_path: Path, s3: Store
) -> None:
    copied(tree, s3.root, tmp_path / "state")
    s3.put("small.txt", b"9876543210")
    elsewhere = tmp_path / "another machine, without the journal"
    assert [item.entry.name for item in planned(tree, s3.root, elsewhere).items] == []
    found = planned(tree, s3.root, elsewhere, replace(QUICK, checksum=True))
    assert [(item.entry.name, item.why) for item in found.items] == [("small.txt", "checksum")]
    # With the journal even time tells: the destination's version is not the one that was made.
    _, done = copied(tree, s3.root, elsewhere, replace(QUICK, checksum=True))
    assert done.checked == {"read back": 1}
    assert fetched(s3, "data") == contents(tree)


def test_hidden_files_and_names_that_no_folder_holds_are_counted(tmp_path: Path, s3: Store) -> None:
    for name in ("good", ".hidden/x", "a//b", "../up"):
        s3.put(name, b"x")
    plan, _ = copied(s3.root, tmp_path / "target", tmp_path / "state")
    assert contents(tmp_path / "target") == {"good": b"x"}
    assert plan.left_out == {"hidden": 2, "a name that no folder can hold": 1}


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("", "", "the same"),
        ("", "/inner", "within the other"),
        ("/inner", "", "within the other"),
    ],
)
def test_a_place_is_not_copied_into_itself(
    tmp_path: Path, s3: Store, source: str, target: str, says: str
) -> None:
    for root in (str(tmp_path), s3.root):
        with pytest.raises(UsageError, match=says):
            planned(root + source, root + target, tmp_path / "state")


def test_what_cannot_be_copied_is_said_in_a_line(tmp_path: Path, s3: Store) -> None:
    (tmp_path / "file").write_text("x")
    cases = [
        (str(tmp_path / "nothing"), "nothing to copy"),
        (str(tmp_path / "file"), "no folder"),
        ("https://example.org/x", "cannot be copied"),
        ("s3://no-such-bucket-of-ours/x", "no such bucket or container"),
        ("s3://", "names no bucket"),
    ]
    for source, says in cases:
        with pytest.raises((UsageError, StorageError), match=re.escape(says)):
            planned(source, tmp_path / "target", tmp_path / "state")
    make_tree(tmp_path / "big", {"x": 6 * MIB})
    with pytest.raises(UsageError, match="does not hold one part"):
        planned(tmp_path / "big", s3.root, tmp_path / "state", replace(QUICK, memory=MIB))


def test_one_copy_at_a_time_between_two_places(tree: Path, tmp_path: Path, state: Path) -> None:
    from isthmus.storage.transfer.copy import Copy

    with (
        Copy(str(tree), str(tmp_path / "t"), QUICK, state),
        pytest.raises(UsageError, match="another process"),
    ):
        copied(tree, tmp_path / "t", state)
    planned(tree, tmp_path / "t", state)


# Datasets


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "latents"
    make_latents(root, "dit")
    return root


def test_an_index_vouches_for_every_file(dataset: Path) -> None:
    import zlib

    found = vouched_for(str(dataset)).files
    beside = {"manifest.json", "autoencoder/autoencoder.safetensors", "autoencoder/config.json"}
    there = {name: data for name, data in contents(dataset).items() if name not in beside}
    assert found == {name: (len(data), zlib.crc32(data)) for name, data in there.items()}


def test_a_damaged_shard_never_arrives_and_the_manifest_neither(
    dataset: Path, state: Path, s3: Store, tmp_path: Path
) -> None:
    damaged = sorted(dataset.glob("*px.parquet"))[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(DataError, match="index vouches for") as caught:
        copied(dataset, s3.root, state)
    assert caught.value.where is not None
    assert damaged.name in caught.value.where
    arrived = fetched(s3, "data")
    assert damaged.name not in arrived
    assert "manifest.json" not in arrived
    assert len(arrived) == len(contents(dataset)) - 2
    damaged.write_bytes(data[:-1])
    with pytest.raises(DataError, match="bytes,"):
        planned(dataset, s3.root, state)


def test_the_manifest_is_written_last(dataset: Path, state: Path, tmp_path: Path, blob: Store) -> None:
    copied(dataset, blob.root, state)
    copied(blob.root, tmp_path / "there", state)
    assert verify(str(tmp_path / "there")).ok
    last = max((tmp_path / "there").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert last.name == "manifest.json"


def test_another_dataset_is_not_mixed_with_this_one(dataset: Path, tmp_path: Path, state: Path) -> None:
    make_latents(tmp_path / "other", "unet")
    target = tmp_path / "target"
    copied(tmp_path / "other", target, state)
    before = contents(target)
    with pytest.raises(UsageError, match="another dataset"):
        copied(dataset, target, state)
    assert contents(target) == before
    copied(dataset, target, state, replace(QUICK, delete=True))
    assert contents(target) == contents(dataset)
    assert verify(str(target)).ok


def test_what_a_copy_takes(tree: Path, s3: Store, tmp_path: Path, state: Path) -> None:
    copied(tree, s3.root, state)
    plan = planned(s3.root, tmp_path / "t", state)
    asked: list[tuple[str, str, str]] = []

    def price(kind: str, cloud: str, region: str, to: str, amount: float) -> float:
        asked.append((kind, cloud, region))
        return amount

    takes = estimate(plan, end_of(s3.root, "eu-west-1"), end_of(str(tmp_path)), 1e6, price)
    size = sum(map(len, contents(tree).values()))
    assert takes.bytes == size
    assert takes.hours == pytest.approx(size / 1e6 / 3600)
    assert takes.requests == {"read": 8, "write": 11, "list": 2}
    assert asked == [("egress", "sagemaker", "eu-west-1"), ("read_requests", "sagemaker", "eu-west-1")]
    assert takes.usd == pytest.approx(size / 1e9 + 8)
    free = estimate(plan, End("sagemaker", "a"), End("sagemaker", "a"), None, lambda *_: 0.0)
    assert (free.usd, free.hours) == (0.0, None)
    unknown = estimate(plan, End("azure"), End("sagemaker", "a"), None, price)
    assert unknown.usd is None
