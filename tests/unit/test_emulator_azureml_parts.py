"""Parts of the emulated Azure ML: what a container is told, who gets nodes when, who gets a token."""

from __future__ import annotations

import time
from typing import Any

import pytest

from isthmus.emulators.azureml.allocation import allocate, release
from isthmus.emulators.azureml.checks_compute import cluster_of
from isthmus.emulators.azureml.container import Ports, environment, expand, log_name
from isthmus.emulators.azureml.identity import Identity, Tokens
from isthmus.emulators.azureml.places import asset, find_place, in_registry
from isthmus.emulators.azureml.rules import Refused
from isthmus.emulators.azureml.skus import SKUS
from isthmus.emulators.azureml.world import Job, World

PORTS = Ports(inputs={"data": "/in/data", "rate": "0.1"}, outputs={"out": "/out"})
ENDPOINT = "http://127.0.0.1:1/devstoreaccount1"


@pytest.fixture
def world() -> World:
    """A workspace with one cluster of four low-priority nodes."""
    made = World("s", "g", "w", "eastus")
    made.datastores["workspaceblobstore"] = "blobs"
    scale = {"minNodeCount": 0, "maxNodeCount": 4, "nodeIdleTimeBeforeScaleDown": "PT60S"}
    inner = {"vmSize": "Standard_DS3_v2", "vmPriority": "LowPriority", "scaleSettings": scale}
    body = {"properties": {"computeType": "AmlCompute", "properties": inner}}
    made.clusters["low"] = cluster_of("low", body, made)
    return made


def job(world: World, name: str, nodes: int, **properties: Any) -> Job:
    """A job that is queued on the cluster."""
    found = Job(name, properties, True, nodes, "low", SKUS["standard_ds3_v2"], number=len(world.jobs))
    found.status = "Queued"
    world.jobs[name] = found
    return found


def test_the_command_gets_paths_and_values() -> None:
    command = "t ${{inputs.data}} ${{ inputs.rate }} ${{inputs.data.path}} ${{inputs.data}}/a ${{outputs.out}} $RANK"
    assert expand(command, PORTS) == "t /in/data 0.1 /in/data /in/data/a /out $RANK"


def test_logs_are_numbered_by_rank_with_as_many_digits_as_the_last(world: World) -> None:
    pytorch = {"distributionType": "PyTorch", "processCountPerInstance": 8}
    assert log_name(job(world, "a", 2, distribution=pytorch), 3) == "user_logs/std_log_process_03.txt"
    assert log_name(job(world, "b", 2, distribution={"distributionType": "PyTorch"}), 1) == (
        "user_logs/std_log_process_1.txt"
    )
    assert log_name(job(world, "c", 1), 0) == "user_logs/std_log.txt"


def test_what_a_process_is_told(world: World) -> None:
    made = job(world, "a", 2, distribution={"distributionType": "PyTorch", "processCountPerInstance": 8})
    hosts = ["10.0.0.4", "10.0.0.5"]
    found = environment(
        world, made, node=1, local_rank=2, master=("10.0.0.4", 6105), hosts=hosts, ports=PORTS
    )
    wanted = {
        "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "WORLD_SIZE": "16", "RANK": "10", "LOCAL_RANK": "2",
        "NODE_RANK": "1", "AZUREML_NODE_COUNT": "2", "AZUREML_RUN_ID": "a", "AZ_BATCH_MASTER_NODE": "10.0.0.4:6105",
        "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4", "AZURE_ML_INPUT_data": "/in/data", "AZURE_ML_OUTPUT_out": "/out",
    }  # fmt: skip
    assert found.items() >= wanted.items()
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("azureml://datastores/workspaceblobstore/paths/a/b/", ("blobs", "a/b")),
        (
            "azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/workspaceblobstore/paths/a",
            ("blobs", "a"),
        ),
        ("https://devstoreaccount1.blob.core.windows.net/c/a%20b/", ("c", "a b")),
        ("wasbs://c@devstoreaccount1.blob.core.windows.net/a/", ("c", "a")),
        ("abfss://c@devstoreaccount1.dfs.core.windows.net/a", ("c", "a")),
        (f"{ENDPOINT}/c/a", ("c", "a")),
        ("https://other.blob.core.windows.net/c/a", None),
        ("azureml:mine:2", ("blobs", "of/mine")),
        ("azureml:mine@latest", ("blobs", "of/mine")),
    ],
)
def test_where_uris_point(world: World, uri: str, place: tuple[str, str] | None) -> None:
    world.data["mine", "2"] = {
        "properties": {"dataUri": "azureml://datastores/workspaceblobstore/paths/of/mine"}
    }
    assert find_place(uri, world, endpoint=ENDPOINT, rule="job-input") == place


def test_ids_of_assets() -> None:
    assert asset("azureml:train:3", "environments") == ("train", "3")
    assert asset("azureml:train", "environments") == ("train", None)
    assert asset("azureml:train@latest", "environments") == ("train", "@latest")
    assert asset("/subscriptions/s/x/environments/train/versions/3", "environments") == ("train", "3")
    assert asset("/subscriptions/s/x/codes/train/versions/3", "environments") is None
    assert in_registry("azureml://registries/azureml/environments/acpt/versions/9") == "acpt:9"
    assert in_registry("azureml:train:3") is None


def test_nodes_in_the_order_of_submission(world: World) -> None:
    first, second, third = job(world, "a", 3), job(world, "b", 3), job(world, "c", 1)
    assert allocate(world, first) == 1.0
    first.status = "Running"
    # The third would fit, but the second has waited longer.
    assert allocate(world, third) is None
    assert allocate(world, second) is None
    release(world, first, taken=2)
    first.status = "Failed"
    assert world.clusters["low"].idle == 1
    assert allocate(world, second) == 1.0
    second.status = "Running"
    assert allocate(world, third) == 1.0
    assert world.clusters["low"].up == 4


def test_idle_nodes_come_at_once_and_go_after_their_time(world: World) -> None:
    first, second = job(world, "a", 2), job(world, "b", 2)
    assert allocate(world, first) == 1.0
    first.status = "Completed"
    release(world, first)
    assert allocate(world, second) == 0.0
    release(world, second)
    cluster = world.clusters["low"]
    cluster.idle_since = time.monotonic() - 61
    cluster.scale_down()
    assert cluster.up == 0


def test_quota_and_capacity_keep_a_job_queued_and_say_so(world: World) -> None:
    waiting, cluster = job(world, "a", 2), world.clusters["low"]
    world.quota["LowPriority"] = 7
    assert allocate(world, waiting) is None
    assert cluster.errors[0]["error"]["code"] == "ClusterCoreQuotaReached"
    world.quota["LowPriority"] = 8
    world.capacity["Standard_DS3_v2"] = 1
    assert allocate(world, waiting) is None
    assert cluster.errors[0]["error"]["code"] == "AllocationFailed"
    world.capacity["Standard_DS3_v2"] = 2
    assert allocate(world, waiting) == 1.0
    assert cluster.errors == []


def test_a_user_assigned_identity_must_be_named() -> None:
    tokens = Tokens()
    secret = tokens.register(Identity("x", any_client_id=True, needs_client_id=True))
    assert tokens.token(secret, "https://storage.azure.com", None)[0] == 400
    status, body = tokens.token(secret, "https://storage.azure.com", "c")
    assert status == 200
    assert tokens.why_not(f"Bearer {body['access_token']}") is None
    tokens.expire_all()
    assert "expiry" in str(tokens.why_not(f"Bearer {body['access_token']}"))
    tokens.forget(secret)
    assert tokens.token(secret, "https://storage.azure.com", "c")[0] == 401


def test_an_unknown_client_id_gets_no_token() -> None:
    tokens = Tokens()
    secret = tokens.register(Identity("system"))
    assert tokens.token(secret, "r", "other")[0] == 400
    assert tokens.token(secret, "r", None)[0] == 200


def test_a_data_asset_that_is_not_there(world: World) -> None:
    with pytest.raises(Refused, match="data asset none"):
        find_place("azureml:none:1", world, endpoint=ENDPOINT, rule="job-input")
