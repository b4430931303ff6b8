"""Logs of a running job: local files to append blobs, as they grow."""

from __future__ import annotations

from pathlib import Path

from isthmus.emulators.azureml.blobs import ARTIFACTS, Blobs, Place
from isthmus.emulators.azureml.world import Job, World


class Shipping:
    """Sends what processes write. An attempt that follows adds to the same files."""

    def __init__(self, world: World, blobs: Blobs, job: Job) -> None:
        self.world, self.blobs, self.job = world, blobs, job
        self._sent: dict[Path, int] = {}
        self._names: dict[Path, str] = {}

    def follow(self, file: Path, name: str) -> None:
        """From now on that file is the log of that name."""
        self._names[file] = name
        self._sent.setdefault(file, 0)

    def send(self) -> None:
        """What is new."""
        for file, name in self._names.items():
            size = file.stat().st_size if file.exists() else 0
            if size <= self._sent[file] and name in self.job.log_files:
                continue
            data = b""
            if file.exists():
                with file.open("rb") as opened:
                    opened.seek(self._sent[file])
                    data = opened.read(size - self._sent[file])
            self.blobs.append(Place(ARTIFACTS, f"ExperimentRun/dcid.{self.job.name}/{name}"), data)
            self._sent[file] += len(data)
            with self.world.changed:
                if name not in self.job.log_files:
                    self.job.log_files.append(name)

    def last_line(self, file: Path) -> str:
        """The last line of a log that says something."""
        if not file.exists():
            return ""
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:500] if lines else ""
