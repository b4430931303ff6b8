"""The order once more on delivered keys: real processes, a stage border, and a change of world size amid an epoch.

Those marked slow start thirty Python processes together; the last test is a small form of both.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from isthmus.storage.shards.synthetic import write_synthetic

RANK = """
import json, sys
from fractions import Fraction
from itertools import islice
from isthmus.storage.shards import open_dataset
from isthmus.storage.stream import Loader, Plan

job = json.loads(sys.argv[1])
loader = Loader(
    [open_dataset(uri) for uri in job["uris"]],
    [Fraction(repeat) for repeat in job["repeats"]],
    seed=11, lanes=job["lanes"], shuffle_window=48, stages=[32, 64], plan=Plan.from_json(job["plan"]),
    rank=job["rank"], world_size=job["world_size"], start_step=job["start"],
)
with loader, open(job["out"], "w") as out:
    for batch in islice(loader, job["stop"] - job["start"]):
        assert batch.latent_mean.shape[0] == len(batch.keys)
        line = {
            "step": batch.step, "stage": batch.stage, "bucket": batch.bucket,
            "keys": batch.keys, "positions": batch.positions.tolist(),
        }
        if job["places"]:
            places = [loader.describe(batch.step)[position] for position in line["positions"]]
            line["places"] = [
                [place.source, place.shard, place.row_group, place.epoch, place.appearance] for place in places
            ]
        out.write(json.dumps(line) + "\\n")
"""

PLAN = [
    {"stage": 0, "first_step": 0, "first_sample": 0, "global_batch_size": 16},
    {"stage": 0, "first_step": 20, "first_sample": 320, "global_batch_size": 24},
    {"stage": 1, "first_step": 33, "first_sample": 0, "global_batch_size": 8},
]
"""Stage 0 over 632 samples, its batch size changed on the way; then stage 1."""


@pytest.fixture(scope="module")
def uris(tmp_path_factory):
    """150 and 37 samples: two buckets, two size classes; neither number fits lanes or batches."""
    place = tmp_path_factory.mktemp("delivered")
    write_synthetic(
        str(place / "one"),
        150,
        bucket_of=lambda number: "2:1" if number % 7 == 0 else "1:1",
        size_class_of=lambda number: 32 if number % 4 == 0 else 64,
    )
    write_synthetic(str(place / "two"), 37, prefix="t", seed=2)
    return [str(place / "one"), str(place / "two")]


def deliver(
    uris: list[str], folder: Path, schedule: list[tuple[int, int, int]], **options: Any
) -> list[dict[str, Any]]:
    """The global batches of a run that goes through (world size, first step, end) one after the other.

    All ranks of an attempt run at once, each in a process of its own, as under torchrun.
    """
    steps: list[dict[str, Any]] = []
    for attempt, (world_size, start, stop) in enumerate(schedule):
        ranks = []
        for rank in range(world_size):
            out = folder / f"keys-{attempt}-{rank}.jsonl"
            job = {
                "uris": uris,
                "repeats": ["1", "1"],
                "plan": PLAN,
                "lanes": 8,
                "places": False,
                **options,
                "rank": rank,
                "world_size": world_size,
                "start": start,
                "stop": stop,
                "out": str(out),
            }
            process = subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps(job)], stderr=subprocess.PIPE, text=True
            )
            ranks.append((process, out))
        for process, _ in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
        delivered = [[json.loads(line) for line in out.read_text().splitlines()] for _, out in ranks]
        for lines in zip(*delivered, strict=True):
            assert len({(line["step"], line["stage"], line["bucket"]) for line in lines}) == 1
            merged = dict(lines[0])
            merged["keys"] = [key for line in lines for key in line["keys"]]
            merged["positions"] = [position for line in lines for position in line["positions"]]
            merged["ranks"] = [rank for rank, line in enumerate(lines) for _ in line["keys"]]
            merged["places"] = [tuple(place) for line in lines for place in line.get("places", ())]
            assert merged["positions"] == list(range(len(merged["keys"])))
            steps.append(merged)
    return steps


@pytest.mark.slow
def test_every_world_size_and_every_change_of_it_delivers_the_same_global_batches(uris, tmp_path):
    end = 70
    whole = deliver(uris, tmp_path, [(1, 0, end)])
    assert [step["step"] for step in whole] == list(range(end))
    for schedule in (
        [(2, 0, end)],
        [(4, 0, end)],
        # 187 samples are 11.7 batches of 16: each change falls inside an epoch, one near each border.
        [(1, 0, 5), (4, 5, 19), (2, 19, 21), (1, 21, 32), (4, 32, 34), (2, 34, end)],
    ):
        delivered = deliver(uris, tmp_path, schedule)
        for step in (*delivered, *whole):
            step.pop("ranks", None)
        assert delivered == whole


@pytest.mark.slow
def test_every_key_comes_once_an_epoch_across_borders(uris, tmp_path):
    steps = deliver(uris, tmp_path, [(2, 0, 9), (4, 9, 40), (1, 40, 106)])
    ones = {f"s{number}": "2:1" if number % 7 == 0 else "1:1" for number in range(150)}
    buckets = ones | {f"t{number}": "1:1" for number in range(37)}
    large = {key for key in buckets if key[0] == "t" or int(key[1:]) % 4}
    for stage, keys, first, stop in ((0, set(buckets), 0, 33), (1, large, 33, 106)):
        mine = [step for step in steps if step["stage"] == stage]
        assert [step["step"] for step in mine] == list(range(first, stop))
        assert all({buckets[key] for key in step["keys"]} == {step["bucket"]} for step in mine)
        for bucket in ("1:1", "2:1"):
            expected = {key for key in keys if buckets[key] == bucket}
            lanes: list[list[str]] = [[] for _ in range(8)]
            for step in mine:
                if step["bucket"] == bucket:
                    share = len(step["keys"]) // 8
                    for lane in range(8):
                        lanes[lane] += step["keys"][lane * share : (lane + 1) * share]
            delivered = sum(map(len, lanes))
            epochs = delivered // len(expected)
            assert epochs >= 2
            # Lanes end their epochs a row apart at most: take each lane's share of every epoch by the rule.
            for epoch in range(epochs - 1):
                ends = [[(e * len(expected) + lane) // 8 for e in (epoch, epoch + 1)] for lane in range(8)]
                seen = Counter(
                    key for (start, end), lane in zip(ends, lanes, strict=True) for key in lane[start:end]
                )
                assert set(seen) == expected
                assert set(seen.values()) == {1}


def test_one_two_and_four_ranks_deliver_the_same_and_share_blocks_at_lane_borders_alone(uris, tmp_path):
    plan = [{"stage": 0, "first_step": 0, "first_sample": 0, "global_batch_size": 16}]
    options = {"repeats": ["1", "5/2"], "plan": plan, "places": True}
    global_batches = []
    for world_size in (1, 2, 4):
        steps = deliver(uris, tmp_path, [(world_size, 0, 50)], **options)
        blocks_and_appearances(uris, steps, world_size)
        global_batches.append([(step["bucket"], step["keys"], step["positions"]) for step in steps])
    assert global_batches[0] == global_batches[1] == global_batches[2]


def blocks_and_appearances(uris: list[str], steps: list[dict[str, Any]], world_size: int) -> None:
    """A source two and a half times an epoch; between two ranks a lane border may cut one block a bucket and epoch."""
    delivered: Counter[tuple[str, int, int]] = Counter()
    readers: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for step in steps:
        for key, rank, (source, shard, row_group, epoch, appearance) in zip(
            step["keys"], step["ranks"], step["places"], strict=True
        ):
            assert (key[0] == "t") == (source == uris[1])
            delivered[key, epoch, appearance] += 1
            readers[step["bucket"], epoch, source, shard, row_group, appearance].add(rank)
    assert set(delivered.values()) == {1}
    # Epochs 0 and 1 of either bucket are over: 150 samples each, and 37 twice in the first, three times in the second.
    for epoch, times in ((0, 2), (1, 3)):
        expected = {(f"s{number}", epoch, 0) for number in range(150)}
        expected |= {(f"t{number}", epoch, again) for number in range(37) for again in range(times)}
        assert {key for key in delivered if key[1] == epoch} == expected
    cut: Counter[tuple[str, int]] = Counter()
    for (bucket, epoch, *_), ranks in readers.items():
        cut[bucket, epoch] += len(ranks) - 1
    print(f"\n{world_size} ranks, blocks delivered by a further one, by bucket and epoch: {dict(cut)}")
    assert max(cut.values()) <= world_size - 1
