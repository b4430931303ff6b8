"""The place where jobs run: what a job's course needs of the emulator around it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.emulators.hosts import Privileges
from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.capacity import Capacity
from isthmus.emulators.sagemaker.server import Listener

ACCOUNT = "123456789012"
KEYS = ("AKIAIOSFODNN7EXAMPLE", "not-a-secret")
"""The key of AWS's manual: no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long things take, in seconds."""

    grace: float = 120.0
    """From SIGTERM to SIGKILL."""
    start: float = 0.0
    """Until instances are ready."""
    restart: float = 0.5
    """From an interruption until instances are looked for again."""
    patience: float = 3600.0
    """How long a job waits for capacity at most; a shorter MaxPendingTimeInSeconds counts, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is the same for all jobs of an emulator."""

    folder: Path
    images: Mapping[str, Image]
    privileges: Privileges
    fuse: bool
    """Whether Fast file mode is a mount; otherwise a read-only copy."""
    times: Times
    capacity: Capacity
    client: Callable[[str, str], Any]
    """Service, region -> a boto3 client that no fault of the front end reaches."""
    inner_url: str
    """The same for other programs of this machine."""
    outer_url: str
    """The endpoint that clients use."""
    listen: Callable[[str], Listener]
    """Makes the endpoint reachable at one more address."""
    slots: threading.BoundedSemaphore
    """How many jobs run at once."""
    closing: threading.Event
    nets: list[int] = field(default_factory=lambda: [(os.getpid() + net) % 254 + 1 for net in range(254)])
    """Loopback networks that are free; emulators of other processes begin elsewhere."""
