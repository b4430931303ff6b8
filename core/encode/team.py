"""The ranks of an encode job as one: what they tell of themselves, what rank 0 makes of it, and how they end together.

Each rank leaves its figures in the node's folder of outcomes; the first rank of a node puts them together into one small
file of the run directory, `encode/node-NN.json`, written again and again; rank 0 reads those, tells the whole job's line, and
keeps the budget. A node whose file stands still is gone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.core.encode.job import Progress
from isthmus.core.outcome import write_outcome
from isthmus.core.train.control import BudgetWatch
from isthmus.errors import IsthmusError, StorageError, TrainingFailed
from isthmus.files import replace_file
from isthmus.storage.rundir import RunDirectory

if TYPE_CHECKING:
    from isthmus.storage.shards import Manifest

BEGUN = "encode/begun.json"
METRIC = "encode"
_WINDOW_S = 60.0
_GONE_S = 600.0
"""For which a node's figures may stand still while others wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank this is."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    attempt: int

    @property
    def node(self) -> int:
        """Of its machine; every machine has as many ranks."""
        return self.rank // self.local_ranks

    @property
    def nodes(self) -> int:
        """How many machines there are."""
        return -(-self.ranks // self.local_ranks)


@dataclass(slots=True)
class Whole:
    """The job so far."""

    expected: int | None = None
    """Pictures of the source, about."""
    before: int = 0
    """Of these, done before this attempt."""
    written: int = 0
    rejected: int = 0
    """Both of this attempt."""
    rate: float = 0.0
    """Pictures a second of all ranks, over the last minute."""
    hours: float = 0.0
    """Of running, over all attempts."""
    usd_per_hour: float | None = None
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def done(self) -> int:
        """Pictures that are done, rejected ones among them."""
        return self.before + self.written + self.rejected

    @property
    def seconds_left(self) -> float | None:
        """Until all are done, about."""
        if self.expected is None or not self.rate:
            return None
        return max(0, self.expected - self.done) / self.rate

    @property
    def usd(self) -> float | None:
        """What it cost so far, where the launcher knew a price."""
        return None if self.usd_per_hour is None else self.hours * self.usd_per_hour

    def __str__(self) -> str:
        left = self.seconds_left
        words = [
            f"encode {self.done}"
            + (f"/{max(self.expected, self.done)}" if self.expected else "")
            + " pictures"
        ]
        words.append(f"{self.rejected} rejected")
        words.append(f"{self.rate:.1f} images/s")
        if left is not None:
            words.append(f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left")
        if self.usd is not None:
            words.append(f"${self.usd:,.2f} so far")
        return "  ".join(words)

    def row(self) -> dict[str, Any]:
        """For the run's metrics."""
        return {
            "pictures": self.done,
            "expected": self.expected,
            "written": self.written,
            "rejected": self.rejected,
            "images_per_s": round(self.rate, 3),
            "seconds_left": None if self.seconds_left is None else round(self.seconds_left, 1),
            "hours": round(self.hours, 5),
            "usd": None if self.usd is None else round(self.usd, 4),
        }


class JobTeam:
    """What :func:`isthmus.core.encode.encode.encode_share` asks of a job's ranks. A context manager.

    Args:
        folder: the node's folder of outcomes.
        budget: of the whole run, on rank 0.
        every: seconds between two looks and lines.
        out: gets rank 0's lines.
    """

    def __init__(
        self,
        run: RunDirectory,
        seat: Seat,
        folder: Path,
        budget: BudgetWatch,
        *,
        every: float = 10.0,
        out: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._seat, self._folder, self._budget = run, seat, folder, budget
        self._every, self._out, self._clock = every, out, clock
        self._whole = Whole(usd_per_hour=budget.usd_per_hour)
        self._begun = clock()
        self._past: deque[tuple[float, int]] = deque()
        self._telling = threading.Lock()
        self._beats: dict[int, tuple[Any, float]] = {}
        self._beat = 0
        self._stop = threading.Event()
        self._asked_to_stop = False
        self._thread: threading.Thread | None = None
        self._claims, self._token = f"encode/claims/{seat.attempt:04d}", secrets.token_hex(8)
        self._rows = run.metrics(METRIC, writer=f"attempt{seat.attempt}") if seat.rank == 0 else None

    def __enter__(self) -> JobTeam:
        self._thread = threading.Thread(target=self._tell_on, name="progress", daemon=True)
        if self._seat.local_rank == 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=5)
        if self._rows is not None:
            with contextlib.suppress(StorageError):
                self._rows.close()

    # -- of encode_share

    def began(self, asked: str) -> bool:
        """Whether this run began the encoding of that digest."""
        data = self._run.read_file(BEGUN)
        return data is not None and json.loads(data).get("asked") == asked

    def begin(self, asked: str, plan: Mapping[str, Any], done: Sequence[Mapping[str, Any] | None]) -> None:
        """Rank 0 has a plan: from here on a whole dataset at the destination is this run's."""
        if not self.began(asked):
            self._run.write_file(BEGUN, json.dumps({"asked": asked, "pictures": plan["pictures"]}).encode())
        units = len(plan.get("asked", {}).get("units", ()))
        if 0 < units < self._seat.ranks:
            idle = self._seat.ranks - units
            self._out(
                f"note: {units} work unit{'s' if units > 1 else ''} for {self._seat.ranks} ranks: {idle} of them will have "
                "nothing to do; a smaller encode.unit (--unit) would share out more"
            )
        self._whole.expected = int(plan["pictures"])
        self._whole.before = sum(
            int(record["written"]) + sum(record["counts"].values()) for record in done if record is not None
        )

    def claim(self, unit: int) -> bool:
        """Whether the unit is this rank's to encode, in this attempt."""
        data = json.dumps({"rank": self._seat.rank, "token": self._token}).encode()
        return self._run.create_file(f"{self._claims}/{unit:05d}.json", data)

    def claimed(self) -> set[int]:
        """The units that any rank of this attempt has claimed."""
        names = self._run.file_names(self._claims)
        return {int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit()}

    def wait(self) -> None:
        """A moment, in which the others go on. Raises TrainingFailed when a node is gone."""
        time.sleep(min(1.0, self._every))
        if self._seat.nodes == 1:
            return
        self._look()
        for node, (_, since) in self._beats.items():
            if node != self._seat.node and self._clock() - since > _GONE_S:
                cause = (
                    f"node {node} has told nothing for {_GONE_S / 60:.0f} minutes; its machine may be gone"
                )
                write_outcome("failed", cause=cause, echo=True)  # no fault of ours: to be resumed
                raise TrainingFailed(cause)

    def finish(self, manifest: Manifest, total: Progress) -> None:
        """Rank 0's last words: the whole job's figures, in the log, in a last row, and in run.json."""
        with self._telling:
            self._stop.set()
        whole = self._whole
        whole.before, whole.written = 0, manifest.samples
        whole.rejected, whole.reasons = sum(total.rejected.values()), dict(total.rejected)
        whole.expected, whole.hours = whole.done, self._budget.hours
        whole.rate = (whole.done - total.before) / max(1e-9, self._clock() - self._begun)
        if not total.written:
            self._out(
                f"the dataset was whole already: {manifest.samples} samples, fingerprint {manifest.fingerprint}"
            )
            return
        assert self._rows is not None
        self._rows.write({**whole.row(), "attempt": self._seat.attempt, "reasons": whole.reasons})
        self._rows.flush()
        if self._run.exists():
            self._run.update_run_json(dataset_fingerprints=[manifest.fingerprint])
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(whole.reasons.items()))
        cost = f", ${whole.usd:,.2f}" if whole.usd is not None else ""
        self._out(
            f"encoded {manifest.samples} samples, {manifest.size / 1e6:.1f} MB, in {whole.hours * 60:.1f} min, "
            f"{whole.rate:.1f} images/s{cost}; "
            f"left out {whole.rejected}" + (f": {counts}" if counts else "")
        )
        for line in total.fields_in_words():
            self._out(line)
        self._out(f"fingerprint {manifest.fingerprint}")

    # -- figures

    def note(self, progress: Progress) -> None:
        """This rank's figures, for whoever puts them together."""
        path = self._folder / f"encoded-rank{self._seat.rank}.json"
        told = {
            "written": progress.written,
            "rejected": sum(progress.rejected.values()),
            "reasons": progress.rejected,
        }
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(told))

    def _tell_on(self) -> None:
        while not self._stop.wait(self._every):
            with contextlib.suppress(IsthmusError):
                self.tell()

    def tell(self) -> None:
        """This node's figures to the run directory; on rank 0 the whole job's line and row, and the budget."""
        with self._telling:
            if not self._stop.is_set():
                self._tell()

    def _tell(self) -> None:
        own = self._own_node()
        if self._seat.nodes > 1:
            self._beat += 1
            own |= {"beat": [self._seat.attempt, self._beat]}
            self._run.write_file(f"encode/node-{self._seat.node:02d}.json", json.dumps(own).encode())
        if self._seat.rank != 0:
            return
        nodes = [own, *self._look()]
        whole = self._whole
        whole.written = sum(int(node["written"]) for node in nodes)
        whole.rejected = sum(int(node["rejected"]) for node in nodes)
        whole.rate = self._pace(whole.written + whole.rejected)
        whole.hours = self._budget.hours
        whole.reasons = {}
        for node in nodes:
            for reason, count in node["reasons"].items():
                whole.reasons[reason] = whole.reasons.get(reason, 0) + int(count)
        if whole.expected is not None:
            self._out(str(whole))
            assert self._rows is not None
            self._rows.write({**whole.row(), "attempt": self._seat.attempt})
        reason = self._budget.reached()
        if reason is not None and not self._asked_to_stop:
            # Every node's worker hears of it and ends its ranks, ours among them.
            self._run.event("stop-requested", by="budget", reason=reason)
            self._out(f"stopping: {reason}")
            self._asked_to_stop = True

    def _pace(self, pictures: int) -> float:
        """Pictures a second over the last minute, or since the first one was done."""
        now, past = self._clock(), self._past
        if pictures and not past:
            past.append((self._begun, 0))
        past.append((now, pictures))
        while len(past) > 2 and now - past[1][0] >= _WINDOW_S:
            past.popleft()
        seconds = now - past[0][0]
        return (pictures - past[0][1]) / seconds if seconds > 0 else 0.0

    def _own_node(self) -> dict[str, Any]:
        total: dict[str, Any] = {"written": 0, "rejected": 0, "reasons": {}}
        for path in self._folder.glob("encoded-rank*.json"):
            try:
                told = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            for name in ("written", "rejected"):
                total[name] += told[name]
            for reason, count in told["reasons"].items():
                total["reasons"][reason] = total["reasons"].get(reason, 0) + count
        return total

    def _look(self) -> list[dict[str, Any]]:
        """What the other nodes tell in this attempt."""
        found = []
        for node in range(self._seat.nodes):
            self._beats.setdefault(node, (None, self._clock()))
            if node == self._seat.node:
                continue
            data = self._run.read_file(f"encode/node-{node:02d}.json")
            told = json.loads(data) if data else {}
            beat = told.get("beat")
            if beat is not None and beat != self._beats[node][0]:
                self._beats[node] = (beat, self._clock())
            if beat is not None and beat[0] == self._seat.attempt:
                found.append(told)
        return found
