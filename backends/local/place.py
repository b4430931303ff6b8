"""Where the local backend keeps what belongs to a run's processes: the log, the job, the keeper's process id."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.backends.runs import state_folder
from isthmus.files import replace_file
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.process import ProcessId


@dataclass(frozen=True, slots=True)
class JobPlace:
    """The folder of a run's job: `logs/` in a run directory on this machine, else among this machine's own state."""

    folder: Path

    @classmethod
    def of(cls, run_uri: str, run_id: str) -> JobPlace:
        """The place for a run; nothing is created."""
        local = RunDirectory(run_uri).local_path("logs")
        return cls(local if local is not None else state_folder() / "jobs" / run_id)

    @property
    def log(self) -> Path:
        """What all attempts printed."""
        return self.folder / "node0.log"

    def job(self, job_id: str) -> Path:
        """The rendered job, for the keeper."""
        return self.folder / job_id / "job.json"

    def recipe(self, job_id: str) -> Path:
        """The recipe that the worker reads."""
        return self.folder / job_id / "recipe.yaml"

    def processes(self) -> dict[str, ProcessId]:
        """The `keeper` and the `worker` of the newest submission, alive or not."""
        try:
            data: Mapping[str, Any] = json.loads((self.folder / "processes.json").read_text())
            return {name: ProcessId.from_json(value) for name, value in data.items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def claim(self, job_id: str, process: ProcessId) -> ProcessId:
        """The keeper that has the job: this one, unless another was faster. A job is kept once, whoever submits it again."""
        path = self.folder / f"keeper-{job_id}.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{process.pid}.tmp")
        try:
            temporary.write_text(json.dumps(process.to_json()))
            os.link(temporary, path)  # whole, and only if there is none
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)
        return ProcessId.from_json(json.loads(path.read_text()))

    def claimed(self, job_id: str) -> ProcessId | None:
        """The keeper that has the job, alive or not; None: nobody ever had it."""
        try:
            return ProcessId.from_json(json.loads((self.folder / f"keeper-{job_id}.json").read_text()))
        except (OSError, ValueError, KeyError):
            return None

    def note_process(self, name: str, process: ProcessId) -> None:
        """Remembers the process; its worker is another one from now on when the keeper is."""
        known = {} if name == "keeper" else self.processes()
        data = {key: value.to_json() for key, value in {**known, name: process}.items()}
        replace_file(self.folder / "processes.json", json.dumps(data))
