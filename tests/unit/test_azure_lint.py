"""Each rule of Azure ML is tripped by a recipe, and not by one that keeps it; each finding comes from a rule."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from azure_jobs import ACCOUNT, IDENTITY, IMAGE, az, make_job, offer

from isthmus.backends.azure import body, egress, rules, skus
from isthmus.backends.azure.backend import AzureBackend
from isthmus.backends.azure.regions import REGIONS
from isthmus.backends.azure.render import render
from isthmus.backends.spec import Finding, Job
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.cost import regions as cost_regions
from isthmus.errors import RecipeError, UsageError

ONLINE = {
    "azure.login", "azure.workspace", "azure.workspace-region", "azure.cluster", "azure.cluster-minimum", "azure.region-sku",
    "azure.quota", "azure.quota-unknown", "azure.environment", "azure.storage-region", "azure.storage", "azure.unanswered",
}  # fmt: skip
"""Of the preflight: test_azure_preflight.py."""


@dataclass
class Case:
    """Overrides that trip a rule, and ones that nearly do."""

    id: str
    trips: list[str]
    keeps: list[str] = field(default_factory=list)
    offer_trips: Any = None
    offer_keeps: Any = None
    without: tuple[str, ...] = ()
    recipe: str = "sdxl-progressive"

    def job(self, words: list[str], wanted: Any) -> Job:
        return make_job(*words, recipe=self.recipe, offer=wanted, without=self.without)


SPOT, DEDICATED = offer("spot"), offer("on_demand")
BIG = [
    "compute.gpu=a100-80gb", "data.lanes=1024", "data.shuffle_window=1024", "stages.0.global_batch_size=1024", "stages.0.micro_batch_size=1",
]  # fmt: skip
CASES = [
    Case("azure.sku-gpu", az(sku="Standard_ND96asr_v4"), az(sku="Standard_ND96amsr_A100_v4")),
    Case("azure.image-tag", az(environment={"image": "registry.example.com/train:latest"})),
    Case("azure.image-build", az(environment={"build": {"path": "docker"}})),
    Case("azure.region-unknown", [], az(region="italynorth"), without=("region",)),
    Case("azure.region-name", az(region="italinorth"), az(region="italynorth")),
    Case("azure.region-other", [], az(regions={"westeurope": {"workspace": "west"}}),
         offer_trips=offer("on_demand", region="westeurope"), offer_keeps=offer("on_demand", region="westeurope")),
    Case("azure.fabric-nodes", [*BIG, "compute.gpus_per_node=8", "compute.nodes=128"],
         [*BIG, "compute.gpus_per_node=8", "compute.nodes=64"], recipe="quickstart"),
    Case("azure.no-fabric", [*BIG, "compute.gpus_per_node=4", "compute.nodes=4"],
         [*BIG, "compute.gpus_per_node=4", "compute.nodes=1"], recipe="quickstart"),
    Case("azure.memlock", az(memlock=False), az(memlock=True)),
    Case("azure.shm-memory", az(shm_size="3 TB"), az(shm_size="256 GB")),
    Case("azure.docker-args", az(docker_args=["--shm-size=64g"]), az(docker_args=["--cap-add=IPC_LOCK"])),
    Case("azure.mscclpp-image", az(mscclpp={"library": "/l.so", "nccl": "/n.so"},
         environment={"image": "mcr.microsoft.com/aifx/acpt/x@sha256:" + "0" * 64}),
         az(mscclpp={"library": "/l.so", "nccl": "/n.so"})),
    Case("azure.mscclpp", az(mscclpp={"library": "/l.so", "nccl": "/n.so"})),
    Case("azure.identity-serverless", az(compute="serverless"), az(compute="serverless", client_id=IDENTITY),
         without=("spot_compute",)),
    Case("azure.identity-user", az(identity="user"), az(identity="managed")),
    Case("azure.timeout-maximum", az(timeout="22 d"), az(timeout="21 d"), DEDICATED, DEDICATED),
    Case("azure.timeout-low-priority", az(timeout="8 d"), az(timeout="7 d"), SPOT, SPOT),
    Case("azure.timeout-budget", ["budget={max_hours: 600}"], ["budget={max_hours: 400}"]),
    Case("azure.tier-cluster", [], az(spot_compute="low"), SPOT, SPOT, without=("spot_compute",)),
    Case("azure.spot-restarts", ["compute.max_restarts=0"], ["compute.max_restarts=1"], SPOT, SPOT),
    Case("azure.grace-spot", az(grace="2 min"), az(grace="30 s"), SPOT, SPOT),
    Case("azure.tag-reserved", az(tags={"isthmus-run": "x"}), az(tags={"team": "x"})),
    Case("azure.variable-reserved", az(environment_variables={"NODE_RANK": "0"}), az(environment_variables={"A": "0"})),
    Case("azure.variable-text", az(environment_variables={"A": True}), az(environment_variables={"A": "true"})),
    Case("azure.variable-expression", az(environment_variables={"A": "${{outputs.x}}"}), az(environment_variables={"A": "$X"})),
    Case("azure.tensorboard", az(tensorboard={}), [*az(tensorboard={}), "trackers=[tensorboard]"]),
    Case("azure.run-directory", ["run_directory=/tmp/runs"], [f"run_directory=az://runs@{ACCOUNT}/x"]),
    Case("azure.data-place", ["data.sources.0.uri=./data"], [f"data.sources.0.uri=az://latents@{ACCOUNT}/x"]),
    Case("azure.data-wasbs", ["data.sources.0.uri=wasbs://c@a.blob.core.windows.net/x"]),
    Case("azure.data-other-cloud", ["data.sources.0.uri=s3://bucket/x", "data.access=stream"], ["data.access=stream"]),
    Case("azure.mount-cache", az(mount={"cache": "8 TB"}), az(mount={"cache": "6 TB"})),
    Case("azure.mount-unbounded", az(environment_variables={"DATASET_MOUNT_CACHE_SIZE": "-1"}),
         az(environment_variables={"DATASET_MOUNT_CACHE_SIZE": "100 GB"})),
    Case("azure.download-start", ["data.access=download"], ["data.access=mount"]),
    Case("azure.egress", [], az(storage_egress_gbps=300), recipe="sd3-medium"),
    Case("azure.egress-tight", az(storage_egress_gbps=150), az(storage_egress_gbps=300), recipe="sd3-medium"),
    Case("azure.ethernet", [], recipe="sd3-medium"),
    Case("azure.settings", [], az(workspace="w"), without=("workspace",)),
]  # fmt: skip


def ids(job: Job) -> dict[str, Finding]:
    """The findings by their rules."""
    return {finding.id: finding for finding in AzureBackend().lint(job)}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.id != "azure.ethernet"], ids=lambda case: case.id
)
def test_a_rule_is_tripped_and_kept(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "Dockerfile").write_text("FROM scratch\n")
    found = ids(case.job(case.trips, case.offer_trips))
    assert case.id in found, sorted(found)
    assert "\n" not in found[case.id].message
    assert found[case.id].fix
    keeps = case.keeps or az(environment={"image": IMAGE})
    assert case.id not in ids(case.job(keeps, case.offer_keeps))


def test_every_rule_has_a_case() -> None:
    tested = {case.id for case in CASES} | ONLINE | {rule.id for rule in body.RULES}
    assert {rule.id for rule in rules.RULES} == tested
    assert len({rule.id for rule in rules.RULES}) == len(rules.RULES)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.id)
def test_a_rule_says_what_why_and_what_to_do(rule: Any) -> None:
    assert rule.id.startswith("azure.")
    assert all(text and "\n" not in text for text in (rule.title, rule.why, rule.fix))


def test_findings_are_of_rules() -> None:
    known = {rule.id: rule for rule in rules.RULES}
    for case in CASES:
        for finding in AzureBackend().lint(
            case.job(case.trips if case.id != "azure.image-build" else [], None)
        ):
            assert finding.id in known
            assert finding.level in ("error", known[finding.id].level)


# -- egress


def test_the_case_studys_storage_arithmetic() -> None:
    """120 GB/s at 24 Gb/s a machine need 40 machines, and 20 accounts of a region that is not listed."""
    machine = skus.find("Standard_ND96amsr_A100_v4")
    assert machine is not None
    assert 120e9 / egress.ethernet(machine) == 40
    assert 120e9 / egress.account_limit("italynorth", None) == pytest.approx(19.2)
    assert 120e9 / egress.account_limit("westeurope", None) == pytest.approx(4.8)
    assert (machine.infiniband_gbps / 8, machine.ethernet_gbps / 8) == (200, 3)


def test_the_need_is_images_times_bytes_over_the_accounts() -> None:
    roots = [f"az://latents@account{n}.blob.core.windows.net/a" for n in range(4)]
    job = make_job(f"data.sources.0.uri={json.dumps(roots)}", recipe="sd3-medium")
    need = egress.need(job.recipe)
    assert need is not None
    recipe = job.recipe
    text = sum(2 * (one.max_tokens * one.width + (one.pooled_width or 0)) for one in recipe.encoders.text)
    side = recipe.stages[0].resolution // recipe.encoders.autoencoder.factor
    assert need.bytes_per_image == 4 * recipe.encoders.autoencoder.latent_channels * side**2 + text
    assert need.total == pytest.approx(need.images_per_s * need.bytes_per_image)
    assert need.accounts == {f"account{n}": pytest.approx(need.total / 4) for n in range(4)}
    assert need.node_bytes_per_s * recipe.compute.nodes == pytest.approx(need.total)
    assert need.total < egress.UTILIZATION * PEAK_FLOPS[recipe.compute.gpu] * 1e9


def test_spread_over_accounts_a_recipe_passes() -> None:
    roots = [f"az://latents@account{n}.blob.core.windows.net/a" for n in range(4)]
    spread = f"data.sources.0.uri={json.dumps(roots)}"
    found = ids(make_job(recipe="sd3-medium"))["azure.egress"]
    assert "4 accounts would do" in found.message
    assert "azure.egress" not in ids(make_job(spread, recipe="sd3-medium"))


def test_more_than_a_nodes_ethernet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "azure.ethernet" not in ids(make_job(recipe="sd3-medium"))
    monkeypatch.setattr(egress, "UTILIZATION", 3.0)
    found = ids(make_job(recipe="sd3-medium"))["azure.ethernet"]
    assert "nodes" in found.message


# -- the body


def a_body() -> dict[str, Any]:
    """A rendered one, to be broken."""
    made: dict[str, Any] = json.loads(json.dumps(render(make_job("data.access=mount")).request))
    return made


BROKEN = [
    ("azure.instance-count", lambda p: p["resources"].update(instanceCount=-1)),
    ("azure.shm-size", lambda p: p["resources"].update(shmSize="lots")),
    ("azure.environment-version", lambda p: p.update(environmentId="azureml:e")),
    ("azure.input-unused", lambda p: p["inputs"].update(spare=dict(p["inputs"]["data0"]))),
    ("azure.input-unknown", lambda p: p["inputs"].pop("data0")),
    ("azure.timeout-zero", lambda p: p["limits"].update(timeout="PT0S")),
    ("azure.wasbs", lambda p: p["inputs"]["data0"].update(uri="wasbs://c@a.blob.core.windows.net/x")),
    ("azure.expression-in-environment", lambda p: p["environmentVariables"].update(A="${{outputs.x}}/y")),
    ("azure.environment-value", lambda p: p["environmentVariables"].update(A=True)),
    ("azure.one-launcher", lambda p: p["distribution"].update(processCountPerInstance=8)),
    ("azure.body-shape", lambda p: p.update(timeout=3)),
    ("azure.body-shape", lambda p: p["distribution"].update(distributionType="fsdp")),
    ("azure.body-shape", lambda p: p["inputs"]["data0"].update(mode="fast_file")),
    ("azure.body-shape", lambda p: p["resources"].update(instanceCount="two")),
    ("azure.body-shape", lambda p: p.update(queueSettings={"jobTier": "Cheap"})),
    ("azure.body-shape", lambda p: p.pop("command")),
    ("azure.body-shape", lambda p: p.pop("environmentId")),
    ("azure.body-shape", lambda p: p.update(inputs=[])),
]


@pytest.mark.parametrize(
    ("rule", "breaks"), BROKEN, ids=[f"{rule}-{n}" for n, (rule, _) in enumerate(BROKEN)]
)
def test_what_the_sdk_lets_pass_is_found_in_a_body(rule: str, breaks: Any) -> None:
    whole = a_body()
    assert body.check_body(whole) == []
    breaks(whole["properties"])
    assert rule in {finding.id for finding in body.check_body(whole)}


def test_every_rule_of_the_body_is_tripped() -> None:
    assert {rule for rule, _ in BROKEN} == {rule.id for rule in body.RULES}
    assert body.check_body({})[0].id == "azure.body-shape"


# -- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wurkspace": "x"}, "did you mean `workspace`?"),
        ({"subscription": "mine"}, "subscription"),
        ({"compute": "x" * 33}, "compute"),
        ({"shm_size": "lots"}, "a size such as"),
        ({"timeout": 0}, "a duration above zero"),
        ({"timeout": -5}, "a duration above zero"),
        ({"tier": "cheap"}, "low_priority"),
        ({"environment_variables": {"A": [1]}}, "a text, a number, true or false"),
        ({"environment_variables": {"A B": "x"}}, "A B"),
        ({"tags": {"a": "two\nlines"}}, "tags"),
        ({"client_id": "x"}, "client_id"),
        ({"storage_account": "Not_One"}, "storage_account"),
        ({"mount": {"cache": "-1"}}, "a size such as"),
        ({"cluster": {"max_nodes": 0}}, "max_nodes"),
        ({"sku": "p4d.24xlarge"}, "sku"),
    ],
)
def test_bad_settings_name_the_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_job(*az(**settings))
    assert message in str(caught.value)
    assert "backends.azure" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": {"registered": "acpt-train"}}, "names no version"),
        ({"environment": {"registered": "azureml:e"}}, "names no version"),
        ({"environment": {"registered": "e:latest"}}, "names no version"),
        ({"environment": {}}, "no image is named"),
        ({"environment": {"image": IMAGE, "registered": "e:1"}}, "exclude each other"),
        ({"environment": {"build": {"path": "nowhere"}}}, "no Dockerfile"),
        ({"sku": "Standard_ND96amsr_A100_v5"}, "did you mean Standard_ND96amsr_A100_v4?"),
    ],
)
def test_settings_that_do_not_suffice(settings: dict[str, Any], message: str) -> None:
    job = make_job(*az(**settings))
    with pytest.raises(UsageError) as caught:
        render(job)
    assert message in str(caught.value)
    errors = [finding for finding in AzureBackend().lint(job) if finding.level == "error"]
    assert message in errors[0].message + str(errors[0].fix)


THREE = [
    "compute.gpu=a100-80gb",
    "data.lanes=48",
    "stages.0.global_batch_size=48",
    "stages.0.micro_batch_size=1",
]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compute.gpu=b200-180gb", "compute.gpus_per_node=8"], "no machine with 8 x b200-180gb"),
        (["compute.gpus_per_node=3"], "by 1 or 2 or 4 or 8"),
    ],
)
def test_gpus_that_azure_does_not_have(words: list[str], message: str) -> None:
    errors = [
        finding for finding in AzureBackend().lint(make_job(*THREE, *words)) if finding.level == "error"
    ]
    assert message in errors[0].message + str(errors[0].fix)


def test_the_launchers_environment_names_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "AZURE_SUBSCRIPTION_ID": "00000000-0000-0000-0000-000000000002",
        "AZUREML_RESOURCE_GROUP": "g",
        "AZUREML_WORKSPACE": "w",
    }
    for name in names:
        monkeypatch.delenv(name, raising=False)
    without = ("subscription", "resource_group", "workspace")
    assert "azure.settings" in ids(make_job(without=without))
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    native = render(make_job(without=without)).native
    assert (native["resource_group"], native["workspace"]) == ("g", "w")


def test_offers() -> None:
    found = AzureBackend().offers(make_job(recipe="sdxl-progressive"))
    assert [(offer.sku, offer.region, offer.tier, offer.nodes) for offer in found] == [
        ("Standard_ND96amsr_A100_v4", "italynorth", "spot", 16),
        ("Standard_ND96amsr_A100_v4", "italynorth", "on_demand", 16),
    ]
    (one,) = AzureBackend().offers(make_job())
    assert (one.sku, one.tier) == ("Standard_D4ds_v5", "on_demand")


def test_a_misspelt_region_is_told_with_the_right_one_wherever_it_stands() -> None:
    assert set(cost_regions.REGIONS["azure"]) == REGIONS
    for words, wanted in (
        (az(region="italynoth"), None),
        (az(regions={"italinorth": {"workspace": "w"}}), None),
        ([], offer("on_demand", region="italynort")),
    ):
        finding = ids(make_job(*words, offer=wanted))["azure.region-name"]
        assert finding.level == "warning"
        assert finding.message.endswith("(did you mean italynorth?)")
    assert (
        ids(make_job(*az(region="middleearth")))["azure.region-name"].message
        == "Azure has no region middleearth"
    )
