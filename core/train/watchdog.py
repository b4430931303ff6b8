"""The watchdog: a light thread on each rank that knows where the rank is, and ends all when training hangs.

The training thread only writes attributes of a :class:`Beat`; the thread looks at them now and then. A rank without
progress for too long asks all others where they are, through a key-value store of its own connection (torchrun's,
which lives in the agent's process), never through the process group that hangs. Who is to blame is judged over the
answers (:mod:`isthmus.core.train.stall`); a report goes into the run directory, an event names the rank, and every
rank ends with the same last word, which the worker turns into exit code 75: the run can go on elsewhere.

The same store carries the last words of a rank that fails, so that its peers on other machines end at once.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from isthmus.core.outcome import FOLDER_VARIABLE, write_outcome
from isthmus.core.telemetry.deaths import last_place
from isthmus.core.train.stall import PATIENCE, STARTING, Position, Stall, judge, report
from isthmus.storage.rundir.process import ProcessId

STORE_S = 10.0
"""How long one call to the store may take."""
_WRITING_S = 30.0
"""How long writing the report may take: the run directory may be what hangs."""
_ECHO_S = 10.0
"""How long a rank has to end by itself once another one has failed."""
_log = logging.getLogger(__name__)


class Beat:
    """Where the training thread is. Plain attributes, written by it alone: marking a phase costs nothing."""

    __slots__ = ("doing", "phase", "step", "ticks")

    def __init__(self) -> None:
        self.phase = STARTING
        self.step = 0
        """Of the step that is being done."""
        self.ticks = 0
        """Counts progress within a phase."""
        self.doing: Callable[[], str] | None = None
        """Says what a wait for data is for."""


class Run(Protocol):
    """What is used of a run directory."""

    def write_file(self, name: str, data: bytes) -> str: ...
    def event(self, type: str, /, **fields: Any) -> Any: ...


class Watchdog:
    """Watches the thread that makes it, from :meth:`start` to :meth:`stop`.

    Args:
        beat: that the training thread writes.
        limit: seconds without progress; some phases may take longer, see `stall.PATIENCE`.
        run: for report and event.
        rank: of `world_size` ranks.
        attempt: of the run; names the report.
        connect: the store that all ranks share; asked once, within the thread. None: there is none.
    """

    def __init__(
        self,
        beat: Beat,
        limit: float,
        run: Run,
        *,
        rank: int,
        world_size: int,
        attempt: int | str,
        connect: Callable[[], Any] = lambda: None,
        end: Callable[[], NoReturn] = lambda: os._exit(1),
    ) -> None:
        self.beat, self.limit, self.run = beat, limit, run
        self.rank, self.world_size, self.attempt = rank, world_size, attempt
        self.told: dict[str, Any] | None = None
        """The last words of a rank that failed: `rank`, `cause`."""
        self._connect, self._finish_process = connect, end
        self._store: Any = None
        self._watched = threading.get_ident()
        self._tick = min(1.0, limit / 10)
        self._seen: tuple[str, int, int] = ("", -1, -1)
        self._since = self._quiet_until = time.monotonic()
        self._told_at = 0.0
        self._question = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._stacks: Any = None

    def start(self) -> None:
        """Begins to watch."""
        folder = _folder()
        if folder is not None:
            with contextlib.suppress(OSError):
                self._stacks = (folder / f"stack-rank{self.rank}.txt").open("a")
                # Runs without Python's lock, so it answers even where this class cannot.
                faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * STORE_S)
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()

    def tell(self, cause: str) -> None:
        """Tells the other ranks that this one fails, and why. Never raises."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set("dead", json.dumps({"rank": self.rank, "cause": cause}))
            self._store.set("news", "1")

    def heard(self) -> dict[str, Any] | None:
        """The last words of a rank that failed first, if there are any by now. For a rank that has lost its peers:
        where they end because training hangs, it waits for its own watchdog to do the same."""
        if self.told is None and self._store is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                if self._store.check(["end"]) and threading.current_thread() is not self._thread:
                    self._thread.join(timeout=_WRITING_S)
                if self._store.check(["dead"]):
                    self.told = json.loads(self._store.get("dead"))
        return self.told

    # -- the thread

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store = self._connect()
        while not self._stop.wait(self._tick):
            try:
                self._look()
            except RuntimeError as error:
                # The store is gone, and with it the machine of node 0: what this rank sees itself must do.
                _log.warning("the watchdog of rank %d lost its store: %s", self.rank, error)
                self._store = None

    def _look(self) -> None:
        beat, now = self.beat, time.monotonic()
        seen = (beat.phase, beat.step, beat.ticks)
        if seen != self._seen:
            self._seen, self._since = seen, now
        limit = self.limit * PATIENCE.get(beat.phase, 1.0)
        if self._stacks is not None:
            # Fires when this thread cannot run: native code that never lets go of Python's lock.
            faulthandler.dump_traceback_later(2 * limit + 60, exit=True, file=self._stacks)
        if self._store is not None and self._store.check(["news"]):
            self._hear()
        if now - self._since <= limit or now < self._quiet_until:
            return
        self._quiet_until = now + max(2 * self._tick, self.limit / 4)
        if self.world_size == 1:
            self._conclude([self._position()])
        elif self._store is not None:
            self._ask()
        elif now - self._since > limit + 2 * STORE_S:
            position = self._position()
            cause = f"rank {self.rank} made no progress for {position.age:.0f} s and reaches no other rank"
            self._publish(Stall("alone", (), cause), [position])
            self._end({"cause": cause, "rank": None})

    def _hear(self) -> None:
        store = self._store
        if store.check(["end"]):
            self._end(json.loads(store.get("end")))
        while store.check([f"ask/{self._question}"]):
            self._answer()
        if self.heard() is not None and self.told is not None and self.told["rank"] != self.rank:
            self._told_at = self._told_at or time.monotonic()
            if time.monotonic() - self._told_at > _ECHO_S:
                cause = f"rank {self.told['rank']} failed: {self.told['cause']}"
                write_outcome("failed", cause=cause, culprit=self.told["rank"])
                self._finish()

    def _answer(self) -> None:
        position = json.dumps(self._position().to_json())
        self._store.set(f"answer/{self._question}/{self.rank}", position)
        self._question += 1
        # Who is asked does not ask in the same moment.
        self._quiet_until = max(self._quiet_until, time.monotonic() + 2 * self._tick + STORE_S)

    def _ask(self) -> None:
        store, number = self._store, self._question
        asker = store.compare_set(f"ask/{number}", "", str(self.rank))
        store.set("news", "1")
        if int(asker) != self.rank:
            return
        self._answer()
        keys = {rank: f"answer/{number}/{rank}" for rank in range(self.world_size)}
        positions: list[Position | None] = [None] * self.world_size
        deadline = time.monotonic() + max(3.0, min(15.0, self.limit))
        while keys and time.monotonic() < deadline and not self._stop.is_set():
            for rank, key in list(keys.items()):
                if store.check([key]):
                    positions[rank] = Position.from_json(json.loads(store.get(key)))
                    del keys[rank]
            time.sleep(0.05)
        self._quiet_until = time.monotonic() + max(2 * self._tick, self.limit / 4)
        if not self._stop.is_set():
            self._conclude(positions)

    def _conclude(self, positions: list[Position | None]) -> None:
        stall = judge(positions)
        if stall is None:
            return
        if stall.kind == "silent":
            stall = self._with_places(stall)
        where = self._publish(stall, positions)
        print(f"error: {stall.cause}" + (f"; see {where}" if where else ""), file=sys.stderr, flush=True)
        silent = list(stall.ranks) if stall.kind == "silent" else []
        verdict = {"cause": stall.cause, "rank": stall.ranks[0] if stall.ranks else None, "silent": silent}
        if self._store is not None:
            self._store.set("end", json.dumps(verdict))
            self._store.set("news", "1")
        self._end(verdict)

    def _with_places(self, stall: Stall) -> Stall:
        """What the fault handlers of silent ranks on this machine can still say of where they are."""
        folder = _folder()
        if folder is None or not self._signal(stall.ranks, signal.SIGUSR1):
            return stall
        time.sleep(1.0)
        places = [place for rank in stall.ranks if (place := last_place(folder / f"stack-rank{rank}.txt"))]
        return replace(stall, cause=f"{stall.cause}; last in {places[0]}") if places else stall

    def _signal(self, ranks: Sequence[int], number: signal.Signals) -> bool:
        """Sends a signal to those ranks that run on this machine; returns whether there are any."""
        sent, folder = False, _folder()
        if folder is None:
            return False
        for rank in ranks:
            with contextlib.suppress(OSError, ValueError):
                process = ProcessId.from_json(json.loads((folder / f"rank{rank}.pid").read_text()))
                if rank != self.rank and process.is_alive():
                    os.kill(process.pid, number)
                    sent = True
        return sent

    def _publish(self, stall: Stall, positions: list[Position | None]) -> str | None:
        """Writes report and event, in a thread that may be left behind."""
        written: list[str] = []

        def write() -> None:
            text = report(stall, positions)
            written.append(self.run.write_file(f"logs/attempt{self.attempt}-stall.txt", text.encode()))
            fields: dict[str, Any] = {"metric": "stall", "kind": stall.kind, "message": stall.cause}
            self.run.event("alarm", **fields, ranks=list(stall.ranks), report=written[0])

        thread = threading.Thread(target=_quietly, args=(write,), name="watchdog-report", daemon=True)
        thread.start()
        thread.join(timeout=_WRITING_S)
        return written[0] if written else None

    def _end(self, verdict: dict[str, Any]) -> NoReturn:
        write_outcome("preempted", cause=verdict["cause"], culprit=verdict["rank"], decisive=True)
        # They cannot end by themselves, and torchrun would give them half a minute.
        self._signal(verdict.get("silent", ()), signal.SIGKILL)
        self._finish()

    def _finish(self) -> NoReturn:
        _quietly(self._dump_exchanges)
        sys.stdout.flush()
        sys.stderr.flush()
        self._finish_process()

    def _dump_exchanges(self) -> None:
        """What torch's flight recorder holds of the last collectives, for `torchfrtrace`; the worker keeps it."""
        folder = _folder()
        if folder is not None:
            trace: bytes = torch._C._distributed_c10d._dump_fr_trace()  # type: ignore[attr-defined]
            (folder / f"flight_{self.rank}").write_bytes(trace)

    def _position(self) -> Position:
        beat = self.beat
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)[-40:]) if frame is not None else ""
        doing: list[str] = []
        if beat.doing is not None:
            describe = beat.doing
            # It takes the loader's lock, which may be what hangs.
            thread = threading.Thread(
                target=_quietly, args=(lambda: doing.append(describe()),), name="watchdog-doing", daemon=True
            )
            thread.start()
            thread.join(timeout=1.0)
        return Position(
            rank=self.rank,
            host=platform.node(),
            phase=beat.phase,
            step=beat.step,
            age=time.monotonic() - self._since,
            limit=self.limit * PATIENCE.get(beat.phase, 1.0),
            collectives=begun_collectives(),
            doing=doing[0] if doing else None,
            stack=stack,
        )


def begun_collectives() -> int:
    """Collectives that this rank has begun on the groups that a step uses."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        # Not those of checkpoints, which run beside the training at their own pace.
        if group.group_desc == "default_pg" or group.group_desc.startswith("mesh"):
            with contextlib.suppress(RuntimeError):
                total += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return total


def connect_store() -> Any:
    """A connection of one's own to the store of torchrun's agent, or of rank 0; None for a process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        return None
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=60),
    )
    store.set_timeout(datetime.timedelta(seconds=STORE_S))
    return PrefixStore("isthmus/alive", store)


def _folder() -> Path | None:
    """Where ranks leave their last words for the worker; None without one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def _quietly(work: Callable[[], Any]) -> None:
    """Does it; a failure is logged. For what must not get in the way of ending."""
    try:
        work()
    except Exception:  # noqa: BLE001
        _log.warning("the watchdog could not say all", exc_info=True)
