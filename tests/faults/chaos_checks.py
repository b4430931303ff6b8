"""What must hold of a run after each event and at its end."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_attempt import Broken
from torch.distributed.checkpoint.api import CheckpointException
from training import figures, recipe_data, write_recipe

from isthmus.core.train.checkpoint import read_weights
from isthmus.core.train.weights import checksum
from isthmus.storage.rundir import RunDirectory

LANES = 4
SAMPLES = 48
STAGES = (("16px", 16, 8, 30), ("32px", 32, 16, 32), ("32px-again", 32, 8, 34))
"""Name, resolution, global batch size, steps: one border on a checkpoint, one between two."""
STEPS = sum(steps for *_, steps in STAGES)
EVERY = 3
RELATIVE_ERROR = 1e-5
"""Of a run with changes of world size against the fault-free run of the same schedule: losses, gradient norms, weights."""


def recipe_of(data: str, world_size: int, *, until: int = STEPS) -> dict[str, Any]:
    """The run of all courses: fsdp, accumulation, EMA with a reset, dropped captions, validation.

    Args:
        until: cut the stages here, to train a part of it without faults.
    """
    stages, first = [], 0
    for number, (name, resolution, batch, steps) in enumerate(STAGES):
        if first < until:
            stages.append(
                {
                    "name": name, "resolution": resolution, "steps": min(steps, until - first),
                    "global_batch_size": batch, "micro_batch_size": 2, "learning_rate": 1e-2,
                    **({"on_enter": {"ema": "reset"}} if number == 1 else {}),
                }
            )  # fmt: skip
        first += steps
    return recipe_data(
        data,
        stages=stages,
        checkpoint={"every": EVERY, "keep": 3, "retry_budget": 60},
        validation={"every": 12, "loss_by_timestep": True, "samples": 8, "timestep_bins": 2},
        compute__gpus_per_node=world_size,
    )


def recipe_file(folder: Path, data: str, world_size: int, *, until: int = STEPS) -> Path:
    """The same as a file."""
    name = f"recipe-{world_size}-{until}.yaml"
    return write_recipe(folder, recipe_of(data, world_size, until=until), name)


class Committed:
    """The checkpoints of a run: which are there, whether each can be read, which were damaged on purpose."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._known: dict[int, str] = {}
        self.damaged: dict[int, tuple[str, bytes]] = {}
        """Step -> the file that was damaged, and as what."""
        self._good: list[int] = []
        self.read = 0

    def check(self) -> list[int]:
        """Reads every committed checkpoint that is new; returns the steps of the good ones.

        Raises:
            Broken: one cannot be read, or vanished though older ones are there.
        """
        good = []
        for step in self.run.checkpoints():
            if self._is_damaged(step):
                continue
            listed = self._commit(step)
            if self._known.get(step) != listed:
                try:
                    for which in ("model", "ema"):
                        read_weights(self.run, step, which)
                except (Exception, CheckpointException) as error:
                    if step not in self.run.checkpoints():
                        continue  # beside a running attempt: it was removed while it was read
                    raise Broken(f"the committed checkpoint of step {step} is unreadable: {error}") from error
                self._known[step] = listed
                self.read += 1
            good.append(step)
        gone = [step for step in self._good if step not in good and step > min(good, default=0)]
        gone = [step for step in gone if step not in self.damaged]
        if gone:
            raise Broken(f"the checkpoint of step {gone[0]} vanished while an older one is there: {good}")
        self._good = good
        return good

    def newest(self) -> int:
        """Of the good ones, 0 without any."""
        return max((step for step in self.run.checkpoints() if not self._is_damaged(step)), default=0)

    def _is_damaged(self, step: int) -> bool:
        if step not in self.damaged:
            return False
        path, data = self.damaged[step]
        if self.run.read_file(path) == data:
            return True
        del self.damaged[step]  # written anew
        self._known.pop(step, None)
        return False

    def damage(self, step: int, name: str, place: float) -> None:
        """Changes one byte of a file of a committed checkpoint."""
        path = f"checkpoints/step-{step:08d}/{name}"
        data = bytearray(self.run.read_file(path) or b"")
        data[int(place * (len(data) - 1))] ^= 4
        self.run.write_file(path, bytes(data))
        self.damaged[step] = path, bytes(data)

    def _commit(self, step: int) -> str:
        return (self.run.read_file(f"checkpoints/step-{step:08d}/COMMITTED") or b"").hex()


def products(run: RunDirectory) -> dict[str, Any]:
    """What a run has made, to compare bit for bit: figures of every step, weights, the last checkpoint's files."""
    found = run.read_metrics("train")
    last = run.checkpoints()[-1]
    files = run.read_commit(last)["files"]
    return {
        "figures": figures(found),
        "samples": [row["samples"] for row in found],
        "learning_rate": [row["learning_rate"] for row in found],
        "segments": run.segments(),
        "last": last,
        "model": checksum(read_weights(run, last, "model")),
        "ema": checksum(read_weights(run, last, "ema")),
        # Optimizer, step and all else that is saved.
        "files": {name: facts["sha256"] for name, facts in files.items() if name != ".metadata"},
    }


def check_equal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises Broken, with the first thing that differs."""
    for name, value in expected.items():
        if found[name] == value:
            continue
        where = ""
        if isinstance(value, list):
            pairs = zip(found[name], value, strict=False)
            where = str(next(((a, b) for a, b in pairs if a != b), (len(found[name]), len(value))))
        raise Broken(f"{name} differ from the uninterrupted run's: {where or (found[name], value)}")


def relative_error(run: RunDirectory, other: RunDirectory) -> dict[str, float]:
    """Largest relative differences of two runs: loss, gradient norm, and a weight against its tensor's largest one."""
    errors: dict[str, float] = defaultdict(float)
    for one, two in zip(run.read_metrics("train"), other.read_metrics("train"), strict=True):
        for name in ("loss", "grad_norm"):
            errors[name] = max(errors[name], abs(one[name] - two[name]) / abs(two[name]))
    for which in ("model", "ema"):
        mine, theirs = (read_weights(r, r.checkpoints()[-1], which) for r in (run, other))
        for name, weight in theirs.items():
            scale = float(weight.abs().max()) or 1.0
            errors[which] = max(errors[which], float((mine[name] - weight).abs().max()) / scale)
    return dict(errors)


Delivered = dict[int, tuple[int, list[str]]]
"""Step -> (world size, keys by position)."""


def delivered(run: RunDirectory) -> Delivered:
    """What the attempt that counts delivered at each step; raises Broken when a position is missing or comes twice."""
    attempt_of = {row["step"]: row["attempt"] for row in run.read_metrics("train")}
    places: dict[int, dict[int, str]] = defaultdict(dict)
    sizes: dict[int, int] = {}
    for rank in range(4):
        for row in run.read_metrics(f"keys-rank{rank}", all_attempts=True):
            step = row["step"]
            if row["attempt"] != attempt_of.get(step):
                continue
            sizes[step] = row["world_size"]
            for position, key in zip(row["positions"], row["keys"], strict=True):
                if position in places[step]:
                    raise Broken(f"step {step}: position {position} was delivered twice")
                places[step][position] = key
    found: Delivered = {}
    for step in range(1, STEPS + 1):
        _, _, batch, _ = STAGES[stage_of(step)]
        if sorted(places[step]) != list(range(batch)):
            raise Broken(f"step {step}: {len(places[step])} of {batch} samples were recorded")
        found[step] = sizes[step], [places[step][position] for position in range(batch)]
    return found


def check_epochs(found: Delivered) -> int:
    """That every key came once in each epoch of its stage and bucket; returns how many epochs were looked at."""
    looked = 0
    for stage in range(len(STAGES)):
        for bucket, keys in _buckets().items():
            lanes: list[list[str]] = [[] for _ in range(LANES)]
            for step, (_, delivered_keys) in found.items():
                if stage_of(step) == stage and delivered_keys[0] in keys:
                    share = len(delivered_keys) // LANES
                    for lane in range(LANES):
                        lanes[lane] += delivered_keys[lane * share : (lane + 1) * share]
            for epoch in range(sum(map(len, lanes)) // len(keys) - 1):
                # Lanes end their epochs a row apart at most: each lane's share of an epoch, by the rule.
                ends = [
                    [(e * len(keys) + lane) // LANES for e in (epoch, epoch + 1)] for lane in range(LANES)
                ]
                seen = Counter(
                    key for (start, end), lane in zip(ends, lanes, strict=True) for key in lane[start:end]
                )
                if set(seen) != keys or set(seen.values()) != {1}:
                    raise Broken(f"stage {stage}, bucket {bucket}, epoch {epoch}: not every key once: {seen}")
                looked += 1
    return looked


def _buckets() -> dict[str, set[str]]:
    # As `make_latents` writes them.
    found: dict[str, set[str]] = {"1:1": set(), "1:2": set()}
    for index in range(SAMPLES):
        found["1:2" if index % 4 == 3 else "1:1"].add(f"sample-{index:04d}")
    return found


def stage_of(step: int) -> int:
    """The stage of a step (1 is the first)."""
    end = 0
    for index, (*_, steps) in enumerate(STAGES):
        end += steps
        if step <= end:
            return index
    raise ValueError(step)


def schedule_of(found: Delivered) -> list[tuple[int, int]]:
    """(world size, last step) of each stretch of steps with one world size."""
    stretches: list[tuple[int, int]] = []
    for step in sorted(found):
        size = found[step][0]
        if stretches and stretches[-1][0] == size:
            stretches.pop()
        stretches.append((size, step))
    return stretches


def events_of(run: RunDirectory, attempt: int) -> list[dict[str, Any]]:
    """The events of one attempt, by their own word."""
    return [event for event in run.events() if event.get("attempt") == attempt]


def dump(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Writes JSON so that a reader never sees half of it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(path)
