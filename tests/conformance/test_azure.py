"""The Azure backend passes the suite that every backend passes, through the real azure-ai-ml client, on the emulated Azure ML."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from isthmus.backends.azure import logs
from isthmus.backends.azure.backend import AzureBackend
from isthmus.backends.conformance import RECIPE, BackendConformance, Rehearse
from isthmus.backends.registry import get_backend
from isthmus.backends.spec import Backend, Handle, Job
from isthmus.core.recipe import Recipe, parse_recipe, resolve
from isthmus.errors import IsthmusError, UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

IMAGE = "exampleregistry.azurecr.io/train@sha256:" + "0123456789abcdef" * 4


class Cloud:
    """The emulator, and what its image sets in every container."""

    def __init__(self, emulator: Any, env: dict[str, str]) -> None:
        self.emulator = emulator
        self.env = env


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """A workspace with a dedicated and a low-priority cluster; this process's environment is a client's."""
    pytest.importorskip("azure.ai.ml", reason="pip install 'isthmus[azure]'")
    pytest.importorskip("cryptography", reason="pip install 'isthmus[rehearse]'")
    from isthmus.emulators.azureml import AzureMLEmulator
    from isthmus.emulators.image import Image

    env: dict[str, str] = {}
    folder = tmp_path_factory.mktemp("aml")
    try:
        emulator = AzureMLEmulator(
            folder,
            images={"*": Image(python=sys.executable, env=env)},
            privileges="processes",
            region="italynorth",
            grace=10.0,
            cancel_grace=2.0,
            heartbeat=0.5,
        )
    except IsthmusError as error:
        pytest.skip(str(error))
    with emulator, pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AZURE", "IDENTITY_", "MSI_")):
                patch.delenv(name)
        for name, value in emulator.environment().items():
            patch.setenv(name, value)
        emulator.add_compute("cpu", "Standard_D4ds_v5", nodes=4)
        emulator.add_compute("cpu-low", "Standard_D4ds_v5", nodes=4, low_priority=True)
        emulator.quota["standardDDSv5Family"] = 64
        yield Cloud(emulator, env)


_runs = itertools.count(1)


@pytest.mark.slow
class TestAzure(BackendConformance):
    """Slow: each job starts torchrun."""

    @pytest.fixture
    def backend(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setattr(logs, "INTERVAL_S", 0.2)
        return get_backend("azure")

    @pytest.fixture
    def runs(self, cloud: Cloud) -> str:
        # Names of jobs are never given back, and the suite's runs all have the same one.
        return str(cloud.emulator.container_uri("runs", f"runs-{next(_runs)}"))

    @pytest.fixture
    def recipe(self, runs: str) -> Recipe:
        data = "az://no-such-data@devstoreaccount1.blob.core.windows.net/none"
        text = RECIPE.replace("DATA", json.dumps(data)).replace("RUNS", json.dumps(runs))
        return parse_recipe(text, filename="conformance.yaml").recipe

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {
            "region": "italynorth",
            "compute": "cpu",
            "spot_compute": "cpu-low",
            "environment": {"image": IMAGE},
            "grace": "10 s",
        }

    @pytest.fixture
    def job(self, backend: Backend, recipe: Recipe, runs: str, settings: dict[str, Any]) -> Job:
        """Under a name of its own: a workspace has each once."""
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
    def rehearse(self, cloud: Cloud) -> Iterator[Rehearse]:
        """A job inherits nothing from its launcher: the image sets what the rehearsal's ranks do."""

        def rehearse(plan: dict[str, Any]) -> None:
            cloud.env["ISTHMUS_TRAINER_MODULE"] = "isthmus.core.rehearsal"
            cloud.env["ISTHMUS_REHEARSAL"] = json.dumps(plan)

        yield rehearse
        cloud.env.clear()

    def submit(self, backend: Backend, job: Job) -> Handle:
        """As the launcher does: the event names the job."""
        run, rendered = RunDirectory(job.run_uri), backend.render(job)
        if not run.exists():
            run.create(
                "", {"id": job.run_id, "name": job.recipe.name, "backend": job.backend, "recipe_hash": ""}
            )
        run.event("submitted", backend=job.backend, job_id=rendered.job_id)
        return backend.submit(rendered)

    # -- what a cloud's backend does beyond the suite

    def test_submitting_twice_is_one_job(
        self, backend: Backend, job: Job, rehearse: Rehearse, cloud: Cloud
    ) -> None:
        rehearse({"*": "finish"})
        handle = self.submit(backend, job)
        assert backend.submit(backend.render(job)) == handle
        self.until_ended(backend, handle)
        names = [one["name"] for one in cloud.emulator.jobs()]
        assert names.count(str(handle.native["job_id"])) == 1

    def test_a_job_of_that_name_that_is_not_ours_is_a_collision(
        self, backend: Backend, job: Job, rehearse: Rehearse
    ) -> None:
        rehearse({"*": "finish"})
        self.until_ended(backend, self.submit(backend, job))
        other = replace(job, run_uri=job.run_uri + "-other")
        with pytest.raises(UsageError, match="job name collision"):
            backend.submit(backend.render(other))

    def test_a_lost_answer_is_no_second_job(
        self, backend: Backend, job: Job, rehearse: Rehearse, cloud: Cloud
    ) -> None:
        rehearse({"*": "finish"})
        cloud.emulator.fail_next("jobs.put", "drop-after", 1)
        handle = self.submit(backend, job)
        assert self.until_ended(backend, handle).state == "finished"
        assert len(RunDirectory(job.run_uri).events("started")) == 1

    def test_an_eviction_is_a_preemption(
        self, backend: Backend, job: Job, rehearse: Rehearse, cloud: Cloud
    ) -> None:
        from isthmus.core.recipe.schema import Offer

        rehearse({"*": ["wait", "finish"]})
        low = replace(job, offer=Offer(backend="azure", tier="spot"))
        handle = self.submit(backend, low)
        self.until_training(backend, handle)
        cloud.emulator.evict(str(handle.native["job_id"]))
        status = self.until_ended(backend, handle)
        assert (status.state, status.exit_code) == ("preempted", 75)
        assert RunDirectory(job.run_uri).checkpoints()

    def test_jobs_are_found_by_their_tags(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        assert isinstance(backend, AzureBackend)
        rehearse({"*": "finish"})
        handle = self.submit(backend, job)
        self.until_ended(backend, handle)
        (found,) = [one for one in AzureBackend().jobs(job.settings) if one.handle.run_id == job.run_id]
        assert (found.handle.run_uri, found.attempt) == (job.run_uri, 1)
        assert AzureBackend().status(found.handle).state == "finished"

    def test_both_nodes_logs_are_followed(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        rehearse({"*": "finish"})
        compute = job.recipe.compute.model_copy(update={"nodes": 2})
        both = replace(job, recipe=job.recipe.model_copy(update={"compute": compute}))
        handle = self.submit(backend, both)
        lines = list(backend.logs(handle, follow=True))
        assert {line.node for line in lines} == {0, 1}
        assert self.until_ended(backend, handle).state == "finished"
        again = list(backend.logs(handle, follow=False))
        for node in (0, 1):
            ours = [line.text for line in lines if line.node == node]
            assert ours == [line.text for line in again if line.node == node], "nothing twice, nothing lost"

    def test_a_missing_cluster_is_created_and_scales_to_zero(
        self, backend: Backend, job: Job, rehearse: Rehearse, cloud: Cloud
    ) -> None:
        rehearse({"*": "finish"})
        settings = job.settings.model_dump(exclude_unset=True)
        made = backend.settings.model_validate(
            {**settings, "grace": 10.0, "compute": "made-here", "cluster": {"create": True, "max_nodes": 2}}
        )
        handle = self.submit(backend, replace(job, settings=made))
        assert self.until_ended(backend, handle).state == "finished"
        cluster = cloud.emulator.world.clusters["made-here"]
        assert (cluster.min_nodes, cluster.max_nodes) == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["on_demand", "spot"])
def test_the_case_study_is_preflighted_against_quota(cloud: Cloud, tier: str) -> None:
    """16 nodes of 8 A100-80GB in Italy North. Slow: the emulator and its storage start for it."""
    job = case_study_in(cloud, tier)
    emulator, backend = cloud.emulator, AzureBackend()
    pool = "LowPriority" if tier == "spot" else "standardNDAMSv4_A100Family"
    found = {}
    for vcpus in (0, 1535, 1536):
        emulator.quota[pool] = vcpus
        found[vcpus] = [one for one in backend.preflight(job) if one.level == "error"]
    assert [[one.id for one in errors] for errors in found.values()] == [["azure.quota"], ["azure.quota"], []]
    assert "16 x Standard_ND96amsr_A100_v4 need 1536" in found[0][0].message
    emulator.offered["standard_nd96amsr_a100_v4"].discard("italynorth")
    try:
        assert "azure.region-sku" in {one.id for one in backend.preflight(job)}
    finally:
        emulator.offered["standard_nd96amsr_a100_v4"].add("italynorth")


def case_study_in(cloud: Cloud, tier: str) -> Job:
    """The case study's job with its places in the emulated account, on a cluster that may be created."""
    from azure_jobs import make_job, offer

    world = cloud.emulator.world
    latents = [cloud.emulator.container_uri("latents", name) for name in ("photos", "illustrations")]
    settings = {
        "subscription": world.subscription, "resource_group": world.resource_group, "workspace": world.workspace,
        "region": "italynorth", "compute": "nd-a100", "spot_compute": "nd-a100-low",
        "cluster": {"create": True}, "environment": {"image": IMAGE},
    }  # fmt: skip
    return make_job(
        *(f"data.sources.{number}.uri={uri}" for number, uri in enumerate(latents)),
        f"run_directory={cloud.emulator.container_uri('runs', 'sdxl')}",
        f"backends.azure={json.dumps(settings)}",
        recipe="sdxl-progressive",
        usual=False,
        offer=offer(tier, region="italynorth"),
    )
