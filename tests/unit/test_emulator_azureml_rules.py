"""What the emulated Azure ML refuses, asked over its REST API: each rule of its list has a request that breaks it."""

from __future__ import annotations

import copy
import json
import ssl
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.emulators.azureml import AzureMLEmulator
from isthmus.emulators.azureml.durations import seconds_of
from isthmus.emulators.azureml.rules import RULES, as_json
from isthmus.emulators.azureml.skus import SKUS, usage_name
from isthmus.errors import IsthmusError

ND = "Standard_ND96amsr_A100_v4"
FAMILY = "standardNDAMSv4_A100Family"


class Api:
    """Requests to the emulator, with a token of its own."""

    def __init__(self, cloud: AzureMLEmulator) -> None:
        self.cloud = cloud
        self.context = ssl.create_default_context(cafile=str(cloud.bundle))
        self.authorization = f"Bearer {self.token()}"

    def token(self) -> str:
        """A managed identity's, as azure-identity asks for it."""
        environment = self.cloud.environment()
        url = (
            f"{environment['IDENTITY_ENDPOINT']}?api-version=2019-08-01&resource=https://management.azure.com"
        )
        headers = {"X-IDENTITY-HEADER": environment["IDENTITY_HEADER"]}
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return str(json.load(answer)["access_token"])

    def __call__(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        version: bool = True,
        **headers: str,
    ) -> tuple[int, Any]:
        """Status and body. The path is below the workspace, or absolute."""
        whole = path if path.startswith("/subscriptions") else self.cloud.world.path + path
        if version:
            whole += ("&" if "?" in whole else "?") + "api-version=2024-10-01"
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        named = {"Authorization": self.authorization} | headers
        request = urllib.request.Request(self.cloud.address + whole, data=data, method=method, headers=named)
        try:
            with urllib.request.urlopen(request, context=self.context) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A workspace in Italy North with a cluster of two and an environment; its nodes never come, so no job starts."""
    pytest.importorskip("azure.storage.blob")
    pytest.importorskip("cryptography")
    try:
        cloud = AzureMLEmulator(
            tmp_path_factory.mktemp("azureml"),
            privileges="processes",
            region="italynorth",
            start_delay=3600,
            page=3,
        )
    except IsthmusError as error:
        pytest.skip(str(error))
    with cloud:
        cloud.add_compute("two", "Standard_DS3_v2", nodes=2)
        cloud.add_compute("low", "Standard_DS3_v2", nodes=2, low_priority=True)
        cloud.add_environment("train", "1", "team/train@sha256:0")
        yield Api(cloud)


def name() -> str:
    """Of a job that nobody else has."""
    return f"job-{uuid.uuid4().hex[:12]}"


def job(**changes: Any) -> dict[str, Any]:
    """A job that is taken, with fields replaced (None takes one away)."""
    properties: dict[str, Any] = {
        "jobType": "Command",
        "command": "python train.py --data ${{inputs.data}}",
        "environmentId": "azureml:train:1",
        "computeId": "two",
        "inputs": {
            "data": {
                "jobInputType": "uri_folder",
                "mode": "ReadOnlyMount",
                "uri": "https://devstoreaccount1.blob.core.windows.net/data/a/",
            }
        },
        "resources": {"instanceCount": 2, "shmSize": "64g"},
        "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 1},
        "environmentVariables": {"NCCL_DEBUG": "INFO"},
        "tags": {"isthmus-run": "r"},
    }
    properties |= changes
    return {"properties": {key: value for key, value in properties.items() if value is not None}}


def serverless(**changes: Any) -> dict[str, Any]:
    """A job without a cluster."""
    resources = {"instanceCount": 1, "instanceType": ND}
    return job(**{"computeId": None, "resources": resources, **changes})


def cluster(
    size: str = ND, priority: str = "Dedicated", least: Any = 0, most: Any = 2, **changes: Any
) -> dict[str, Any]:
    """An AmlCompute."""
    scale = {"minNodeCount": least, "maxNodeCount": most, "nodeIdleTimeBeforeScaleDown": "PT10M"}
    inner = {"vmSize": size, "vmPriority": priority, "scaleSettings": scale} | changes
    return {"location": "italynorth", "properties": {"computeType": "AmlCompute", "properties": inner}}


def inputs(**changes: Any) -> dict[str, Any]:
    """The job's one input, changed."""
    return {"data": {**job()["properties"]["inputs"]["data"], **changes}}


BROKEN_JOBS: list[tuple[str, dict[str, Any]]] = [
    ("job-type", job(jobType="Pipeline")),
    ("job-command", job(command=" ")),
    ("job-command-input", job(command="python ${{inputs.zz}}")),
    ("job-command-input", job(command="python ${{outputs.out}}")),
    ("job-input-name", job(inputs={"a-b": inputs()["data"]} | inputs())),
    ("job-input", job(inputs=inputs(uri="ftp://somewhere/a"))),
    ("job-input", job(inputs=inputs(uri="azureml:wasbs://c@devstoreaccount1.blob.core.windows.net/a"))),
    ("job-input", job(inputs=inputs(uri=None))),
    ("job-input", job(inputs=inputs(mode="fast_file"))),
    ("job-input", job(inputs=inputs(jobInputType="folder"))),
    ("job-output", job(outputs={"o": {"jobOutputType": "uri_folder", "mode": "ReadOnlyMount"}})),
    (
        "job-output",
        job(outputs={"o": {"jobOutputType": "uri_folder", "uri": "https://other.blob.core.windows.net/c/p"}}),
    ),
    ("job-datastore", job(inputs=inputs(uri="azureml://datastores/nowhere/paths/a/"))),
    ("job-datastore", job(inputs=inputs(uri="azureml:nothing:1"))),
    ("job-environment", job(environmentId=None)),
    ("job-environment", job(environmentId="azureml:train")),
    ("job-environment", job(environmentId="azureml:train:2")),
    ("job-code", job(codeId="azureml:nothing:1")),
    ("job-compute", job(computeId="nowhere")),
    ("job-instance-type", job(resources={"instanceCount": 1, "instanceType": ND})),
    ("job-instances", job(resources={"instanceCount": 3})),
    ("job-instances", job(resources={"instanceCount": -1})),
    ("job-instances", job(resources={"instanceCount": "two"})),
    ("job-distribution", job(distribution={"distributionType": "Fsdp"})),
    ("job-distribution", job(distribution={"distributionType": "PyTorch", "processCountPerInstance": -8})),
    ("job-shm", job(resources={"shmSize": "lots"})),
    ("job-docker-args", job(resources={"dockerArgs": ["--cap-add"]})),
    ("job-environment-variables", job(environmentVariables={"A": True})),
    ("job-environment-variables", job(environmentVariables={"A": 3})),
    ("job-tags", job(tags={"attempt": 1})),
    ("job-timeout", job(limits={"timeout": "86400"})),
    ("job-timeout", job(limits={"timeout": "PT0S"})),
    ("job-lifetime", job(limits={"timeout": "P22D"})),
    ("job-lifetime", job(limits={"timeout": "P8D"}, computeId="low")),
    ("job-identity", job(identity={"identityType": "Mine"})),
    ("serverless-identity", serverless(identity={"identityType": "Managed"})),
    (
        "serverless-instance-type",
        serverless(resources={"instanceCount": 1, "instanceType": "Standard_ND40rs_v2"}),
    ),
    ("serverless-quota", serverless(resources={"instanceCount": 10_000, "instanceType": ND})),
    ("job-tier", serverless(queueSettings={"jobTier": "cheap"})),
    ("job-tier", job(queueSettings={"jobTier": "Spot"})),
    ("body", {"name": "no properties"}),
]
BROKEN_CLUSTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("compute-name", "1two", cluster()),
    ("compute-name", "t", cluster()),
    ("compute-name", "a" * 33, cluster()),
    ("compute-type", "new", {"properties": {"computeType": "Kubernetes", "properties": {}}}),
    ("compute-sku-unknown", "new", cluster("Standard_ND1000_B900")),
    ("compute-sku-region", "new", cluster("Standard_ND40rs_v2")),
    ("compute-priority", "new", cluster(priority="low")),
    ("compute-scale", "new", cluster(least=3, most=2)),
    ("compute-scale", "new", cluster(most=None)),
    ("compute-rdma-nodes", "new", cluster(most=101)),
    ("compute-nodes", "new", cluster("Standard_DS3_v2", most=101)),
    ("compute-change", "two", cluster(ND)),
]
ELSEWHERE = {
    "api-version", "token", "subscription", "workspace", "not-found", "not-emulated", "quota-family", "quota-low-priority",
    "asset-name", "asset-immutable", "environment-image", "job-name", "job-exists", "compute-sku-low-priority",
}  # fmt: skip
"""Rules with a test of their own below."""


def refused(answer: tuple[int, Any]) -> str:
    """The rule by which an answer refuses; its status and code are the rule's."""
    status, body = answer
    assert status >= 400, body
    rule = RULES[body["error"]["additionalInfo"][0]["info"]["id"]]
    assert (status, body["error"]["code"]) == (rule.status, rule.code)
    assert body["error"]["message"]
    return rule.id


@pytest.mark.parametrize(
    ("rule", "body"), BROKEN_JOBS, ids=[f"{rule}-{i}" for i, (rule, _) in enumerate(BROKEN_JOBS)]
)
def test_a_job_is_refused_by_its_rule(api: Api, rule: str, body: dict[str, Any]) -> None:
    new = name()
    assert refused(api("PUT", f"/jobs/{new}", body)) == rule
    assert new not in api.cloud.world.jobs


@pytest.mark.parametrize(
    ("rule", "called", "body"),
    BROKEN_CLUSTERS,
    ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(BROKEN_CLUSTERS)],
)
def test_a_cluster_is_refused_by_its_rule(api: Api, rule: str, called: str, body: dict[str, Any]) -> None:
    assert refused(api("PUT", f"/computes/{called}", body)) == rule
    assert "new" not in api.cloud.world.clusters


def test_every_rule_of_a_request_is_broken_here() -> None:
    tested = {rule for rule, _ in BROKEN_JOBS} | {rule for rule, *_ in BROKEN_CLUSTERS} | ELSEWHERE
    assert tested == {rule.id for rule in RULES.values() if rule.when == "request"}


def test_the_rules_can_be_read_by_machines_and_name_their_source() -> None:
    listed = json.loads(as_json())
    assert len(listed) == len(RULES)
    assert all(rule["source"] and rule["what"] and rule["code"] for rule in listed)


def test_a_job_without_fault_is_taken_and_listed_by_its_tag(api: Api) -> None:
    new = name()
    status, body = api("PUT", f"/jobs/{new}", job(tags={f"of-{new}": "r"}))
    assert (status, body["properties"]["status"]) == (201, "NotStarted")
    assert body["id"].endswith(f"/jobs/{new}")
    assert [j["name"] for j in api("GET", f"/jobs?tag=of-{new}")[1]["value"]] == [new]


def test_lists_come_in_pages_with_the_newest_first(api: Api) -> None:
    tag = f"page-{uuid.uuid4().hex[:6]}"
    names = [name() for _ in range(7)]
    for new in names:
        assert api("PUT", f"/jobs/{new}", job(tags={tag: ""}))[0] == 201
    found: list[str] = []
    path, pages = f"/jobs?tag={tag}", 0
    while path:
        body = api("GET", path, version=pages == 0)[1]
        found += [j["name"] for j in body["value"]]
        path = body.get("nextLink", "").removeprefix(api.cloud.address)
        pages += 1
    assert found == names[::-1]
    assert pages == 3


@pytest.mark.parametrize("bad", ["-a", "a.b", "a" * 256, "Grüße", "a%20b"])
def test_names_of_jobs(api: Api, bad: str) -> None:
    from urllib.parse import quote

    assert refused(api("PUT", f"/jobs/{quote(bad, safe='%')}", job())) == "job-name"


def test_a_name_is_used_once_but_tags_may_change(api: Api) -> None:
    new = name()
    body = job()
    assert api("PUT", f"/jobs/{new}", body)[0] == 201
    assert api("PUT", f"/jobs/{new}", body)[0] == 200
    assert refused(api("PUT", f"/jobs/{new}", job(command="python other.py"))) == "job-exists"
    changed = api("PUT", f"/jobs/{new}", job(tags={"isthmus-run": "other"}))[1]
    assert changed["properties"]["tags"] == {"isthmus-run": "other"}
    assert [found["name"] for found in api.cloud.jobs()].count(new) == 1


def test_requests_without_version_token_or_with_anothers_place(api: Api) -> None:
    world = api.cloud.world
    assert refused(api("GET", "", version=False)) == "api-version"
    assert refused(api("GET", "", Authorization="Bearer nobody's")) == "token"
    assert refused(api("GET", "", Authorization="")) == "token"
    assert refused(api("GET", world.path.replace(world.subscription, "other"))) == "subscription"
    assert refused(api("GET", world.path.replace("workspaces/isthmus", "workspaces/other"))) == "workspace"
    assert refused(api("GET", "/jobs/none")) == "not-found"
    assert refused(api("GET", "/computes/none")) == "not-found"
    assert refused(api("GET", "/environments/train/versions/9")) == "not-found"
    assert refused(api("GET", "/schedules")) == "not-emulated"
    assert refused(api("PUT", f"/jobs/{name()}", raw=b"{")) == "body"
    # Azure compares paths without case.
    assert api("GET", world.path.lower())[0] == 200


def test_a_token_that_has_expired_is_refused_and_a_new_one_taken(api: Api) -> None:
    api.cloud.expire_tokens()
    assert refused(api("GET", "/jobs")) == "token"
    api.authorization = f"Bearer {api.token()}"
    assert api("GET", "/jobs")[0] == 200


def test_quota_of_a_family_and_of_the_low_priority_pool(api: Api) -> None:
    quota = api.cloud.quota
    try:
        quota[FAMILY] = 95
        assert refused(api("PUT", "/computes/new", cluster())) == "quota-family"
        quota["LowPriority"] = 95
        assert refused(api("PUT", "/computes/new", cluster(priority="LowPriority"))) == "quota-low-priority"
        region = f"/subscriptions/{api.cloud.world.subscription}/providers/Microsoft.MachineLearningServices/locations"
        listed = {u["name"]["value"]: u for u in api("GET", f"{region}/italynorth/usages")[1]["value"]}
        assert listed["Standard NDAMSv4_A100 Family Cluster Dedicated vCPUs"]["limit"] == 95
        assert listed["Total Cluster LowPriority Regional vCPUs"]["limit"] == 95
        sizes = {size["name"]: size for size in api("GET", f"{region}/italynorth/vmSizes")[1]["value"]}
        assert sizes[ND]["vCPUs"] == 96
        assert sizes[ND]["family"] == FAMILY
        assert "Standard_ND40rs_v2" not in sizes
    finally:
        del quota[FAMILY], quota["LowPriority"]


def test_a_machine_that_is_never_low_priority(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setitem(SKUS, ND.lower(), dataclasses.replace(SKUS[ND.lower()], low_priority=False))
    assert refused(api("PUT", "/computes/new", cluster(priority="LowPriority"))) == "compute-sku-low-priority"


def test_versions_of_environments_stay_as_they_are(api: Api) -> None:
    body = {"properties": {"image": "a@sha256:1"}}
    assert api("PUT", "/environments/e/versions/1", body)[0] == 201
    assert api("PUT", "/environments/e/versions/1", body)[0] == 200
    other = {"properties": {"image": "b@sha256:2"}}
    assert refused(api("PUT", "/environments/e/versions/1", other)) == "asset-immutable"
    assert refused(api("PUT", "/environments/e/versions/2", {"properties": {}})) == "environment-image"
    assert refused(api("PUT", "/environments/e!/versions/1", body)) == "asset-name"
    assert [v["name"] for v in api("GET", "/environments/e/versions")[1]["value"]] == ["1"]


def test_throttled_unavailable_and_broken_connections(api: Api) -> None:
    cloud = api.cloud
    cloud.fail_next("jobs.put", 429, retry_after=7)
    new = name()
    assert api("PUT", f"/jobs/{new}", job())[0] == 429
    assert new not in cloud.world.jobs
    cloud.fail_next("jobs.put", "drop-before")
    with pytest.raises(OSError):
        api("PUT", f"/jobs/{new}", job())
    assert new not in cloud.world.jobs
    cloud.fail_next("jobs.put", "drop-after")
    with pytest.raises(OSError):
        api("PUT", f"/jobs/{new}", job())
    assert new in cloud.world.jobs
    cloud.fail_next("jobs.*", 503, times=2)
    assert [api("GET", "/jobs")[0] for _ in range(3)] == [503, 503, 200]


def test_what_the_service_takes_is_taken(api: Api) -> None:
    """The forms of ids and URIs that clients write."""
    path = api.cloud.world.path
    uris = [
        "azureml://datastores/workspaceblobstore/paths/a/",
        f"azureml:/{path}/datastores/workspaceblobstore/paths/a/",
        "wasbs://data@devstoreaccount1.blob.core.windows.net/a",
        "abfss://data@devstoreaccount1.dfs.core.windows.net/a",
        "https://another.blob.core.windows.net/data/a",
    ]
    for uri in uris:
        assert api("PUT", f"/jobs/{name()}", job(inputs=inputs(uri=uri)))[0] == 201, uri
    by_id = job(environmentId=f"{path}/environments/train/versions/1", computeId=f"{path}/computes/two")
    assert api("PUT", f"/jobs/{name()}", by_id)[0] == 201
    curated = copy.deepcopy(by_id)
    curated["properties"]["environmentId"] = "azureml://registries/azureml/environments/acpt/versions/1"
    assert api("PUT", f"/jobs/{name()}", curated)[0] == 201
    user = serverless(
        identity={"identityType": "Managed", "clientId": "c"}, queueSettings={"jobTier": "Spot"}
    )
    assert api("PUT", f"/jobs/{name()}", user)[0] == 201


def test_durations() -> None:
    assert [seconds_of(text) for text in ("P1D", "PT1H30M", "P1DT1S", "PT0.5S")] == [86400, 5400, 86401, 0.5]
    assert [seconds_of(text) for text in ("", "P", "PT", "1D", 5, None)] == [None] * 6


def test_names_of_families_among_the_usages() -> None:
    assert usage_name(FAMILY) == "Standard NDAMSv4_A100 Family Cluster Dedicated vCPUs"


def test_a_folder_with_a_blank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsthmusError, match="blank"):
        AzureMLEmulator(tmp_path / "a b")


def test_another_process_asks_by_http(api: Api) -> None:
    new = name()
    assert api("PUT", f"/jobs/{new}", job())[0] == 201

    api.cloud.wait(new, "Queued", timeout=20)
    whole = api.cloud.address + "/emulator/state"
    data = json.dumps({"job": new}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(whole, data, method="POST"), context=api.context
    ) as answer:
        assert json.load(answer) == {"state": "Queued"}


def test_dedicated_nodes_are_not_taken_back(api: Api) -> None:
    new = name()
    assert api("PUT", f"/jobs/{new}", job())[0] == 201
    with pytest.raises(IsthmusError, match="dedicated"):
        api.cloud.evict(new)
    with pytest.raises(IsthmusError, match="no such job"):
        api.cloud.evict("nobody's")
