"""What the client does with Azure's answers, through the real azure-ai-ml with a transport of the test's: no server.

Beside it: errors in words, and states.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.ai.ml", reason="pip install 'isthmus[azure]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from azure.core import exceptions
from azure.core.credentials import AccessToken
from azure_jobs import make_job
from azure_wire import WORKSPACE, Answer, Credential, Request, Wire, client_on

from isthmus.backends.azure.backend import AzureBackend
from isthmus.backends.azure.client import AzureClient
from isthmus.backends.azure.errors import Denied, Missing, Unreachable, azure_errors
from isthmus.backends.azure.render import render
from isthmus.backends.azure.state import metered, reason_of, status_of
from isthmus.backends.azure.target import Workspace
from isthmus.backends.spec import Handle, Rendered
from isthmus.errors import IsthmusError, PreflightRefused, UsageError
from isthmus.storage.rundir import RunDirectory


def refused(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": {"code": code, "message": message}})


def on(method: str, part: str, *answers: Answer | Exception) -> Any:
    """Answers the first requests of that kind, one each."""
    left = list(answers)

    def handler(request: Request) -> Answer | Exception | None:
        return left.pop(0) if left and request.method == method and part in request.path else None

    return handler


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own retries wait for seconds."""
    monkeypatch.setattr(
        "azure.core.pipeline.transport._base.HttpTransport.sleep", lambda *_: None, raising=False
    )
    monkeypatch.setattr("time.sleep", lambda *_: None)


@pytest.fixture
def submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rendered, Wire, AzureBackend]:
    """A rendered job whose run directory is a folder here; its cluster and environment are there."""
    from dataclasses import replace

    rendered = replace(render(make_job()), run_uri=str(tmp_path / "run"))
    wire = Wire(
        on(
            "GET",
            "/environments/isthmus/versions/",
            *[
                Answer(
                    200,
                    {
                        "id": f"{WORKSPACE.arm_id}/environments/isthmus/versions/1",
                        "name": "1",
                        "properties": {"image": "x", "osType": "Linux"},
                    },
                )
            ]
            * 9,
        )
    )
    backend = AzureBackend()
    client = client_on(wire)
    monkeypatch.setattr(backend, "_client_of", lambda native: client)
    monkeypatch.setattr("isthmus.backends.payload.put", lambda rendered: "put")
    return rendered, wire, backend


def puts(wire: Wire) -> int:
    return sum(request.method == "PUT" and "/jobs/" in request.path for request in wire.sent)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_told_to_microsofts_monitor(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    """azure-ai-ml tells of each call where it finds itself in a notebook, unless it is told not to; with ours it is."""
    from azure.ai.ml import MLClient
    from azure.ai.ml._telemetry import logging_handler

    begun: list[object] = []
    monkeypatch.setattr(logging_handler, "in_jupyter_notebook", lambda: True)
    monkeypatch.setattr(logging_handler, "setup_azure_monitor", lambda *told: begun.append(told))
    workspace = Workspace(subscription="a-subscription", resource_group="group", name="work")
    if enabled:  # the control: what the SDK does by itself
        MLClient(Credential(), "a-subscription", "group", "work")
        assert begun
        return
    AzureClient(workspace, credential=Credential(), transport=Wire())._connect()
    assert begun == []
    assert "azure.monitor.opentelemetry" not in sys.modules


def test_whoever_starts_azurite_forbids_its_telemetry() -> None:
    """It would write `Microsoft-AzureMonitor-*` into the temporary folder and try to reach Microsoft."""
    root = Path(__file__).parents[2]
    folders = ("backends", "benchmarks", "emulators", "rehearsal", "tests", "examples")
    starters = [
        path
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if '"--skipApiVersionCheck"' in path.read_text() and path != Path(__file__)
    ]
    assert len(starters) >= 3
    assert [path for path in starters if '"--disableTelemetry"' not in path.read_text()] == []


# -- submission


def test_a_submission_is_looked_for_first(submission: Any) -> None:
    rendered, wire, backend = submission
    handle = backend.submit(rendered)
    assert handle.native == {
        "job_id": rendered.job_id, "subscription": WORKSPACE.subscription, "resource_group": "training",
        "workspace": "images", "region": "italynorth", "grace": 30.0,
    }  # fmt: skip
    assert backend.submit(rendered) == handle
    assert puts(wire) == 1


@pytest.mark.parametrize(
    "lost", [exceptions.ServiceResponseError("Connection aborted"), refused(503, "Busy", "server is busy")]
)
def test_a_lost_answer_is_asked_about(submission: Any, lost: Any) -> None:
    rendered, wire, backend = submission
    keep = wire.handlers[-1]

    def loses(request: Request) -> Any:
        if request.method == "PUT" and "/jobs/" in request.path:
            keep(request)
            return lost
        return None

    wire.handlers.insert(0, loses)
    assert backend.submit(rendered).native["job_id"] == rendered.job_id


def test_a_connection_lost_before_it_had_an_effect_is_said(submission: Any) -> None:
    rendered, wire, backend = submission
    wire.handlers.insert(0, on("PUT", "/jobs/", *[exceptions.ServiceRequestError("no route")] * 20))
    with pytest.raises(Unreachable, match="the connection failed"):
        backend.submit(rendered)
    wire.handlers.pop(0)
    assert backend.submit(rendered).native["job_id"] == rendered.job_id


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (refused(400, "ClusterCoreQuotaReached", "not enough quota for NDAMSv4"), PreflightRefused, 3),
        (refused(409, "AllocationFailed", "insufficient capacity in italynorth"), PreflightRefused, 3),
        (refused(400, "BadRequest", "the instance count is wrong"), UsageError, 2),
        (refused(429, "TooManyRequests", "slow down"), Unreachable, 1),
        (refused(500, "InternalError", "oops"), Unreachable, 1),
    ],
)
def test_refusals_say_whether_another_offer_may_help(
    submission: Any, answer: Answer, kind: Any, code: int
) -> None:
    rendered, wire, backend = submission
    wire.handlers.insert(0, on("PUT", "/jobs/", *[answer] * 20))
    with pytest.raises(IsthmusError) as caught:
        backend.submit(rendered)
    assert isinstance(caught.value, kind)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)


def test_another_runs_job_of_that_name(submission: Any) -> None:
    rendered, wire, backend = submission
    backend.submit(rendered)
    wire.jobs[rendered.job_id]["properties"]["tags"]["isthmus-run"] = "another"
    with pytest.raises(UsageError, match="job name collision"):
        backend.submit(rendered)


# -- login


@pytest.mark.parametrize("status", [401, 403])
def test_one_new_login_when_a_token_has_ended(status: int) -> None:
    wire = Wire(
        on("GET", "/workspaces/images", refused(status, "ExpiredAuthenticationToken", "token expired"))
    )
    client = client_on(wire)
    with pytest.raises(Missing):
        client.workspace_entity()  # asked again, with an answer of its own
    assert sum(request.method == "GET" for request in wire.sent) == 2


def test_a_refusal_that_stays_is_one_line() -> None:
    wire = Wire(on("GET", "/workspaces/images", *[refused(403, "AuthorizationFailed", "no access")] * 5))
    with pytest.raises(Denied) as caught:
        client_on(wire).workspace_entity()
    assert "no permission: AuthorizationFailed: no access" in str(caught.value)
    assert caught.value.exit_code == 2


class NoLogin(Credential):
    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        raise exceptions.ClientAuthenticationError(
            "DefaultAzureCredential failed to retrieve a token\nAttempted:\n\t..."
        )


def test_nobody_is_logged_in() -> None:
    client = AzureClient(WORKSPACE, credential=NoLogin(), transport=Wire())
    with pytest.raises(Denied) as caught:
        client.workspace_entity()
    assert "no valid Azure credential" in str(caught.value)
    assert "az login" in str(caught.value.hint)
    assert "\n" not in str(caught.value)


def test_a_handle_of_another_machine_takes_the_workspace_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AZURE_SUBSCRIPTION_ID", "AZUREML_RESOURCE_GROUP", "AZUREML_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="which Azure ML workspace"):
        AzureClient.of({"job_id": "x"})
    for name in ("AZURE_SUBSCRIPTION_ID", "AZUREML_RESOURCE_GROUP", "AZUREML_WORKSPACE"):
        monkeypatch.setenv(name, name.lower())
    assert AzureClient.of({"job_id": "x"}).workspace.name == "azureml_workspace"


def test_no_sas_in_an_error() -> None:
    error = exceptions.HttpResponseError(
        "cannot read https://a.blob.core.windows.net/c/x?sv=1&sig=abc%3D for you"
    )
    with pytest.raises(UsageError) as caught, azure_errors("read a log"):
        raise error
    assert "sig=" not in str(caught.value)


# -- states


@pytest.mark.parametrize(
    ("word", "error", "events", "state"),
    [
        ("Queued", None, [], "pending"),
        ("Queued", None, ["started"], "restarting"),
        ("Running", None, ["started"], "running"),
        ("NotResponding", None, ["started"], "running"),
        ("Completed", None, ["started", "finished"], "finished"),
        ("Completed", None, ["started"], "failed"),
        ("Failed", None, ["started", "failed"], "failed"),
        ("Failed", None, ["started", "preempted"], "preempted"),
        ("Failed", {"code": "UserError", "message": "exit code 1"}, ["started"], "failed"),
        ("Failed", {"code": "UserError", "message": "the node was preempted"}, ["started"], "preempted"),
        ("Failed", {"code": "ServiceError", "message": "InternalServerError"}, [], "preempted"),
        ("Canceled", None, ["started"], "stopped"),
        ("Canceled", {"message": "the job exceeded its time limit"}, ["started"], "preempted"),
        ("Canceled", None, ["started", "stop-requested", "stopped"], "stopped"),
        ("Whatever", None, [], "unknown"),
    ],
)
def test_states(tmp_path: Path, word: str, error: Any, events: list[str], state: str) -> None:
    run = RunDirectory(tmp_path)
    run.event("submitted", job_id="j-01")
    for kind in events:
        run.event(kind, job="j-01")
    details = {"error": {"error": error}} if error else {}
    status = status_of(word, details, run.events(), "j-01")
    assert (status.state, status.detail) == (state, word)


@pytest.mark.parametrize(
    ("details", "seconds"),
    [
        ({}, None),
        ({"startTimeUtc": None, "endTimeUtc": None}, None),
        (
            {"startTimeUtc": "2026-12-01T10:00:00.1234567Z", "endTimeUtc": "2026-12-01T10:10:00.1234567Z"},
            600.0,
        ),
        ({"startTimeUtc": "2026-12-01T10:00:00Z", "endTimeUtc": None}, 3600.0),
        ({"startTimeUtc": "2026-12-01T10:00:00", "endTimeUtc": "2026-12-01T10:00:30+00:00"}, 30.0),
        ({"startTimeUtc": "soon"}, None),
    ],
)
def test_the_run_historys_times(details: dict[str, Any], seconds: float | None) -> None:
    """As written by the service (seven digits), as read by its SDK, and what is no time."""
    meter = metered(details, now=datetime(2026, 12, 1, 11, tzinfo=UTC))
    assert (meter and meter.seconds) == seconds
    assert meter is None or meter.billable_s is None


def test_a_reason_is_one_line_without_secrets() -> None:
    reason, own = reason_of(
        {
            "error": {"error": {"code": "UserError", "message": "a\nb AccountKey=x;"}},
            "warnings": [{"message": "w"}],
        }
    )
    assert reason is not None
    assert "\n" not in reason
    assert "AccountKey=x" not in reason
    assert not own
    assert reason_of({}) == (None, False)


# -- stopping


def test_a_waiting_job_is_cancelled_at_once(submission: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, wire, backend = submission
    handle = backend.submit(rendered)

    def cancelled(request: Request) -> Answer | None:
        if request.path.endswith("/cancel"):
            wire.jobs[rendered.job_id]["properties"]["status"] = "Canceled"
            return Answer(200, {})
        return None

    wire.handlers.insert(0, cancelled)
    RunDirectory(handle.run_uri).event("submitted", job_id=rendered.job_id)
    backend.stop(handle)
    backend.stop(handle)
    assert len(RunDirectory(handle.run_uri).events("stop-requested")) == 1
    assert backend.status(handle).state == "stopped"
    assert sum(request.path.endswith("/cancel") for request in wire.sent) == 1


def test_a_running_job_ends_by_itself(submission: Any) -> None:
    rendered, wire, backend = submission
    handle = backend.submit(rendered)
    run = RunDirectory(handle.run_uri)
    run.event("submitted", job_id=rendered.job_id)
    run.event("started", job=rendered.job_id)
    wire.jobs[rendered.job_id]["properties"]["status"] = "Running"

    def looks(request: Request) -> None:
        if run.events("stop-requested") and not run.events("stopped"):
            run.event("stopped", job=rendered.job_id, exit_code=4)
            wire.jobs[rendered.job_id]["properties"]["status"] = "Failed"

    wire.handlers.insert(0, looks)
    backend.stop(handle)
    assert backend.status(handle) == backend.status(Handle.from_json(handle.to_json()))
    assert (backend.status(handle).state, backend.status(handle).exit_code) == ("stopped", 4)
    assert not any(request.path.endswith("/cancel") for request in wire.sent)
