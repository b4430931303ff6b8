"""The lease: who may write into a run directory.

A lease is a line of numbered objects, `lease/0001.json`, `lease/0002.json`, ...; the newest one counts. A holder
renews its own object; who wants the run creates the next number once the newest has expired or was released.
Only a conditional create is needed for that, so a takeover has one winner on any store, and the number is a
fencing token that only grows: a holder that slept through its expiry finds a newer number and knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from isthmus.errors import IsthmusError, LeaseLost, StorageError
from isthmus.storage.rundir.process import ProcessId
from isthmus.storage.rundir.store import Store


@dataclass(frozen=True)
class Holder:
    """The newest lease object, as read.

    `expires` and `renewed` are seconds since 1970 on the holder's clock; `machine` and `process` let another
    process of the same machine see that the holder is dead before the lease expires.
    """

    token: str
    owner: str
    ttl: float
    renewed: float
    expires: float
    machine: str = ""
    process: dict[str, float] = field(default_factory=dict)
    released: bool = False

    @property
    def number(self) -> int:
        """The fencing number, rising with each holder."""
        return int(self.token.split("-", 1)[0])

    def is_free(self, now: float) -> bool:
        """Released, expired, or held by a process of this machine that is no more."""
        if self.released or now >= self.expires:
            return True
        if self.machine and self.machine == this_machine() and self.process:
            return not ProcessId.from_json(self.process).is_alive()
        return False

    def describe(self, now: float) -> str:
        """For a message: owner and age of the last renewal."""
        return f"{self.owner} holds it (renewed {max(0.0, now - self.renewed):.0f} s ago)"


@cache
def this_machine() -> str:
    """Names this boot and process-id namespace, so that a process id read from a lease means the same process here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a real path
    except OSError:
        pass
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "kern.bootsessionuuid"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0 and result.stdout.strip():
            return f"{platform.node()}/{result.stdout.strip()}"
    return ""


def newest(store: Store) -> Holder | None:
    """The newest lease object, or None when nobody has ever held the run."""
    for name in sorted(store.names("lease"), key=lambda name: (len(name), name), reverse=True):
        data = store.read(f"lease/{name}")
        if data is None:
            continue
        try:
            return Holder(**json.loads(data))
        except (ValueError, TypeError):
            # Half written on a store without links: its writer holds it as of now.
            number = name.split(".", 1)[0]
            now = time.time()
            return Holder(token=f"{number}-unreadable", owner="unknown", ttl=5, renewed=now, expires=now + 5)
    return None


class Lease:
    """The right to write into a run directory, renewed by a thread. Made by `RunDirectory.lease`.

    As a context manager it releases on exit. `lost` is set, and `on_lost` called from the renewing thread, when
    another attempt took over or the store could not be reached until the expiry.
    """

    def __init__(
        self, store: Store, *, owner: str, ttl: float, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self.owner = owner
        self.ttl = ttl
        self.token = ""
        self.lost = threading.Event()
        self.why_lost = ""
        self._store = store
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._deadline = 0.0
        self._thread: threading.Thread | None = None

    def acquire(self, wait: float) -> Lease:
        """Takes the lease, or waits up to `wait` seconds for it.

        Raises:
            LeaseLost: it is still held; names the owner and the age of its last renewal.
        """
        deadline = time.monotonic() + wait
        while True:
            holder = newest(self._store)
            now = time.time()
            if holder is None or holder.is_free(now):
                if self._create((holder.number if holder else 0) + 1):
                    break
                continue  # another one was faster; look who
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise LeaseLost(
                    f"another attempt is running: {holder.describe(now)}",
                    where=self._store.uri,
                    hint="wait for it, or stop it with `isthmus stop`",
                )
            self._stop.wait(min(0.5, max(remaining, 0.01)))
        self._deadline = time.monotonic() + self.ttl
        self._thread = threading.Thread(target=self._renew_until_stopped, name="lease", daemon=True)
        self._thread.start()
        return self

    def _record(self, *, released: bool = False) -> bytes:
        now = time.time()
        holder = Holder(
            token=self.token,
            owner=self.owner,
            ttl=self.ttl,
            renewed=now,
            expires=now + self.ttl,
            machine=this_machine(),
            process=ProcessId.current().to_json(),
            released=released,
        )
        return json.dumps(asdict(holder)).encode()

    def _name(self) -> str:
        return f"lease/{self.token.split('-', 1)[0]}.json"

    def _create(self, number: int) -> bool:
        self.token = f"{number:04d}-{secrets.token_hex(4)}"
        if self._store.create(self._name(), self._record()):
            return True
        # A store may retry a create whose answer was lost: then the object is there, and it is ours.
        holder = newest(self._store)
        return holder is not None and holder.token == self.token

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(self.ttl / 3):
            try:
                holder = newest(self._store)
                if holder is None or holder.token != self.token:
                    owner = (
                        f": {holder.describe(time.time())}" if holder else ": its lease objects were removed"
                    )
                    self._lose(f"another attempt took over{owner}")
                    return
                self._store.write(self._name(), self._record())
                self._deadline = time.monotonic() + self.ttl
            except IsthmusError as error:
                if time.monotonic() >= self._deadline:
                    self._lose(f"could not renew the lease for {self.ttl:.0f} s: {error}")
                    return

    def _lose(self, why: str) -> None:
        self.why_lost = why
        self.lost.set()
        if self._on_lost is not None:
            self._on_lost(why)

    def check(self) -> None:
        """Raises LeaseLost when this process no longer holds the lease, as far as the renewing thread knows."""
        if self.lost.is_set():
            raise LeaseLost(self.why_lost, where=self._store.uri)

    def release(self) -> None:
        """Gives the lease back, so that the next attempt need not wait for the expiry. Idempotent."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if not self.lost.is_set():
            self._store.write(self._name(), self._record(released=True))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        # A store that refuses this (a full disk) is not what ended the attempt; the lease expires by itself.
        with contextlib.suppress(StorageError):
            self.release()
