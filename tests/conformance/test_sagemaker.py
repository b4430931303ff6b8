"""The SageMaker backend passes the suite, with jobs that the emulator really runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.backends.conformance import RECIPE, BackendConformance, Rehearse
from isthmus.backends.sagemaker import logs
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.spec import Backend, Handle, Job
from isthmus.core.recipe import Recipe, parse_recipe
from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.storage import filesystems

IMAGE: dict[str, str] = {}
"""What the image sets: how a test tells the ranks what to do."""
_runs = itertools.count(1)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMakerEmulator]:
    with SageMakerEmulator(
        tmp_path_factory.mktemp("cloud"), images={"*": Image(env=IMAGE)}, privileges="processes", grace=20
    ) as emulator:
        emulator.bucket("conformance")
        yield emulator


@pytest.mark.slow
class TestSageMaker(BackendConformance):
    """Slow: each job starts torchrun."""

    @pytest.fixture
    def backend(
        self,
        cloud: SageMakerEmulator,
        no_credentials: pytest.MonkeyPatch,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Backend:
        for name, value in cloud.environment().items():
            no_credentials.setenv(name, value)
        monkeypatch.setattr(logs, "IDLE", 0.2)
        return SageMakerBackend()

    @pytest.fixture
    def runs(self) -> str:
        # Names of jobs are never given back, and the suite's runs all have the same one.
        return f"s3://conformance/runs-{next(_runs)}"

    @pytest.fixture
    def recipe(self, runs: str, tmp_path: Path) -> Recipe:
        text = RECIPE.replace("DATA", "s3://conformance/data").replace("RUNS", runs)
        return parse_recipe(text, filename="conformance.yaml").recipe

    @pytest.fixture
    def settings(self, cloud: SageMakerEmulator) -> dict[str, Any]:
        return {"role_arn": cloud.role, "region": cloud.region, "retries": 0}

    @pytest.fixture
    def job(self, backend: Backend, recipe: Recipe, runs: str, settings: dict[str, Any]) -> Job:
        from isthmus.core.recipe import resolve

        run_id = f"conformance-{runs.rpartition('-')[2]}"
        return Job(
            recipe=resolve(recipe, backend.name),
            source=recipe,
            backend=backend.name,
            run_id=run_id,
            run_uri=filesystems.join(runs, run_id),
            settings=backend.settings.model_validate(settings),
        )

    @pytest.fixture
    def rehearse(self) -> Iterator[Rehearse]:
        def rehearse(plan: dict[str, Any]) -> None:
            IMAGE["ISTHMUS_TRAINER_MODULE"] = "isthmus.core.rehearsal"
            IMAGE["ISTHMUS_REHEARSAL"] = json.dumps(plan)

        yield rehearse
        IMAGE.clear()

    def submit(self, backend: Backend, job: Job) -> Handle:
        """As the launcher does: the event names the job."""
        from isthmus.storage.rundir import RunDirectory

        run, rendered = RunDirectory(job.run_uri), backend.render(job)
        if not run.exists():
            run.create(
                "", {"id": job.run_id, "name": job.recipe.name, "backend": job.backend, "recipe_hash": ""}
            )
        run.event("submitted", backend=job.backend, job_id=rendered.job_id)
        return backend.submit(rendered)
