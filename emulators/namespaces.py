"""Hosts as namespaces (Linux, root): each with its own network, process tree, mounts, host name and shared memory.

A host's namespaces are anonymous: they, their mounts and their end of the network vanish with its last process, and that one
dies with the emulator (PDEATHSIG). What can outlive a killed emulator is the bridge between hosts; its name holds the
emulator's pid, and the next one that starts removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from isthmus.emulators.hosts import Container, Privileges, exit_code
from isthmus.errors import StorageError

TOOLS = ("ip", "nsenter", "unshare", "setpriv", "mount", "bash")
NET = "10.214"
MOUNT_S = 30
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# Runs in the new namespaces. `opt` is covered by a small one of the host's own, with what was there still in place, so that
# /opt/ml can be made without leaving anything on the machine.
BOOT = r"""
set -eu
name=$1 stage=$2 ready=$3 binds=$4 cwd=$5; shift 5
echo "$name" > /proc/sys/kernel/hostname
for top in /opt /mnt; do
  [ -d "$top" ] || continue
  mount --rbind "$top" "$stage"; mount -t tmpfs none "$top"
  for entry in "$stage"/*; do
    [ -e "$entry" ] || continue
    if [ -d "$entry" ]; then mkdir "$top/${entry##*/}"; else touch "$top/${entry##*/}"; fi
    mount --rbind "$entry" "$top/${entry##*/}"
  done
  umount -l "$stage"
done
while [ "$binds" -gt 0 ]; do
  if [ -d "$2" ]; then mkdir -p "$1"; else [ -e "$1" ] || touch "$1"; fi
  mount --rbind "$2" "$1"; shift 2; binds=$((binds - 1))
done
mount -t tmpfs none /dev/shm
echo ready >&"$ready"
eval "exec $ready>&-"
read -r go
cd "$cwd"
exec env -i "$@" </dev/null 2>&1
"""


def missing() -> str | None:
    """Why hosts cannot be namespaces here, in a few words; None when they can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found"
    if os.geteuid() != 0:
        return "not root"
    probe = ["unshare", "-m", "-u", "-i", "-n", "-p", "-f", "--mount-proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return f"unshare: {done.stderr.strip() or done.returncode}" if done.returncode else None


def can_mount() -> str | None:
    """Why FUSE mounts cannot be made here; None when they can."""
    if shutil.which("rclone") is None:
        return "rclone not found"
    return None if Path("/dev/fuse").exists() else "no /dev/fuse"


class NamespaceHost:
    """A host: everything in a process namespace whose first process is the container's entry point."""

    def __init__(self, name: str, address: str, container: Container) -> None:
        self.name = name
        self.address = address
        self._mounts: list[subprocess.Popen[bytes]] = []
        home = container.home
        for folder in ("home", "tmp", "stage"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        binds = {**container.binds, "/opt/home": home / "home", "/opt/tmp": home / "tmp"}
        environment = {"HOME": "/opt/home", "TMPDIR": "/opt/tmp", **container.environment}
        ready, said = os.pipe()
        told = (home / "boot.log").open("wb")
        try:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-u", "-i", "-n", "-p", "-f"]
                + ["--mount-proc", "--kill-child=KILL", "bash", "-c", BOOT, "boot"]
                + [name, str(home / "stage"), str(said), str(len(binds)), container.cwd]
                + [part for target, here in binds.items() for part in (target, str(here))]
                + [f"{key}={value}" for key, value in environment.items()]
                + list(container.command),
                pass_fds=[said],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # What `unshare` itself has to say is no line of the container's.
                stderr=told,
                start_new_session=True,
            )
        finally:
            os.close(said)
            told.close()
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self.output: IO[bytes] = self._process.stdout
        self.pid: int | None = None
        self._ready = os.fdopen(ready)
        self._container = container

    def connect(self, link: str | None, bridge: str) -> None:
        """Once the namespaces are there: the network (None: no link), and what mounts the file systems. Raises StorageError."""
        if self._ready.readline() != "ready\n":
            self._process.kill()
            why = (self._container.home / "boot.log").read_text(errors="replace").strip().splitlines()
            raise StorageError(f"no namespaces for {self.name}: {why[-1] if why else 'no reason given'}")
        self.pid = only_child(self._process.pid)
        inside = ["link set lo up"]
        if link is not None:
            run_ip(
                f"link add {link} type veth peer name eth0 netns {self.pid}\nlink set {link} master {bridge} up"
            )
            inside = [f"addr add {self.address}/24 dev eth0", "link set eth0 up", *inside]
        run_ip("\n".join(inside), within=["nsenter", "-t", str(self.pid), "-n"])
        for target, command in self._container.fuse.items():
            self._mount(target, command)

    def go(self) -> None:
        """Starts the container, everything else being there."""
        self._await_mounts()
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()

    def _mount(self, target: str, command: Sequence[str]) -> None:
        """Mounts in the container's mount namespace, over this machine's network: isolated hosts read their data, too.

        The process that serves the mount is one of the container's process namespace, since it needs the same /proc; it
        ends with it.
        """
        assert self.pid is not None
        home = self._container.home
        with (home / "mount.log").open("ab") as stream:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self.pid), "-m", "-p", "--"]
                + [part.replace("{target}", target) for part in command],
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )
        self._mounts.append(process)

    def _await_mounts(self) -> None:
        table = Path(f"/proc/{self.pid}/mountinfo")
        deadline = time.monotonic() + MOUNT_S
        for target, process in zip(self._container.fuse, self._mounts, strict=True):
            wanted = target.replace(" ", "\\040")
            while not any(
                line.split()[4] == wanted and "fuse" in line for line in table.read_text().splitlines()
            ):
                if process.poll() is not None or time.monotonic() > deadline:
                    told = (
                        (self._container.home / "mount.log").read_text(errors="replace").strip().splitlines()
                    )
                    why = told[-1] if told else f"no answer within {MOUNT_S} s"
                    raise StorageError(f"cannot mount {target}: {why}")
                time.sleep(0.02)

    def poll(self) -> int | None:
        """See `Host`."""
        code = self._process.poll()
        return None if code is None else exit_code(code)

    def signal(self, number: int) -> None:
        """See `Host`. A first process without a handler ignores SIGTERM, as in every container."""
        if self.pid is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """See `Host`: with its first process the whole namespace goes."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """See `Host`."""
        self.kill()
        self._ready.close()
        for mount in self._mounts:
            mount.kill()
            mount.wait()
        self._process.kill()
        self._process.wait()


class Bridge:
    """A cluster of namespaces on a bridge of their own; several of them, of several emulators, can be there at once.

    Args:
        names: of the hosts; they resolve through /etc/hosts (`hosts_file`).
        isolated: without a way to this machine: hosts reach one another and nothing else; one alone has a loopback interface
            only, and its name resolves to nothing.
    """

    privileges: Privileges = "namespaces"

    def __init__(self, names: Sequence[str], *, isolated: bool = False) -> None:
        self.names = names
        with locked():
            taken = {int(found[2], 16) for found in bridges()}
            self._net = next((net for net in range(256) if net not in taken), None)
            if self._net is None or len(names) > 250:
                raise StorageError("no network left for another emulated job")
            self._mark = base36(os.getpid())
            self.bridge = f"sm{self._mark}b{self._net:02x}"
            run_ip(f"link add {self.bridge} type bridge")
        self._alone = isolated and len(names) == 1
        self.gateway: str | None = None if isolated else f"{NET}.{self._net}.254"
        if self.gateway:
            run_ip(f"addr add {self.gateway}/24 dev {self.bridge}")
        run_ip(f"link set {self.bridge} up")
        self._hosts: list[NamespaceHost] = []

    def address(self, index: int) -> str:
        """Of a host."""
        return f"{NET}.{self._net}.{index + 1}"

    def hosts_file(self) -> str:
        """What /etc/hosts says on every host."""
        lines = [f"{self.address(index)} {name}" for index, name in enumerate(self.names)]
        return "\n".join(["127.0.0.1 localhost", *([] if self._alone else lines), ""])

    def _link(self, index: int) -> str:
        return f"sm{self._mark}v{self._net:02x}-{index}"

    def start(self, containers: Sequence[Container]) -> Sequence[NamespaceHost]:
        """See `Cluster`."""
        # Each step on all hosts before the next: they come up side by side, and none runs before the others are there.
        for index, (name, container) in enumerate(zip(self.names, containers, strict=True)):
            self._hosts.append(NamespaceHost(name, self.address(index), container))
        for index, host in enumerate(self._hosts):
            host.connect(None if self._alone else self._link(index), self.bridge)
        for host in self._hosts:
            host.go()
        return list(self._hosts)

    def close(self) -> None:
        """See `Cluster`."""
        for index, host in enumerate(self._hosts):
            host.close()
            # The kernel takes its time to remove a namespace's links; the next cluster may want the name.
            with contextlib.suppress(StorageError):
                run_ip(f"link del {self._link(index)}")
        with contextlib.suppress(StorageError):
            run_ip(f"link del {self.bridge}")


def run_ip(batch: str, *, within: Sequence[str] = ()) -> None:
    """`ip` with several commands, one a line. Raises StorageError with what it said."""
    done = subprocess.run([*within, "ip", "-batch", "-"], input=batch, capture_output=True, text=True)
    if done.returncode:
        raise StorageError(f"ip: {' '.join(done.stderr.split())}", where=batch.splitlines()[0])


def only_child(pid: int) -> int:
    """The process that `unshare --fork` started: the first of the new namespace."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def bridges() -> list[re.Match[str]]:
    """The emulators' bridges that are there: groups emulator's pid (base 36) and network (hexadecimal)."""
    names = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return [found for name in names if (found := re.fullmatch(r"sm([0-9a-z]+)b([0-9a-f]{2})", name))]


def sweep() -> list[str]:
    """Removes the bridges of emulators that were killed; their names."""
    gone = []
    with locked():
        for found in bridges():
            if not Path(f"/proc/{int(found[1], 36)}").exists():
                run_ip(f"link del {found[0]}")
                gone.append(found[0])
    return gone


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """One emulator at a time chooses a network."""
    path = Path(tempfile.gettempdir()) / "isthmus-emulators.lock"
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def base36(number: int) -> str:
    """A number in as few letters as an interface's name has room for."""
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = DIGITS[digit] + digits
    return digits or "0"
