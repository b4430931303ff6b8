"""The suite that every backend inherits and passes, built in or third-party.

In a backend's own tests::

    from isthmus.backends.conformance import BackendConformance

    class TestAcme(BackendConformance):
        @pytest.fixture
        def backend(self):
            return get_backend("acme")

The jobs run the worker with a stand-in for the trainer (`isthmus.core.rehearsal`), chosen by environment variables
that are set in the test's own process. A backend whose jobs do not inherit them overrides `rehearse`. Needs pytest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isthmus.backends.preflight import look
from isthmus.backends.spec import (
    ENDED,
    EXIT_CODES,
    Attachable,
    Backend,
    Capability,
    Discovers,
    Finding,
    Handle,
    Job,
    LogLine,
    Rendered,
    State,
    Status,
)
from isthmus.core.recipe import Recipe, parse_recipe, resolve
from isthmus.core.recipe.document import parse as parse_yaml
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

RECIPE = """
version: 1
name: conformance
model:
  family: dit
  config:
    {sample_size: 8, patch_size: 1, in_channels: 4, out_channels: 4, num_layers: 1, num_attention_heads: 2,
     attention_head_dim: 16, cross_attention_dim: 32, caption_channels: 24, use_additional_conditions: false}
encoders:
  autoencoder: {kind: patch_pca, source: autoencoder, latent_channels: 4, factor: 4}
  text: [{name: minilm, kind: minilm, source: test, max_tokens: 5, width: 24}]
data: {sources: [{uri: DATA}], lanes: 2, shuffle_window: 16}
stages: [{name: only, resolution: 32, steps: 4, global_batch_size: 2, micro_batch_size: 1, learning_rate: 0.001}]
compute: {gpu: none, gpus_per_node: 1, max_restarts: 1}
run_directory: RUNS
"""
"""A tiny job of one process; DATA and RUNS are put in by `recipe`."""

SECRETS = (
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "HF_TOKEN",
)
Rehearse = Callable[[dict[str, Any]], None]


class BackendConformance:
    """Inherit, and override the fixture `backend`; others where the backend needs it."""

    timeout = 120.0
    """Seconds that a tiny job may take to start, or to end."""

    # -- what a subclass may override

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test."""
        raise NotImplementedError("override the fixture `backend`")

    @pytest.fixture
    def runs(self, tmp_path: Path) -> str:
        """Where the jobs' run directories are: a place that the backend's jobs can write to."""
        return str(tmp_path / "runs")

    @pytest.fixture
    def recipe(self, runs: str, tmp_path: Path) -> Recipe:
        """A recipe that the backend can run, with one process."""
        text = RECIPE.replace("DATA", json.dumps(str(tmp_path / "data"))).replace("RUNS", json.dumps(runs))
        return parse_recipe(text, filename="conformance.yaml").recipe

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        """The backend's section of the recipe."""
        return {}

    @pytest.fixture
    def rehearse(self, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
        """Tells the jobs' ranks what to do, before they are submitted."""

        def rehearse(plan: dict[str, Any]) -> None:
            monkeypatch.setenv("ISTHMUS_TRAINER_MODULE", "isthmus.core.rehearsal")
            monkeypatch.setenv("ISTHMUS_REHEARSAL", json.dumps(plan))

        return rehearse

    # -- what the tests are made of

    @pytest.fixture
    def job(self, backend: Backend, recipe: Recipe, runs: str, settings: dict[str, Any]) -> Job:
        """A job, rendered nowhere yet."""
        run_id = "conformance-1"
        return Job(
            recipe=resolve(recipe, backend.name),
            source=recipe,
            backend=backend.name,
            run_id=run_id,
            run_uri=filesystems.join(runs, run_id),
            settings=backend.settings.model_validate(settings),
        )

    def submit(self, backend: Backend, job: Job) -> Handle:
        """Creates the run directory and submits, as the launcher does."""
        run = RunDirectory(job.run_uri)
        if not run.exists():
            run.create(
                "", {"id": job.run_id, "name": job.recipe.name, "backend": job.backend, "recipe_hash": ""}
            )
        run.event("submitted", backend=job.backend)
        return backend.submit(backend.render(job))

    def until(self, backend: Backend, handle: Handle, wanted: Callable[[Status], bool]) -> Status:
        """The first status that is wanted; fails after `timeout`."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            status = backend.status(handle)
            if wanted(status):
                return status
            assert not status.ended, f"ended early: {status}\n{self.text(backend, handle)}"
            time.sleep(0.05)
        raise AssertionError(f"still {backend.status(handle)}\n{self.text(backend, handle)}")

    def until_training(self, backend: Backend, handle: Handle) -> None:
        """Until the ranks have begun."""
        run = RunDirectory(handle.run_uri)
        self.until(backend, handle, lambda status: status.state == "running" and bool(run.events("note")))

    def until_ended(self, backend: Backend, handle: Handle) -> Status:
        """How it ended."""
        return self.until(backend, handle, lambda status: status.ended)

    def text(self, backend: Backend, handle: Handle) -> str:
        """The log."""
        return "\n".join(line.text for line in backend.logs(handle, follow=False))

    # -- surface

    def test_it_is_a_backend(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert backend.name == backend.name.lower().strip()
        assert all(isinstance(capability, Capability) for capability in backend.capabilities)
        assert backend.capabilities & {Capability.ATTACHED, Capability.DETACHED}
        assert isinstance(backend, Attachable) == (Capability.ATTACHED in backend.capabilities)

    def test_its_settings_are_strict(self, backend: Backend) -> None:
        assert issubclass(backend.settings, BaseModel)
        with pytest.raises(ValidationError):
            backend.settings.model_validate({"no_such_setting_anywhere": 1})

    # -- rendering

    def test_rendering_is_pure(self, backend: Backend, job: Job, tmp_path: Path) -> None:
        before = sorted(tmp_path.rglob("*"))
        first, second = backend.render(job), backend.render(job)
        assert isinstance(first, Rendered)
        assert first.to_json() == second.to_json()
        assert sorted(tmp_path.rglob("*")) == before, "rendering wrote something"
        assert not RunDirectory(job.run_uri).exists()

    def test_rendering_is_json(self, backend: Backend, job: Job) -> None:
        rendered = backend.render(job)
        loaded = json.loads(rendered.to_json())
        assert loaded["request"] == rendered.request, "the request is not plain JSON"
        assert (loaded["backend"], loaded["run_id"], loaded["run_uri"]) == (
            backend.name,
            job.run_id,
            job.run_uri,
        )

    def test_rendering_holds_the_recipe(self, backend: Backend, job: Job) -> None:
        text = backend.render(job).files["recipe.yaml"]
        assert parse_recipe(text, filename="recipe.yaml").recipe == job.recipe

    def test_each_attempt_has_a_name_of_its_own(self, backend: Backend, job: Job) -> None:
        assert backend.render(job).job_id != backend.render(replace(job, attempt=2)).job_id

    def test_the_request_is_a_document_for_the_cloud_s_own_tools(self, backend: Backend, job: Job) -> None:
        rendered = backend.render(job)
        assert isinstance(json.loads(backend.document(rendered, "json")), dict)
        text = backend.document(rendered, "yaml")
        assert text.strip()
        assert isinstance(parse_yaml(text).data, dict)
        assert backend.document(rendered, "yaml") == text

    def test_no_secret_is_in_what_is_rendered(
        self, backend: Backend, job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        secret = "Zq7secretZq7"
        for name in SECRETS:
            monkeypatch.setenv(name, secret)
        assert secret not in backend.render(job).to_json()

    # -- findings

    def test_lint_finds_nothing_wrong_with_a_good_job(self, backend: Backend, job: Job) -> None:
        findings = backend.lint(job)
        assert all(isinstance(finding, Finding) for finding in findings)
        assert [finding for finding in findings if finding.level == "error"] == []

    def test_lint_knows_how_many_nodes_it_has(self, backend: Backend, job: Job) -> None:
        if Capability.MULTI_NODE in backend.capabilities:
            pytest.skip("it has many")
        compute = job.recipe.compute.model_copy(update={"nodes": 2})
        many = replace(job, recipe=job.recipe.model_copy(update={"compute": compute}))
        errors = [finding for finding in backend.lint(many) if finding.level == "error"]
        assert errors
        assert all(finding.id and finding.message and "\n" not in finding.message for finding in errors)

    def test_preflight_tells_of_missing_data_and_starts_nothing(self, backend: Backend, job: Job) -> None:
        findings = list(backend.preflight(job))
        if Capability.ATTACHED not in backend.capabilities:
            # As a launch does: a cloud need not look at what every launch looks at.
            findings += [finding for _, told in look(job) for finding in told]
        assert any(finding.level == "error" for finding in findings), "there is no dataset"
        assert not RunDirectory(job.run_uri).exists()

    def test_offers(self, backend: Backend, job: Job) -> None:
        offers = backend.offers(job)
        assert all(offer.backend == backend.name for offer in offers)

    # -- life

    def test_a_job_finishes(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        rehearse({"*": "finish"})
        handle = self.submit(backend, job)
        assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle
        lines = list(backend.logs(handle, follow=True))
        assert all(isinstance(line, LogLine) and "\n" not in line.text for line in lines)
        assert any("rank 0" in line.text for line in lines), "following misses what the ranks printed"
        status = self.until_ended(backend, handle)
        assert (status.state, status.exit_code) == ("finished", 0)
        assert RunDirectory(job.run_uri).events("finished")

    def test_the_same_job_is_submitted_once(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        rehearse({"*": "wait"})
        handle = self.submit(backend, job)
        again = backend.submit(backend.render(job))
        assert again.native["job_id"] == handle.native["job_id"]
        self.until_training(backend, handle)
        # Another launcher, that does not know of the first one.
        assert type(backend)().submit(backend.render(job)).native["job_id"] == handle.native["job_id"]
        backend.stop(handle)
        assert self.until_ended(backend, handle).state == "stopped"
        # Nor does a job that has ended begin anew.
        ended = backend.submit(backend.render(job))
        assert backend.status(ended).state == "stopped"
        assert len(RunDirectory(job.run_uri).events("started")) == 1
        if isinstance(backend, Discovers):
            found = [one for one in backend.jobs(job.settings) if one.handle.run_id == job.run_id]
            assert [one.handle.native["job_id"] for one in found] == [handle.native["job_id"]]
            assert found[0].handle.run_uri == job.run_uri

    @pytest.mark.parametrize(
        ("word", "cause"), [("fail", "the disk is full"), ("kill", "killed by signal 9")]
    )
    def test_a_failure_names_its_cause(
        self, backend: Backend, job: Job, rehearse: Rehearse, word: str, cause: str
    ) -> None:
        rehearse({"*": word})
        status = self.until_ended(backend, self.submit(backend, job))
        assert (status.state, status.exit_code) == ("failed", 1)
        assert cause in (status.cause or "")

    def test_stop_checkpoints_and_is_final(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        rehearse({"*": "wait"})
        handle = self.submit(backend, job)
        self.until_training(backend, handle)
        backend.stop(handle)
        status = self.until_ended(backend, handle)
        assert (status.state, status.exit_code) == ("stopped", EXIT_CODES["stopped"])
        run = RunDirectory(job.run_uri)
        assert run.checkpoints(), "it was not given the time to checkpoint"
        assert run.events("stop-requested")
        backend.stop(handle)  # again: nothing happens
        assert len(run.events("stop-requested")) == 1

    def test_a_preempted_job_is_restarted_or_can_be(
        self, backend: Backend, job: Job, rehearse: Rehearse
    ) -> None:
        rehearse({"*": ["preempt", "finish"]})
        handle = self.submit(backend, job)
        status = self.until_ended(backend, handle)
        if Capability.RESTARTS not in backend.capabilities:
            assert (status.state, status.exit_code) == ("preempted", 75)
            status = self.until_ended(backend, self.submit(backend, replace(job, attempt=2)))
        assert (status.state, status.exit_code) == ("finished", 0)
        assert len(RunDirectory(job.run_uri).events("started")) == 2

    def test_an_interrupted_job_can_be_resumed(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        if not isinstance(backend, Attachable):
            pytest.skip("it cannot be attached")
        rehearse({"*": ["wait", "finish"]})
        handle = self.submit(backend, job)
        self.until_training(backend, handle)
        backend.interrupt(handle)
        assert self.until_ended(backend, handle).state == "preempted"
        assert RunDirectory(job.run_uri).checkpoints()
        status = self.until_ended(backend, self.submit(backend, replace(job, attempt=2)))
        assert status.state == "finished"

    def test_another_process_can_follow_it(self, backend: Backend, job: Job, rehearse: Rehearse) -> None:
        rehearse({"*": "finish"})
        handle = self.submit(backend, job)
        self.until_ended(backend, handle)
        stranger = type(backend)()
        known = Handle.from_json(json.loads(json.dumps(handle.to_json())))
        assert stranger.status(known).state == "finished"
        # On another machine only run.json's job id is known.
        bare = replace(known, native={"job_id": known.native["job_id"]})
        assert stranger.status(bare).state == "finished"

    def test_states_are_the_known_words(self) -> None:
        words: frozenset[State] = ENDED
        assert set(EXIT_CODES) == set(words)
