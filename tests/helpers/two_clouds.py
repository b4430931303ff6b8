"""Both emulated clouds at once, one tiny recipe that lives in both, and the command line of somebody who uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from training import recipe_data

from isthmus.emulators.image import Image
from isthmus.errors import IsthmusError
from isthmus.storage import copying
from isthmus.storage.rundir import RunDirectory

BUCKET = "example-bucket"
IMAGE = "exampleregistry.azurecr.io/train@sha256:" + "0123456789abcdef" * 4
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
BACKENDS = ("azure", "sagemaker")


class Clouds:
    """See the module."""

    def __init__(self, folder: Path, sagemaker: Any, azure: Any, image: dict[str, str]) -> None:
        self.folder, self.sagemaker, self.azure = folder, sagemaker, azure
        self.image = image
        """What the image sets in every container of both."""
        self.data = {
            "azure": azure.container_uri("latents", "tiny").rstrip("/"),
            "sagemaker": f"s3://{BUCKET}/tiny",
        }
        self.runs = {
            "azure": azure.container_uri("runs", "tiny").rstrip("/"),
            "sagemaker": f"s3://{BUCKET}/runs",
        }

    def __getitem__(self, backend: str) -> Any:
        return self.azure if backend == "azure" else self.sagemaker

    def upload(self, root: str) -> None:
        """Puts a dataset into both stores."""
        source = copying.Tree(root)
        items = [copying.Item(name, size) for name, size in source.sizes().items()]
        for target in self.data.values():
            copying.copy(source, copying.Tree(target), items)

    def recipe(self, folder: Path, local: str, **changes: Any) -> Path:
        """The recipe's file; spot machines, two nodes of one process, one node of two on this machine."""
        data = recipe_data(local)
        data["data"]["sources"] = [{"uri": {**self.data, "local": local}}]
        data["run_directory"] = {**self.runs, "local": str(folder / "runs")}
        data["compute"] = {"gpu": "none", "nodes": 2, "gpus_per_node": 1, "max_restarts": 40}
        data["backends"] = {
            "azure": {
                "region": "italynorth", "compute": "cpu", "spot_compute": "cpu-low", "tier": "low_priority",
                "environment": {"image": IMAGE},
            },
            "sagemaker": {"role_arn": self.sagemaker.role, "region": "us-east-1", "tier": "spot"},
        }  # fmt: skip
        for path, value in changes.items():
            *parents, last = path.split("__")
            at: Any = data
            for part in parents:
                at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
            at[last] = value
        path = folder / "tiny.yaml"
        path.write_text(json.dumps(data))
        return path

    def run(self, backend: str, run_id: str) -> RunDirectory:
        """A run's directory."""
        return RunDirectory(f"{self.runs[backend]}/{run_id}")

    def job_names(self, backend: str, run_id: str) -> list[str]:
        """Jobs of a run that the cloud knows, in the order in which they came."""
        names = [
            str(job["name"] if backend == "azure" else job["TrainingJobName"]) for job in self[backend].jobs()
        ]
        return [name for name in names if name.startswith(f"{run_id}-")]

    def running(self, backend: str, job: str) -> bool:
        """Whether a job's containers run."""
        return str(self[backend].state(job)) in ("Running", "InProgress/Training")

    def strike(self, backend: str, job: str) -> bool:
        """Evicts a job; False when it does not run any more (or not yet)."""
        try:
            self[backend].evict(job)
        except IsthmusError:
            return False
        return True


class Laptop:
    """The command line of one user, in a folder of their own."""

    def __init__(self, folder: Path, state: str = "state") -> None:
        self.folder, self._state = folder, state

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """A command as a process."""
        return subprocess.Popen(
            [sys.executable, "-m", "isthmus", *words],
            cwd=self.folder,
            env={**os.environ, "XDG_STATE_HOME": str(self.folder / self._state), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def isthmus(self, *words: str, timeout: float = 300, **environment: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; never a traceback."""
        process = self.start(*words, **environment)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{' '.join(words)} did not end: {out[-2000:]}{err[-3000:]}") from None
        assert "Traceback" not in out + err, out + err
        return process.returncode, out, err


@contextmanager
def open_clouds(folder: Path, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Clouds]:
    """Both clouds; the environment of this process is that of a client of theirs and of nobody else's."""
    pytest.importorskip("azure.ai.ml", reason="pip install 'isthmus[azure]'")
    pytest.importorskip("moto", reason="pip install 'isthmus[rehearse]'")
    pytest.importorskip("cryptography", reason="pip install 'isthmus[rehearse]'")
    from isthmus.emulators.azureml import AzureMLEmulator
    from isthmus.emulators.sagemaker.cloud import SageMakerEmulator

    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE", "IDENTITY_", "MSI_")):
            patch.delenv(name)
    image = dict(QUIET)
    images = {"*": Image(python=sys.executable, env=image)}
    with SageMakerEmulator(folder / "sagemaker", images=images, **options) as sagemaker:
        sagemaker.bucket(BUCKET)
        try:
            azure = AzureMLEmulator(
                folder / "azure", images=images, region="italynorth", heartbeat=0.5, **options
            )
        except IsthmusError as error:
            pytest.skip(str(error))
        with azure:
            azure.add_compute("cpu", "Standard_D4ds_v5", nodes=4)
            azure.add_compute("cpu-low", "Standard_D4ds_v5", nodes=4, low_priority=True)
            for name, value in {**sagemaker.environment(), **azure.environment()}.items():
                patch.setenv(name, value)
            yield Clouds(folder, sagemaker, azure, image)


def until(what: str, condition: Any, limit_s: float = 120, every_s: float = 0.1) -> Any:
    """Waits for a condition; returns what it gave."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in {limit_s:g} s: {what}"
        time.sleep(every_s)
    return found
