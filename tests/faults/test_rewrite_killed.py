"""`data split`, killed without warning again and again, ends in the bytes of one that nobody touched."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import rewriting
from rewriting import files_of, rows_of

from isthmus.errors import DatasetNotFound
from isthmus.storage.shards import open_dataset, verify
from isthmus.storage.shards.spec import FieldSpec

KILLS = 5


def command(source: Path, dest: Path) -> list[str]:
    return [
        sys.executable, "-m", "isthmus", "data", "split", str(source), str(dest), "--parts", "train=0.8,val=0.2",
        "--row-group-size", "2", "--shard-size", "4", "--threads", "2",
    ]  # fmt: skip


def test_a_split_that_was_killed_goes_on_to_the_same_bytes(tmp_path):
    fields = (FieldSpec("aesthetic", "number"), FieldSpec("licence", "text"))
    source = rewriting.write(tmp_path / "data", 400, spec=replace(rewriting.SPEC, fields=fields))
    subprocess.run(command(source, tmp_path / "whole"), check=True, capture_output=True)
    dest, draw = tmp_path / "killed", random.Random(7)
    records = len(list((tmp_path / "whole").rglob("part-*.text.parquet")))
    seen = 0
    for kill in range(KILLS):
        process = subprocess.Popen(command(source, dest), stdout=subprocess.DEVNULL)
        # Somewhere within its share of the shards: while one is written, or between its end and its record.
        wanted = min(records - 2, seen + draw.randint(1, records // KILLS))
        deadline = time.monotonic() + 60
        while len(list(dest.glob("_rewrite/*.arrow"))) < wanted:
            assert process.poll() is None, f"it ended before kill {kill}"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"it had ended before kill {kill}"
        now = len(list(dest.glob("_rewrite/*.arrow")))
        assert now >= seen, "what was done is done again"
        seen = now
        for part in ("train", "val"):
            with pytest.raises(DatasetNotFound, match="is not finished"):
                open_dataset(str(dest / part))
    subprocess.run(command(source, dest), check=True, capture_output=True)
    assert files_of(dest) == files_of(tmp_path / "whole")
    assert verify(str(dest / "train")).ok
    assert {**rows_of(dest / "train"), **rows_of(dest / "val")} == rows_of(source)
