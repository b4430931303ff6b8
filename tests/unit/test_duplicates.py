"""`isthmus data duplicates`: near-duplicates are found whatever was done to them, others are not, and nothing is missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")
from pictured import Picture, brighter, make_pictured, photograph, recompressed, resized
from PIL import Image

from isthmus.cli.app import main
from isthmus.core.encode.duplicates import find_duplicates, fit_preview
from isthmus.core.encode.hashes import Hashes, hashes
from isthmus.core.encode.looking import decode, open_autoencoder
from isthmus.core.encode.neighbours import COLOUR, apart, groups
from isthmus.core.encode.patch_pca import PatchPCA
from isthmus.errors import CorruptShard, UsageError
from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.latents import read_keys, read_means

CHANGES = {"jpeg": recompressed, "small": resized, "light": brighter}
ORIGINALS = 150


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 pictures; of every fifth three changed ones; three white ones; two of a shape in different colours."""
    place = tmp_path_factory.mktemp("alike") / "data"
    place.mkdir()
    pictures: dict[str, Picture] = {f"{number}": photograph(number) for number in range(ORIGINALS)}
    for number in range(0, ORIGINALS, 5):
        for name, change in CHANGES.items():
            pictures[f"{number}-{name}"] = change(pictures[f"{number}"])
    for name in ("a", "b", "c"):
        pictures[f"white-{name}"] = np.full((64, 64, 3), 250, np.uint8)
    for name, colour in (("red", (230, 30, 30)), ("green", (20, 140, 20))):
        shape = np.full((64, 64, 3), 200, np.uint8)
        shape[16:48, 16:48] = colour
        pictures[f"square-{name}"] = shape
    keys = sorted(pictures, key=lambda name: hash_of(name))
    make_pictured(place, [pictures[key] for key in keys], keys=keys)
    return place


def hash_of(name: str) -> str:
    """A fixed order in which copies lie far apart."""
    import hashlib

    return hashlib.sha256(name.encode()).hexdigest()


@pytest.mark.parametrize("whole", [False, True])
def test_changed_pictures_are_found_and_others_are_not(data: Path, whole: bool) -> None:
    dataset = open_dataset(str(data))
    found = find_duplicates(dataset, open_autoencoder(dataset), resolution=64, whole=whole)
    members = [{row.key for row in rows} for rows in found.members(dataset, found.groups)]
    assert {"white-a", "white-b", "white-c"} in members
    assert not any("square-red" in group for group in members), "the same shape in another colour"
    originals = [{key.partition("-")[0] for key in group} for group in members]
    assert all(len(group) == 1 for group in originals), "never two originals in a group"
    together = {key for group in members for key in group if not key.startswith("white")}
    changed = {f"{number}-{name}" for number in range(0, ORIGINALS, 5) for name in CHANGES}
    recall = len(changed & together) / len(changed)
    assert recall > 0.9
    assert found.samples == ORIGINALS + len(changed) + 5
    assert found.surplus == sum(len(group) - 1 for group in members)
    assert [len(group) for group in members] == sorted(map(len, members), reverse=True)
    assert (found.explained is None) == whole


def test_a_preview_of_a_linear_autoencoder_is_what_decoding_shows(data: Path) -> None:
    dataset = open_dataset(str(data))
    autoencoder = open_autoencoder(dataset)
    preview = fit_preview(dataset, autoencoder, 64)
    assert preview.explained > 0.99
    means = read_means(dataset, 3, 64)
    small = decode(autoencoder, means).reshape(len(means), 16, 4, 16, 4, 3).mean((2, 4)) / 255
    assert np.abs(preview(means) - small).mean() < 0.02
    assert len(read_keys(dataset, 3, 64)) == len(means) == dataset.index.rows[3]


def test_latents_that_a_linear_look_does_not_show_are_refused_and_decoded_when_asked(tmp_path: Path) -> None:
    """A decoder that multiplies: what its channels show depends on each other's signs."""
    import torch

    class Multiplying(PatchPCA):
        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            return super().decode(latents * torch.sign(latents[:, :1]) * torch.sign(latents[:, 1:2]))

    (tmp_path / "data").mkdir()
    pictures = [photograph(number) for number in range(24)]
    made = make_pictured(tmp_path / "data", [*pictures, pictures[3]], factor=8)
    dataset = open_dataset(str(tmp_path / "data"))
    other = Multiplying(
        made.centre * 0, made.components, factor=8, scaling_factor=made.scaling_factor, psnr_db=made.psnr_db
    )
    with pytest.raises(UsageError, match="light and dark only") as refused:
        find_duplicates(dataset, other, resolution=64)
    assert refused.value.hint == "--decode decodes every latent"
    found = find_duplicates(dataset, other, resolution=64, whole=True)
    assert [group.tolist() for group in found.groups] == [[3, 24]]


def test_hashes_keep_through_small_changes_and_differ_between_pictures() -> None:
    pictures = np.stack([photograph(number) for number in range(60)]).astype(np.float32) / 255
    own = hashes(pictures)
    same = hashes(pictures.reshape(60, 32, 2, 32, 2, 3).mean((2, 4)))
    assert np.median(apart(own.bits, same.bits)) <= 3
    others = apart(own.bits[:-1], own.bits[1:])
    assert 24 < others.mean() < 40
    assert others.min() > 8
    counts = np.bitwise_count(own.bits)
    assert (counts == 32).all(), "half of the frequencies lie above their median"
    flat = hashes(np.full((2, 8, 24, 3), 0.6, np.float32))
    assert flat.bits.tolist() == [0, 0]
    assert (flat.colours == 153).all()


def slow_groups(given: Hashes, distance: int) -> list[int]:
    """Each with each."""
    first = list(range(len(given)))

    def root(of: int) -> int:
        return of if first[of] == of else root(first[of])

    for a in range(len(given)):
        for b in range(a):
            near = bin(int(given.bits[a]) ^ int(given.bits[b])).count("1") <= distance
            colours = np.abs(given.colours[a].astype(int) - given.colours[b]).max() <= COLOUR
            if near and colours:
                low, high = sorted((root(a), root(b)))
                first[high] = low
    return [root(at) for at in range(len(given))]


@pytest.mark.parametrize("distance", [0, 1, 3, 4, 6, 8])
def test_grouping_finds_exactly_what_comparing_each_with_each_finds(distance: int) -> None:
    random = np.random.default_rng(distance)
    centres = random.integers(0, 1 << 63, 60, dtype=np.uint64)
    bits = centres[random.integers(0, 60, 400)]
    for _ in range(5):  # up to five bits of each are turned
        turned = np.uint64(1) << random.integers(0, 64, 400, dtype=np.uint64)
        bits = np.where(random.random(400) < 0.5, bits ^ turned, bits)
    colours = random.integers(0, 3, (400, 1), dtype=np.uint8) * np.uint8(30) + random.integers(
        0, 8, (400, 12), dtype=np.uint8
    )
    given = Hashes(bits, colours.astype(np.uint8))
    assert groups(given, distance).tolist() == slow_groups(given, distance)


def test_many_of_one_kind_and_many_of_all_kinds_stay_quick() -> None:
    """Half a million: pairs would be 10^11."""
    random = np.random.default_rng(0)
    count = 500_000
    bits = random.integers(0, 1 << 63, count, dtype=np.uint64)
    colours = random.integers(0, 255, (count, 12), dtype=np.uint8)
    bits[:100_000], colours[:100_000] = 0, 255  # white pictures
    bits[-1000:], colours[-1000:] = bits[200_000:201_000] ^ np.uint64(0b1011), colours[200_000:201_000]
    found = groups(Hashes(bits, colours), 4)
    assert (found[:100_000] == 0).all()
    assert (found[-1000:] == np.arange(200_000, 201_000)).all()
    assert (found[300_000:400_000] == np.arange(300_000, 400_000)).all()


def test_a_damaged_chunk_of_latents_is_named(data: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(data, tmp_path / "data"))
    dataset = open_dataset(str(copy))
    name = dataset.index.file(2, "64px")
    content = bytearray((copy / name).read_bytes())
    content[dataset.index.sibling("64px").start(2, 1) + 200] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(CorruptShard, match="latent_mean"):
        find_duplicates(dataset, PatchPCA.load(str(copy / "autoencoder")), resolution=64)


def test_files_of_others_have_means_and_keys_too(tmp_path: Path) -> None:
    from foreign import mapped, samples, table, write

    from isthmus.storage.shards.foreign_build import index_files
    from isthmus.storage.shards.foreign_settings import parse_settings

    rows = samples(16)
    write(tmp_path / "0.parquet", table(rows))
    index_files([str(tmp_path)], None, parse_settings(mapped()))
    dataset = open_dataset(str(tmp_path))
    np.testing.assert_array_equal(read_means(dataset, 1, 64), [row.latents[64][0] for row in rows[8:]])
    assert read_keys(dataset, 1, 64) == [row.key for row in rows[8:]]


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    with pytest.raises(SystemExit) as ended:
        main(["data", "duplicates", *map(str, arguments)])
    captured = capsys.readouterr()
    assert ended.value.code == code, captured.err
    return captured


def test_the_report_lists_every_group_with_keys_and_places(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.jsonl"
    found = json.loads(run(capsys, data, "--out", out, "--json").out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == found["groups"] >= 30
    assert sum(len(line["rows"]) for line in lines) == found["rows"] == found["surplus"] + found["groups"]
    assert lines[0]["rows"] == found["largest"][0]
    dataset = open_dataset(str(data))
    for row in lines[3]["rows"]:
        shard = dataset.index.shard_names.index(row["shard"])
        (block,) = np.flatnonzero(
            (dataset.index.shard == shard) & (dataset.index.row_group == row["row_group"])
        )
        assert read_keys(dataset, int(block), 64)[row["row"]] == row["key"]
    text = run(capsys, data).out
    assert "groups of look-alikes" in text
    assert "a linear preview that shows" in text
    sheet = tmp_path / "alike.png"
    assert json.loads(run(capsys, data, "--sheet", sheet, "--json").out)["sheet"] == str(sheet)
    with Image.open(sheet) as drawn:
        assert drawn.width > 1000
    none = json.loads(run(capsys, data, "--distance", 0, "--decode", "--json").out)
    assert none["groups"] < found["groups"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--distance", "9"], "from 0 to 8 bits of 64"),
        (["--sheet", "x.jpg"], "a sheet is a PNG"),
        (["--font", "x.ttf"], "--font is of a sheet"),
        (["--resolution", "32"], "no latents at 32 px"),
        (["--autoencoder", "/nowhere"], "no patch_pca autoencoder"),
    ],
)
def test_mistakes_are_one_line(
    data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in run(capsys, data, *arguments, code=2).err
