"""Where runs live while things happen to them: a small disk of their own, and an object store behind a server that fails."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from faulty import FaultyServer, slow_down
from servers import free_port, running

DISK_BYTES = 48 << 20
"""Room for some tens of checkpoints of the tiny model."""
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")


class Place:
    """A folder; what runs there is a plain process.

    Args:
        root: where run directories are made.
        data: of the dataset.
    """

    can_fill = False

    def __init__(self, root: str, data: str) -> None:
        self.root = root
        self.data = data
        self.environment: dict[str, str] = {}
        """Of the trainer's processes."""

    def run_uri(self, name: str) -> str:
        """A run directory of that name."""
        return f"{self.root}/{name}"


class Disk(Place):
    """A tmpfs, where that may be mounted."""

    can_fill = True

    @property
    def _filler(self) -> Path:
        return Path(self.root) / "filler"

    def fill(self) -> None:
        """Leaves no byte free."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)

    def free(self) -> None:
        """Gives the room back."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def disk(folder: Path, data: str) -> Iterator[Place]:
    """A disk at `folder`, or the folder itself when mounting is not allowed: then it cannot be filled."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], check=False, capture_output=True)
    if mounted.returncode:
        yield Place(str(folder), data)
        return
    try:
        yield Disk(str(folder), data)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


class Bucket(Place):
    """A bucket in moto's server, which the trainer reaches through a server that fails on demand."""

    server: FaultyServer

    def unavailable(self, seconds: float, *, refuse: bool) -> float:
        """The store is away for so long; returns the time (seconds since 1970) at which it is back.

        Args:
            refuse: connections are refused; otherwise each request is answered with 503 SlowDown.
        """
        if refuse:
            with self.server.away():
                time.sleep(seconds)
        else:
            for method in METHODS:
                self.server.fail(slow_down(), times=float("inf"), method=method)
            threading.Event().wait(seconds)
            self.server.forgive()
        return time.time()


@functools.cache
def _port() -> int:
    """One for all courses: what reads checkpoints in this process keeps the clients that it made for the first."""
    return free_port()


@contextlib.contextmanager
def bucket(data: str) -> Iterator[Bucket]:
    """An object store that holds the dataset too. This process reaches it directly, the trainer through the faulty server."""
    import boto3

    port = _port()
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        endpoint = f"http://127.0.0.1:{port}"
        environment = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",  # the key of AWS's manual
            "AWS_SECRET_ACCESS_KEY": "not-a-secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        os.environ.update(environment)
        client = boto3.client("s3")
        name = f"chaos-{uuid.uuid4().hex[:8]}"
        client.create_bucket(Bucket=name)
        for path in Path(data).rglob("*"):
            if path.is_file():
                client.upload_file(str(path), name, f"data/{path.relative_to(data)}")
        place = Bucket(f"s3://{name}/runs", f"s3://{name}/data")
        with FaultyServer(endpoint) as place.server:
            place.environment = {**environment, "AWS_ENDPOINT_URL": place.server.url}
            yield place


def spare(folder: Path) -> None:
    """Removes a finished run's folder: a disk of this size holds few."""
    shutil.rmtree(folder, ignore_errors=True)
