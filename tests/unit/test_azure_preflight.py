"""The questions that the preflight asks Azure, and what it makes of each answer. Through the real SDK, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.ai.ml", reason="pip install 'isthmus[azure]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from azure.core import exceptions
from azure.core.credentials import AccessToken
from azure_jobs import az, make_job, offer
from azure_wire import WORKSPACE, Answer, Credential, Request, Wire, client_on

from isthmus.backends.azure import preflight as preflights
from isthmus.backends.azure.client import AzureClient
from isthmus.backends.azure.preflight import family_key, preflight
from isthmus.backends.spec import Finding

BASE = "https://northern.example.com"
BIG = "Standard_ND96amsr_A100_v4"


class Azure:
    """Answers that are all right until a test changes them."""

    def __init__(self) -> None:
        self.location = "italynorth"
        self.cluster: dict[str, Any] | None = self.a_cluster()
        self.sizes = [
            {"name": BIG, "family": "standardNDAMSv4_A100Family", "vCPUs": 96, "lowPriorityCapable": True}
        ]
        self.usages = [
            self.usage("Standard NDAMSv4_A100Family Cluster Dedicated vCPUs", 1536, 0),
            self.usage("Standard D Family Cluster Dedicated vCPUs", 0, 0),
            self.usage("Total Cluster Dedicated Regional vCPUs", 5000, 0),
            self.usage("Total Cluster LowPriority Regional vCPUs", 1536, 0),
        ]
        self.environments = True
        self.accounts = [{"name": "exampleaccount", "location": "italynorth"}]
        self.refusals: dict[str, Answer | Exception] = {}

    @staticmethod
    def a_cluster(**more: Any) -> dict[str, Any]:
        scale = {"minNodeCount": 0, "maxNodeCount": 16, "nodeIdleTimeBeforeScaleDown": "PT600S"} | more.pop(
            "scale", {}
        )
        return {
            "vmSize": BIG.upper(),
            "vmPriority": "Dedicated",
            "scaleSettings": scale,
            "provisioningState": "Succeeded",
            **more,
        }

    @staticmethod
    def usage(name: str, limit: int, used: int) -> dict[str, Any]:
        return {
            "id": "/u",
            "unit": "Count",
            "limit": limit,
            "currentValue": used,
            "name": {"value": name, "localizedValue": name},
        }

    def __call__(self, request: Request) -> Answer | Exception | None:
        for part, refusal in self.refusals.items():
            if part in request.path:
                return refusal
        path = request.path
        if path.endswith("/workspaces/images"):
            return Answer(
                200,
                {
                    "id": path,
                    "name": "images",
                    "location": self.location,
                    "properties": {"discoveryUrl": f"{BASE}/discovery"},
                },
            )
        if path == "/discovery":
            return Answer(200, {"history": BASE})
        if "/computes/" in path and self.cluster is not None:
            properties = {
                "computeType": "AmlCompute",
                "provisioningState": self.cluster["provisioningState"],
                "properties": self.cluster,
            }
            return Answer(
                200,
                {
                    "id": path,
                    "name": path.rpartition("/")[2],
                    "location": "italynorth",
                    "properties": properties,
                },
            )
        if path.endswith("/usages"):
            return Answer(200, {"value": self.usages})
        if path.endswith("/vmSizes"):
            return Answer(200, {"value": self.sizes})
        if "/environments/" in path and self.environments:
            return Answer(
                200,
                {
                    "id": f"{WORKSPACE.arm_id}/environments/e/versions/1",
                    "name": "1",
                    "properties": {"image": "x", "osType": "Linux"},
                },
            )
        if path.endswith("/storageAccounts"):
            return Answer(200, {"value": self.accounts})
        return None


@pytest.fixture
def azure() -> Azure:
    return Azure()


@pytest.fixture(autouse=True)
def no_waiting_and_no_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's retries wait; containers are looked at for real in tests/conformance/test_azure.py."""
    monkeypatch.setattr("time.sleep", lambda *_: None)
    monkeypatch.setattr(preflights, "_containers", lambda job: iter(()))


def ask(azure: Azure, *words: str, tier: str = "on_demand", **more: Any) -> dict[str, Finding]:
    """The findings for a job of 16 x 8 A100-80GB, by rule."""
    job = make_job(*words, recipe="sdxl-progressive", offer=offer(tier), **more)
    found = preflight(job, lambda workspace: client_on(Wire(azure), workspace))
    assert all("\n" not in finding.message for finding in found)
    return {finding.id: finding for finding in found}


def test_when_all_is_well_it_has_nothing_to_say(azure: Azure) -> None:
    assert ask(azure) == {}


def test_the_case_study_on_low_priority(azure: Azure) -> None:
    azure.cluster = azure.a_cluster(vmPriority="LowPriority")
    assert ask(azure, tier="spot") == {}
    azure.usages[-1] = azure.usage("Total Cluster LowPriority Regional vCPUs", 960, 0)
    found = ask(azure, tier="spot")["azure.quota"]
    assert "16 x Standard_ND96amsr_A100_v4 need 1536 low priority vCPUs" in found.message
    assert "is 960" in found.message


@pytest.mark.parametrize("limit", [0, 1535])
def test_quota_of_the_exact_family(azure: Azure, limit: int) -> None:
    azure.usages[0] = azure.usage("Standard NDAMSv4_A100Family Cluster Dedicated vCPUs", limit, 0)
    found = ask(azure)["azure.quota"]
    assert (found.level, found.exit_code) == ("error", 3)
    assert f"is {limit}" in found.message


def test_quota_in_use_may_be_our_own_idle_nodes(azure: Azure) -> None:
    azure.usages[0] = azure.usage("standardNDAMSv4_A100Family", 1536, 1000)
    found = ask(azure)["azure.quota"]
    assert found.level == "warning"
    assert "1000 of 1536 are in use" in found.message


def test_quota_that_nobody_lists(azure: Azure) -> None:
    azure.usages = []
    assert ask(azure)["azure.quota-unknown"].level == "warning"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("standardNDAMSv4_A100Family", "ndamsv4a100"),
        ("Standard NDAMSv4_A100Family Cluster Dedicated vCPUs", "ndamsv4a100"),
        ("StandardNCADSA100v4Family", "ncadsa100v4"),
        ("Standard NCADSA100v4 Family Cluster Dedicated vCPUs", "ncadsa100v4"),
    ],
)
def test_a_familys_names(name: str, key: str) -> None:
    assert family_key(name) == key


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (None, "there is no cluster nd-a100"),
        (Azure.a_cluster(vmSize="STANDARD_ND96ASR_V4"), "has STANDARD_ND96ASR_V4, the recipe needs"),
        (Azure.a_cluster(vmPriority="LowPriority"), "is low priority, the offer is dedicated"),
        (Azure.a_cluster(scale={"maxNodeCount": 8}), "grows to 8 nodes, the recipe needs 16"),
        (Azure.a_cluster(provisioningState="Failed"), "is failed"),
    ],
)
def test_clusters_that_do_not_fit(azure: Azure, cluster: Any, message: str) -> None:
    azure.cluster = cluster
    assert message in ask(azure)["azure.cluster"].message


def test_a_missing_cluster_that_may_be_created(azure: Azure) -> None:
    azure.cluster = None
    assert ask(azure, *az(cluster={"create": True})) == {}


def test_a_cluster_that_costs_when_idle(azure: Azure) -> None:
    azure.cluster = azure.a_cluster(scale={"minNodeCount": 2})
    assert ask(azure)["azure.cluster-minimum"].level == "warning"


def test_a_region_without_the_machine_or_the_tier(azure: Azure) -> None:
    azure.sizes[0]["lowPriorityCapable"] = False
    azure.cluster = azure.a_cluster(vmPriority="LowPriority")
    assert "dedicated only" in ask(azure, tier="spot")["azure.region-sku"].message
    azure.sizes = []
    assert "offers Azure ML no Standard_ND96amsr_A100_v4" in ask(azure)["azure.region-sku"].message


def test_serverless_in_the_wrong_region(azure: Azure) -> None:
    azure.location = "westeurope"
    found = ask(azure, *az(compute="serverless"), without=("spot_compute",))
    assert "is in westeurope, the settings say italynorth" in found["azure.workspace-region"].message


def test_storage_in_another_region(azure: Azure) -> None:
    azure.accounts[0]["location"] = "West Europe"
    assert "exampleaccount is in westeurope" in ask(azure)["azure.storage-region"].message


def test_a_registered_environment_that_is_not_there(azure: Azure) -> None:
    azure.environments = False
    found = ask(azure, *az(environment={"registered": "acpt-train:7"}), without=("environment",))
    assert "no environment acpt-train:7" in found["azure.environment"].message


def refused(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"error": {"code": code, "message": message}})


@pytest.mark.parametrize(
    ("refusal", "rule", "message"),
    [
        (
            refused(401, "InvalidAuthenticationToken", "The access token is invalid"),
            "azure.login",
            "does not accept",
        ),
        (refused(403, "AuthorizationFailed", "no read"), "azure.workspace", "no permission"),
        (refused(404, "ResourceNotFound", "no such workspace"), "azure.workspace", "no such workspace"),
        (refused(429, "TooManyRequests", "slow down"), "azure.unanswered", "fewer requests"),
        (
            exceptions.ServiceRequestError("Name or service not known"),
            "azure.unanswered",
            "connection failed",
        ),
    ],
)
def test_without_a_workspace_nothing_else_is_asked(
    azure: Azure, refusal: Any, rule: str, message: str
) -> None:
    azure.refusals["/workspaces/images"] = refusal
    (found,) = ask(azure).values()
    assert (found.id, found.level) == (rule, "error")
    assert message in found.message


class NoLogin(Credential):
    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        raise exceptions.ClientAuthenticationError("failed to retrieve a token from the included credentials")


def test_nobody_is_logged_in() -> None:
    job = make_job(recipe="sdxl-progressive")
    (found,) = preflight(
        job, lambda workspace: AzureClient(workspace, credential=NoLogin(), transport=Wire())
    )
    assert (found.id, found.level, found.exit_code) == ("azure.login", "error", 3)
    assert "az login" in str(found.fix)


@pytest.mark.parametrize("part", ["/computes/", "/usages", "/vmSizes", "/storageAccounts"])
def test_a_question_that_may_not_be_asked_refuses_nothing(azure: Azure, part: str) -> None:
    azure.refusals[part] = refused(403, "AuthorizationFailed", "no read")
    found = ask(azure)
    assert [finding.level for finding in found.values()] == ["warning"]
    assert set(found) == {"azure.unanswered"}
