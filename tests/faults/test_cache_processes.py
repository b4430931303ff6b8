"""Processes that share a cache folder: bytes are right, the limit holds, and a kill at any moment leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cache_rank
import pytest

pytestmark = pytest.mark.faults

FILES, SIZE = 8, 400_000
LIMIT = int(3.4 * SIZE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    for number in range(FILES):
        size = SIZE - 1000 * number
        (root / cache_rank.name(number)).write_bytes(cache_rank.content(number, size))
    return root


class Watcher:
    """Samples how much a folder holds, all the time; at the end, the most it held."""

    def __init__(self, cache: Path) -> None:
        self._copies, self.most, self.samples = cache / "copies", 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            # Where a file goes, comes or is renamed meanwhile the look does not count: it saw two states.
            with contextlib.suppress(FileNotFoundError):
                seen = set(self._copies.glob("*/*"))
                total = sum(path.stat().st_size for path in seen)
                if seen == set(self._copies.glob("*/*")):
                    self.most, self.samples = max(self.most, total), self.samples + 1
            time.sleep(0.001)


def start(store: Path, cache: Path, order: list[int], **settings: object) -> subprocess.Popen[str]:
    given = {
        "store": str(store),
        "cache": str(cache),
        "limit": LIMIT,
        "piece": 64_000,
        "block": 100_000,
        "order": order,
        "pace": 0.001,
        "delay": 0.01,
    }
    return subprocess.Popen(
        [sys.executable, cache_rank.__file__, json.dumps(given | settings)], stdout=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    found: dict[str, int] = json.loads(out.splitlines()[-1])
    return found


def held(cache: Path) -> list[str]:
    """The files of the folder that somebody has locked."""
    found = []
    for path in cache.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    found.append(path.name)
    return found


def clean(cache: Path) -> None:
    """Nothing is locked, half-way, or damaged."""
    assert held(cache) == []
    assert list((cache / "readers").iterdir()) == []
    for path in (cache / "copies").glob("*/*"):
        assert not path.name.endswith("%part")
        assert path.read_bytes() == cache_rank.content(int(path.name[5:8]), path.stat().st_size)


def test_three_processes_share_a_folder_that_is_smaller_than_the_data(store: Path, tmp_path: Path) -> None:
    cache, dice = tmp_path / "cache", random.Random(1)
    orders = [dice.sample(range(FILES), FILES) for _ in range(3)]
    with Watcher(cache) as watcher:
        ranks = [start(store, cache, order, passes=12) for order in orders]
        found = [result(rank) for rank in ranks]
    assert [one["wrong"] for one in found] == [0, 0, 0]
    assert all(one["cache_hits"] + one["cache_misses"] == one["reads"] for one in found)
    # How many depends on who runs when: the orders differ, and a folder of half the data serves the one that is behind.
    assert sum(one["cache_hits"] for one in found) > 0.02 * sum(one["reads"] for one in found)
    assert watcher.samples > 100
    assert 2 * SIZE < watcher.most <= LIMIT
    clean(cache)


@pytest.mark.parametrize("seed", range(2))
def test_a_process_that_is_killed_at_any_moment_harms_nobody(store: Path, tmp_path: Path, seed: int) -> None:
    cache, dice, half_way = tmp_path / "cache", random.Random(seed), 0
    order = list(range(FILES))
    with Watcher(cache) as watcher:
        lasting = start(store, cache, dice.sample(order, FILES), passes=20, pace=0.004)
        for kill in range(4):
            # Another dataset, of which more will be read: its files push the others out.
            own = f"victim-{kill}"
            victim = start(store, cache, dice.sample(order, FILES), passes=100, delay=0.03, dataset=own)
            assert victim.stdout is not None
            assert json.loads(victim.stdout.readline()) == {"joined": True}
            deadline = time.monotonic() + 5
            while not list((cache / "copies" / own).glob("*%part")) and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(dice.uniform(0.0, 0.08))
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            half_way += len(list((cache / "copies" / own).glob("*%part")))
        assert result(lasting)["wrong"] == 0
        assert result(start(store, cache, order, passes=4))["wrong"] == 0
    assert half_way > 0
    assert watcher.most <= LIMIT
    clean(cache)
