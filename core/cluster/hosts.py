"""Names of hosts, which a cloud's DNS may know only a while after the containers have begun."""

from __future__ import annotations

import socket
import threading
import time

from isthmus.errors import TrainingFailed

PATIENCE_S = 300.0


def wait_for_name(host: str, interrupted: threading.Event, *, patience: float = PATIENCE_S) -> None:
    """Until the name of a host can be resolved, or the event is set.

    Raises:
        TrainingFailed: it cannot, even after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise TrainingFailed(
                    f"the name of {host} cannot be resolved, after {patience:.0f} s: {error.strerror or error}",
                    hint="the job's network has no DNS for its own hosts",
                ) from error
        if interrupted.wait(1.0):
            return
