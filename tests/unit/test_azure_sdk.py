"""Our YAML and REST body against azure-ai-ml itself: what it reads, and what it sends. The SDK's import takes seconds."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.ai.ml", reason="pip install 'isthmus[azure]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from azure_jobs import CASE_STUDY, CASES, az, case_study, make_job, offer, shipped
from azure_wire import Wire, client_on

from isthmus.backends.azure.backend import AzureBackend
from isthmus.backends.azure.body import MODEL
from isthmus.backends.azure.bridge import to_command
from isthmus.backends.azure.document import short_id, yaml_form
from isthmus.backends.azure.render import render
from isthmus.backends.azure.target import target_of
from isthmus.backends.spec import Job, Rendered
from isthmus.errors import UsageError

JOBS = [(f"{'.'.join(case)}", lambda case=case: shipped(*case)) for case in CASES] + [
    (name, lambda tier=tier, compute=compute: case_study(tier, compute)) for name, tier, compute in CASE_STUDY
]
DEFAULTS = {"isArchived": False, "properties": {}, "outputs": {}}
"""What the SDK sends along though nobody said it; the service's own defaults."""


def rest(node: Any) -> dict[str, Any]:
    """The SDK's REST form of a command node, before it asks the service anything."""
    body: dict[str, Any] = node._to_job()._to_rest_object().as_dict()
    return dict(body["properties"])


def without_defaults(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Properties without the SDK's additions; the resources' empty `properties` are among them."""
    kept = {name: value for name, value in properties.items() if DEFAULTS.get(name, ...) != value}
    kept["resources"] = {name: value for name, value in kept["resources"].items() if value != {}}
    return kept


def unresolved(rendered: Rendered, *, inline: bool) -> dict[str, Any]:
    """Our body with the names that the SDK has before it makes ARM ids of them."""
    properties = dict(rendered.request["properties"])
    if "computeId" in properties:
        properties["computeId"] = short_id(properties["computeId"]).removeprefix("azureml:")
    if inline:
        properties["environmentId"] = json.loads(rendered.files["environment.json"])["image"]
    else:
        short = short_id(properties["environmentId"])
        properties["environmentId"] = short if "//" in short else short.removeprefix("azureml:")
    return properties


def check_node(node: Any, rendered: Rendered) -> None:
    properties = without_defaults(rest(node))
    environment = node._to_job().environment
    properties["environmentId"] = environment if isinstance(environment, str) else environment.image
    assert properties == unresolved(rendered, inline=not isinstance(environment, str))
    assert node.name == rendered.job_id


@pytest.mark.parametrize(("name", "job"), JOBS, ids=[name for name, _ in JOBS])
def test_our_yaml_is_a_command_job_whose_rest_form_is_our_body(name: str, job: Any) -> None:
    from azure.ai.ml import load_job

    rendered = render(job())
    text = AzureBackend().document(rendered, "yaml")
    check_node(load_job(io.StringIO(text)), rendered)


@pytest.mark.parametrize(("name", "job"), JOBS[::5], ids=[name for name, _ in JOBS[::5]])
def test_the_bridges_node_is_what_we_submit(name: str, job: Any) -> None:
    check_node(to_command(job()), render(job()))


def test_a_bridges_node_goes_into_a_pipeline() -> None:
    from azure.ai.ml import dsl

    node = to_command(shipped("sdxl-progressive", "on_demand", "mount"))

    @dsl.pipeline(name="nightly")
    def nightly() -> None:
        node()

    steps = nightly()._to_rest_object().as_dict()["properties"]["jobs"]
    (step,) = steps.values()
    assert step["distribution"] == {"distribution_type": "PyTorch", "process_count_per_instance": 1}
    assert step["resources"]["instance_count"] == 16
    assert [entry["mode"] for entry in step["inputs"].values()] == ["Download", *2 * ["ReadOnlyMount"]]


def fields(name: str) -> set[str]:
    """Of a class that the SDK's makers generated from the service's OpenAPI."""
    from azure.ai.ml._restclient.arm_ml_service import models

    made: Any = getattr(models, name)
    made(command="x", environment_id="y") if name == "CommandJob" else made()  # fills the table of fields
    return {field._rest_name for field in made._attr_to_rest_field.values()}


def words(name: str) -> set[str]:
    """Of an enum, the same way."""
    from azure.ai.ml._restclient.arm_ml_service import models

    return {member.value for member in getattr(models, name)}


@pytest.mark.parametrize(
    ("ours", "theirs", "not_to_send", "previews"),
    [
        ((), "CommandJob", {"parameters", "status", "notificationSetting"}, set()),
        (("distribution",), "PyTorch", set(), set()),
        (("identity",), "ManagedIdentity", set(), set()),
        (("inputs", "*"), "UriFolderJobInput", set(), {"value", "pathOnCompute"}),
        (("outputs", "*"), "UriFolderJobOutput", set(), {"assetVersion"}),
        (("limits",), "CommandJobLimits", set(), set()),
        (("queueSettings",), "QueueSettings", set(), {"priority"}),
        (("resources",), "JobResourceConfiguration", {"dockerArgsList"}, {"locations", "maxInstanceCount"}),
        (("services", "*"), "JobService", {"errorMessage", "status"}, set()),
    ],
)
def test_the_model_that_bodies_are_held_to_has_the_services_fields(
    ours: tuple[str, ...], theirs: str, not_to_send: set[str], previews: set[str]
) -> None:
    """`previews`: other inputs' fields, and what only preview versions of the service take."""
    model: Any = MODEL
    for name in ours:
        model = model[name]
    assert set(model) == fields(theirs) - not_to_send | previews


def test_the_model_has_the_services_words() -> None:
    inputs, outputs = MODEL["inputs"]["*"], MODEL["outputs"]["*"]
    assert inputs["jobInputType"] == words("JobInputType")
    assert inputs["mode"] == words("InputDeliveryMode")
    assert (outputs["jobOutputType"], outputs["mode"]) == (
        words("JobOutputType"),
        words("OutputDeliveryMode"),
    )
    assert MODEL["queueSettings"]["jobTier"] == words("JobTier")
    assert MODEL["identity"]["identityType"] == words("IdentityConfigurationType")
    assert MODEL["distribution"]["distributionType"] == words("DistributionType") | {"Ray"}


def nasty() -> Job:
    text = 'it\'s "größe" $HOME ${{inputs.x}} {inputs.y} 猫: - #?%\x7f'
    return make_job(
        "data.access=mount",
        *az(tags={"note: #": text.replace("\x7f", "")}, environment_variables={"NOTE": "a: 'b' #\n猫"}),
        run_uri=f"az://runs@exampleaccount.blob.core.windows.net/{text}/r-1",
    )


def test_what_a_user_writes_reaches_the_sdk_unchanged() -> None:
    from azure.ai.ml import load_job

    rendered = render(nasty())
    check_node(load_job(io.StringIO(AzureBackend().document(rendered, "yaml"))), rendered)


@pytest.mark.parametrize("job", [*(make for _, make in JOBS[::7]), nasty])
def test_what_the_client_puts_on_the_wire_is_our_body(job: Any) -> None:
    rendered, wire = render(job()), Wire()
    client = client_on(wire, target_of(job()).workspace)
    client.create_job(yaml_form(rendered, inline_environment=False))
    (sent,) = [request for request in wire.sent if request.method == "PUT"]
    assert sent.path.endswith(f"/jobs/{rendered.job_id}")
    properties = {**sent.body["properties"]}
    properties["properties"] = {}  # the commit of the launcher's folder, which the SDK adds
    assert without_defaults(properties) == rendered.request["properties"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"queue": {"tier": "premium", "priority": "high"}}, {"jobTier": "Premium", "priority": 3}),
        ({"queue": {"priority": "low"}}, {"priority": 1}),
    ],
)
def test_queues_and_priorities(settings: dict[str, Any], words: dict[str, Any]) -> None:
    job = make_job(*az(**settings), offer=offer("on_demand"))
    check_node(to_command(job), render(job))
    assert render(job).request["properties"]["queueSettings"] == words


@pytest.mark.parametrize(
    "environment",
    [
        {"registered": "acpt-train:7"},
        {"registered": "azureml://registries/azureml/environments/acpt/versions/3"},
    ],
)
def test_registered_environments(environment: dict[str, str]) -> None:
    job = make_job(*az(environment=environment))
    check_node(to_command(job), render(job))


def test_other_identities() -> None:
    for settings in ({"identity": "user"}, {"client_id": "00000000-0000-0000-0000-0000000000aa"}):
        job = make_job(*az(**settings))
        check_node(to_command(job), render(job))


def test_what_the_sdk_refuses_is_one_line() -> None:
    from isthmus.backends.azure.client import load
    from isthmus.backends.azure.errors import azure_errors

    form = yaml_form(render(make_job()), inline_environment=True)
    form["distribution"] = {"type": "fsdp"}
    with pytest.raises(UsageError) as caught, azure_errors("read the job"):
        load(form)
    assert "\n" not in str(caught.value)
