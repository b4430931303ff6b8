"""Machines of a job: namespaces where root may make them, else plain processes with a loopback address each."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from isthmus.emulators.azureml.guarded import free_port
from isthmus.emulators.azureml.node_init import descendants
from isthmus.errors import StorageError, UsageError

Privileges = Literal["auto", "namespaces", "processes"]
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
PORT = 6105
"""MASTER_PORT, as Azure ML sets it."""
_ADDRESSES = itertools.count()
_HERE = Path(__file__).parent


@cache
def namespaces_work() -> bool:
    """Whether this user may make network, mount, process and host-name namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


def choose(wanted: Privileges) -> Literal["namespaces", "processes"]:
    """What nodes shall be.

    Raises:
        UsageError: namespaces are asked for and cannot be made.
    """
    if wanted == "namespaces" and not namespaces_work():
        raise UsageError(
            "nodes cannot be namespaces here",
            hint='needs root, iproute2 and util-linux; or privileges="processes"',
        )
    if wanted == "auto":
        return "namespaces" if namespaces_work() else "processes"
    return wanted


@dataclass(frozen=True, slots=True)
class Host:
    """A node as tests and the rehearsal see it. `pids` are those of this machine, the container's only."""

    node: int
    name: str
    address: str
    pid: int
    pids: list[int]
    alive: bool


@dataclass
class Process:
    """One process of a container."""

    argv: list[str]
    env: dict[str, str]
    cwd: Path
    log: Path


@dataclass
class Node:
    """A machine that runs a container."""

    index: int
    name: str
    address: str
    folder: Path
    inside: Path
    """What its container calls the folder."""
    isolated: bool
    changed: Callable[[], None]
    """Called from a thread of its own at every news."""
    exits: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Time and exit code by local rank."""
    count: int = 0
    binds: dict[Path, Path] = field(default_factory=dict)
    """Folders of this machine and what they are called on the node; of a namespace only."""
    lost: bool = False
    """Killed from outside."""
    _process: subprocess.Popen[bytes] | None = None
    _ready: threading.Event = field(default_factory=threading.Event)

    def boot(self, processes: Sequence[Process], hosts_file: Path) -> None:
        """Starts the machine; its container waits for `start`.

        Raises:
            StorageError: it does not come up.
        """
        self.count = len(processes)
        listed = [{"argv": p.argv, "env": p.env, "cwd": str(p.cwd), "log": str(p.log)} for p in processes]
        spec = self.folder / "node.json"
        binds = [[str(source), str(target)] for source, target in self.binds.items()]
        told = {"hostname": self.name, "hosts_file": str(hosts_file), "binds": binds, "processes": listed}
        spec.write_text(json.dumps(told))
        command = [sys.executable, "-S", "-E", str(_HERE / "node_init.py"), str(spec)]
        self._process = subprocess.Popen(
            [*UNSHARE, *command] if self.isolated else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "node.log").open("ab"),
            env={"PATH": os.environ.get("PATH", os.defpath)},
            process_group=0,
        )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True, name=self.name).start()
        if not self._ready.wait(20) or self.gone:
            raise StorageError(
                f"node {self.name} did not start: {(self.folder / 'node.log').read_text()[-300:]}"
            )

    @property
    def pid(self) -> int:
        """Of the process that stands for the machine."""
        assert self._process is not None
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the machine is not there any more."""
        return self._process is not None and self._process.poll() is not None

    @property
    def done(self) -> bool:
        """Whether nothing of its container runs."""
        return self.lost or self.gone or (self.count > 0 and len(self.exits) == self.count)

    def tell(self, word: Literal["start", "term"]) -> None:
        """Starts the container, or sends SIGTERM to its process groups."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL to everything on it, at once. Called as often as one likes."""
        if self._process is None:
            return
        self.lost = self.lost or not self.done
        if not self.isolated:
            while not self.gone and (pids := descendants(self.pid)):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def host(self) -> Host:
        """How it is now."""
        if self._process is None or self.gone:
            return Host(self.index, self.name, self.address, 0, [], False)
        below = descendants(self.pid)
        # In a namespace the first below is our own process 1.
        return Host(
            self.index,
            self.name,
            self.address,
            self.pid,
            below[1:] if self.isolated else below,
            not self.lost,
        )

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            news: dict[str, Any] = json.loads(line)
            if "exit" in news:
                self.exits[int(news["exit"])] = (time.monotonic(), int(news["code"]))
            self._ready.set()
            self.changed()
        process.wait()
        self._ready.set()
        self.changed()


class Network:
    """What connects a job's nodes. `ports` of this machine are reachable on each node at 127.0.0.1."""

    def __init__(self, nodes: Sequence[Node], ports: Sequence[int], log: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if not nodes[0].isolated:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(_HERE / "network.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("ab"),
            env={"PATH": os.environ.get("PATH", os.defpath)},
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        task = {"nodes": [{"pid": node.pid, "address": node.address} for node in nodes], "ports": list(ports)}
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != b"ready\n":
            self.stop()
            raise StorageError(f"the nodes' network did not start: {log.read_text()[-300:]}")

    def stop(self) -> None:
        """Takes it away."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def hosts_text(nodes: Sequence[Node]) -> str:
    """/etc/hosts of a job's nodes. IPv4 addresses in IPv6's form have names too, others: programs ask for a peer's name so."""
    known = [("127.0.0.1", "localhost"), *((node.address, node.name) for node in nodes)]
    return "".join(
        f"{address} {name}\n::ffff:{address} {name}.internal.cloudapp.net\n" for address, name in known
    )


def make_nodes(
    job: str, count: int, folder: Path, *, isolated: bool, changed: Callable[[], None]
) -> tuple[list[Node], str, int]:
    """Nodes that are not started yet, MASTER_ADDR and MASTER_PORT."""
    nodes = []
    for index in range(count):
        if isolated:
            # Each job has a network of its own, so all use the same addresses, as in Azure ML's own virtual networks.
            address = f"10.0.{(4 + index) // 250}.{(4 + index) % 250}"
        else:
            number = next(_ADDRESSES)
            address = f"127.77.{number // 250 % 250}.{2 + number % 250}"
        place = folder / f"node{index}"
        place.mkdir(parents=True, exist_ok=True)
        inside = folder / "node" if isolated else place
        inside.mkdir(exist_ok=True)
        name = f"{job[:40].lower().replace('_', '-')}-{index:06d}"
        nodes.append(Node(index, name, address, place, inside, isolated, changed))
    return nodes, nodes[0].address, PORT if isolated else free_port()
