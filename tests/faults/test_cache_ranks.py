"""Ranks of a node, as processes over HTTP, share a cache: each gets the bits that reading in place gives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cache_loader
import pytest
from faulty import flipped, reset

from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.synthetic import write_synthetic
from isthmus.storage.stream.access_files import whole_files

pytestmark = pytest.mark.faults
STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks") / "data"
    write_synthetic(str(root), 160, rows_per_shard=16, rows_per_group=4)
    return root


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[str]]:
    """For each of two ranks, its batches read in place."""
    return [
        cache_loader.load({"uri": str(folder), "rank": rank, "world": 2, "steps": STEPS})["digests"]
        for rank in range(2)
    ]


def start(uri: str, cache: Path, limit: int, rank: int, **more: Any) -> subprocess.Popen[str]:
    settings = {"uri": uri, "cache": str(cache), "limit": limit, "rank": rank, "world": 2, "steps": STEPS}
    process = subprocess.Popen(
        [sys.executable, cache_loader.__file__, json.dumps(settings | more)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_two_ranks_share_a_cache_one_is_killed_and_comes_back(
    folder: Path, expected: list[list[str]], faulty: Any, tmp_path: Path
) -> None:
    server, cache = faulty(folder), tmp_path / "cache"
    sizes = [file.size for file in whole_files(open_dataset(str(folder)), [64]).values()]
    limit = sum(sizes) // 2
    ranks = [start(server.url, cache, limit, rank, pace=0.02) for rank in range(2)]
    time.sleep(0.9)
    ranks[1].send_signal(signal.SIGKILL)
    ranks[1].communicate()
    ranks[1] = start(server.url, cache, limit, 1, pace=0.01)
    found = [result(rank) for rank in ranks]
    assert [one["digests"] for one in found] == expected
    assert all(one["cache_hits"] > 0 and one["cache_misses"] > 0 for one in found)
    held = sum(path.stat().st_size for path in (cache / "copies").glob("*/*"))
    assert 0 < held <= limit
    assert not list((cache / "readers").iterdir())


def test_bytes_that_are_damaged_on_their_way_into_the_cache_are_not_kept(
    folder: Path, expected: list[list[str]], faulty: Any, tmp_path: Path
) -> None:
    server, cache = faulty(folder), tmp_path / "cache"
    names = whole_files(open_dataset(str(folder)), [64])
    server.fail(flipped(), times=1, match="part-00003")
    server.fail(reset(0.5), times=3, match="part-00005")
    found = result(start(server.url, cache, 10**7, 0, pace=0.01, copies=len(names) - 1))
    assert found["digests"] == expected[0]
    kept = list((cache / "copies").glob("*/*"))
    assert len(kept) >= len(names) - 1
    for path in kept:
        assert path.read_bytes() == (folder / path.name).read_bytes()
