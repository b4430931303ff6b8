"""Machines of an emulated cloud: what a container on one is given, and what can be done to it from outside.

Two kinds, of the same surface: `namespaces` (root on Linux: each host has a network, a process tree and mounts of its own,
its entry point is PID 1) and `processes` (anywhere: plain processes on loopback addresses).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

Privileges = Literal["namespaces", "processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What runs on a host."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """All of it: nothing of the emulator's own environment is passed on."""
    binds: Mapping[str, Path] = field(default_factory=dict)
    """Path in the container -> file or folder here. Only namespaces can bind; processes see `here` as it is."""
    fuse: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Path in the container -> a command that mounts a file system there and stays; `{target}` in it is the path."""
    home: Path
    """A folder of the host's own: here for its HOME and temporary files."""
    cwd: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """A host as it is now."""

    name: str
    address: str
    pid: int | None
    """Of the entry point, as this machine numbers it."""
    alive: bool
    exit_code: int | None
    """As a shell would say it: 128 + signal for a process that a signal ended."""


class Host(Protocol):
    """One machine of a job."""

    name: str
    address: str
    pid: int | None
    output: IO[bytes]
    """What the container writes to its standard output and error."""

    def poll(self) -> int | None:
        """The exit code of the entry point once it has ended, as a shell would say it."""

    def signal(self, number: int) -> None:
        """To the entry point only, as a container runtime does."""

    def kill(self) -> None:
        """Ends every process of the host at once."""

    def close(self) -> None:
        """Ends what is left, mounts included."""


class Cluster(Protocol):
    """The hosts of one job and the network between them."""

    privileges: Privileges
    names: Sequence[str]
    """How the hosts call one another."""
    gateway: str | None
    """The address at which this machine can be reached from the hosts; None when they are isolated."""

    def start(self, containers: Sequence[Container]) -> Sequence[Host]:
        """The hosts, each running its container, all from the same moment. Raises StorageError when one cannot be made."""

    def close(self) -> None:
        """Ends all hosts and removes the network."""


def exit_code(returncode: int) -> int:
    """A shell's exit code for what `subprocess` says of a process."""
    return 128 - returncode if returncode < 0 else returncode
