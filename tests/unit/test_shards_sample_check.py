"""`isthmus data verify --sample`: what is drawn, what it finds and what it cannot find, and that it stays small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import FaultyServer
from foreign import mapped, samples, table, write

from isthmus.cli.app import main
from isthmus.errors import UsageError
from isthmus.storage.shards import DatasetSpec, open_dataset, verify
from isthmus.storage.shards.draw import draw_blocks, draw_rows
from isthmus.storage.shards.sample_check import unseen_share, verify_sample
from isthmus.storage.shards.synthetic import TINY, write_synthetic

SPEC = DatasetSpec(TINY.autoencoder, TINY.text, TINY.resolutions, 2, TINY.buckets)
ROWS = 400


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("sampled") / "data"
    write_synthetic(
        str(place), ROWS, SPEC, bucket_of=lambda number: "2:1" if number % 50 == 0 else "1:1",
        size_class_of=lambda number: 32 if number % 4 == 0 else 64,
    )  # fmt: skip
    return place


@pytest.fixture
def data(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "data"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def test_a_sound_dataset_is_sound_and_only_a_part_is_read(pristine: Path) -> None:
    whole, part = verify(str(pristine)), verify_sample(str(pristine), 50)
    assert part.ok
    assert 50 <= part.rows < 120
    assert part.size < whole.size / 3
    assert (whole.row_groups, part.row_groups_of) == (whole.row_groups_of, whole.row_groups_of)
    assert part.row_groups < whole.row_groups
    assert 0 < unseen_share(part) < 0.5
    assert unseen_share(whole) == 0


def test_the_same_seed_draws_the_same_row_groups_and_every_kind_is_drawn(pristine: Path) -> None:
    dataset = open_dataset(str(pristine))
    index = dataset.index
    drawn = draw_blocks(dataset, 60, 3)
    assert drawn == draw_blocks(dataset, 60, 3) == sorted(set(drawn))
    assert drawn != draw_blocks(dataset, 60, 4)
    kinds = set(zip(index.bucket.tolist(), index.size_class.tolist(), strict=True))
    assert {(int(index.bucket[block]), int(index.size_class[block])) for block in drawn} == kinds
    assert index.rows[drawn].sum() >= 60
    assert draw_blocks(dataset, 10**9, 0) == list(range(len(index)))
    large = draw_blocks(dataset, 60, 3, index.size_class == 64)
    assert set(index.size_class[large].tolist()) == {64}
    assert draw_blocks(dataset, 60, 3, index.size_class > 64) == []


def test_rows_are_drawn_from_different_row_groups_as_long_as_there_are_any(pristine: Path) -> None:
    dataset = open_dataset(str(pristine))
    few = draw_rows(dataset, 20, 0)
    assert len(few) == 20 == len({block for block, _ in few})
    every = draw_rows(dataset, 10**6, 0)
    assert len(every) == len(set(every)) == ROWS
    assert all(row < dataset.index.rows[block] for block, row in every)
    assert draw_rows(dataset, 20, 0) == few != draw_rows(dataset, 20, 1)


def test_over_many_seeds_every_damage_is_found_and_its_place_is_told(data: Path) -> None:
    dataset = open_dataset(str(data))
    ranges = dataset.index.sibling("64px")
    block = int(np.flatnonzero(dataset.index.size_class == 64)[5])
    flip(data / dataset.index.file(block, "64px"), ranges.start(block, 2) + 100)
    told = str(verify(str(data)).problems[0])
    found = [verify_sample(str(data), 100, seed=seed) for seed in range(30)]
    assert {str(problem) for report in found for problem in report.problems} == {told}
    # A quarter of the rows: about a quarter of the seeds.
    assert 2 <= sum(not report.ok for report in found) <= 20
    assert [str(problem) for problem in verify_sample(str(data), ROWS).problems] == [told]


def test_a_missing_or_cut_file_is_found_whatever_is_drawn(data: Path) -> None:
    names = sorted(path.name for path in data.iterdir() if path.name.startswith("part-"))
    (data / names[0]).unlink()
    with (data / names[-1]).open("r+b") as file:
        file.truncate(1000)
    problems = [str(problem) for problem in verify_sample(str(data), 1, seed=1).problems]
    assert f"{names[0]}: the file is missing" in problems
    assert any(line.startswith(f"{names[-1]}: it has 1000 bytes, the index lists ") for line in problems)


def test_small_files_are_checked_whole(data: Path) -> None:
    flip(data / "_null.parquet", 60)
    (problem,) = verify_sample(str(data), 1).problems
    assert "_null.parquet" in str(problem)
    flip(data / "_index.parquet", 60)
    assert "_index.parquet" in str(verify_sample(str(data), 1).problems[-1])
    (data / "manifest.json").write_text("{}")
    assert "manifest.json" in str(verify_sample(str(data), 1).problems[0])


def test_a_dataset_in_a_store_is_sampled_the_same(pristine: Path, tmp_path: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(str(pristine), f"/{tmp_path.name}/data", recursive=True)
    there, here = verify_sample(f"memory://{tmp_path.name}/data", 50), verify_sample(str(pristine), 50)
    assert there.ok
    assert (there.rows, there.size, there.files) == (here.rows, here.size, here.files)
    name = next(path.name for path in pristine.iterdir() if path.name.endswith("64px.parquet"))
    store.rm(f"/{tmp_path.name}/data/{name}")
    assert any(
        "the file is missing" in str(p) for p in verify_sample(f"memory://{tmp_path.name}/data", 1).problems
    )


def test_a_dataset_over_two_roots_and_one_on_a_web_server_are_sampled(data: Path, tmp_path: Path) -> None:
    with FaultyServer(data) as server:
        assert verify_sample(server.url, 50).ok, "no listing there: what is drawn is looked at"
    other = tmp_path / "other"
    other.mkdir()
    for path in data.glob("part-00003.*"):
        path.rename(other / path.name)
    roots = [str(data), str(other)]
    report = verify_sample(roots, 50)
    assert report.ok, report.problems
    (other / "part-00003.text.parquet").unlink()
    problems = [str(problem) for problem in verify_sample(roots, 1).problems]
    assert "part-00003.text.parquet: the file is missing" in problems


def test_files_of_others_are_sampled_too(tmp_path: Path) -> None:
    from isthmus.storage.shards.foreign_build import index_files
    from isthmus.storage.shards.foreign_settings import parse_settings

    for number in range(4):
        write(tmp_path / f"{number}.parquet", table(samples(64, first=64 * number)))
    index_files([str(tmp_path)], None, parse_settings(mapped()))
    part = verify_sample(str(tmp_path), 40)
    assert part.ok, part.problems
    assert (part.rows, part.row_groups, part.row_groups_of) == (40, 5, 32)
    (tmp_path / "2.parquet").write_bytes((tmp_path / "2.parquet").read_bytes()[:-1])
    (problem,) = verify_sample(str(tmp_path), 256).problems
    assert "2.parquet: it has" in str(problem)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["data", "verify", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_command_says_what_was_looked_at_and_what_may_be_unseen(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, str(data), "--sample", "50")
    assert code == 0
    assert "would have shown with 95 % confidence" in out
    assert " row groups, " in out
    code, out, _ = command(capsys, str(data), "--sample", "50", "--json")
    found: dict[str, Any] = json.loads(out)
    assert (found["ok"], found["seed"]) == (True, 0)
    assert found["rows"] >= 50
    for path in data.glob("part-*px.parquet"):
        flip(path, path.stat().st_size // 2)
    code, out, _ = command(capsys, str(data), "--sample", "50")
    assert code == 1
    assert "another checksum" in out
    assert out.splitlines()[-1].endswith("problems")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seed", "3"], "--seed is of a sample"),
        (["--sample", "-5"], "greater than or equal to 0"),
    ],
)
def test_mistakes_are_one_line(
    data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, _, err = command(capsys, str(data), *arguments)
    assert code == 2
    assert words in err
    with pytest.raises(UsageError, match="at least one row"):
        verify_sample(str(data), 0)
