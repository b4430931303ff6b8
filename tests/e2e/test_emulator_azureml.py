"""The real azure-ai-ml client drives the emulated Azure ML, and the jobs really run.

Importing azure.ai.ml takes 3.5 s: all that needs it, and is not slow, is in this file.
"""

# ruff: noqa: F811 -- fixtures are imported, and are parameters of the same names
from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from azureml_cloud import (  # noqa: F401  fixtures
    DEFY,
    MEET,
    OBEY,
    await_log,
    client,
    cloud,
    environment,
    log,
    ml,
    submit,
)

from isthmus.emulators.azureml import AzureMLEmulator


def test_two_nodes_from_a_cluster_to_their_logs(cloud: AzureMLEmulator, ml: Any, tmp_path: Path) -> None:
    import requests
    from azure.ai.ml import Input, Output
    from azure.ai.ml.entities import AmlCompute, Environment, IdentityConfiguration

    made = ml.compute.begin_create_or_update(
        AmlCompute(
            name="two",
            size="Standard_DS3_v2",
            tier="dedicated",
            min_instances=0,
            max_instances=2,
            idle_time_before_scale_down=600,
            identity=IdentityConfiguration(type="system_assigned"),
        )
    ).result()
    assert (made.name, made.size.lower(), made.max_instances) == ("two", "standard_ds3_v2", 2)
    ml.environments.create_or_update(Environment(name="mine", version="3", image="team/mine@sha256:1"))
    assert ml.environments.get("mine", "3").image == "team/mine@sha256:1"
    code = tmp_path / "code"
    code.mkdir()
    (code / "meet.py").write_text(MEET)
    place = "https://devstoreaccount1.blob.core.windows.net/data/a/"
    done = submit(
        ml,
        "meeting",
        "python3 meet.py ${{inputs.data}} ${{inputs.copy}} ${{outputs.out}} && echo $GREETING",
        nodes=2,
        code=str(code),
        compute="two",
        environment="mine:3",
        environment_variables={"GREETING": "grüße"},
        inputs={
            "data": Input(type="uri_folder", mode="ro_mount", path=place),
            "copy": Input(type="uri_folder", mode="download", path=place),
        },
        outputs={
            "out": Output(
                type="uri_folder", mode="upload", path="azureml://datastores/workspaceblobstore/paths/o/"
            )
        },
    )
    assert done.status in ("NotStarted", "Starting", "Queued", "Preparing")
    assert cloud.wait("meeting") == "Completed", cloud.job("meeting").error
    states = [state for _, state in cloud.job("meeting").history]
    assert states == ["Queued", "Preparing", "Running", "Finalizing", "Completed"]
    said = [log(cloud, "meeting", node) for node in (0, 1)]
    assert "met rank 1 of 2" in said[0]
    for text in said:
        assert "mounted hello\ncopied hello\n" in text
        assert text.endswith("grüße\n")
        if not cloud.job("meeting").warnings:
            assert "read-only" in text
    if cloud.privileges == "namespaces":
        # A node's folders have the same names on every node.
        assert len({line for text in said for line in text.splitlines() if line.startswith("here")}) == 1
    store = cloud.blobs.container(cloud.world.datastores["workspaceblobstore"])
    assert sorted(store.list_blob_names(name_starts_with="o/")) == ["o/of-0", "o/of-1"]
    assert ml.jobs.get("meeting").status == "Completed"
    assert [node.__dict__["nodeState"] for node in ml.compute.list_nodes("two")] == ["idle", "idle"]
    # The run's history names a log per node, at addresses that honour ranges and need no token.
    details = ml.jobs._runs_operations.get_run_details("meeting")
    assert sorted(details.log_files) == [f"user_logs/std_log_process_{node}.txt" for node in (0, 1)]
    url = details.log_files["user_logs/std_log_process_0.txt"]
    part = requests.get(url, headers={"Range": "bytes=4-7"}, timeout=10)
    assert (part.status_code, part.content) == (206, said[0].encode()[4:8])


def test_the_client_streams_and_code_is_uploaded_once(
    cloud: AzureMLEmulator, ml: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.txt").write_text("once")
    before = uploads(cloud)
    for name in ("streamed", "again"):
        submit(ml, name, "cat code.txt; sleep 1", code=str(tmp_path))
    ml.jobs.stream("streamed")
    assert "once" in capsys.readouterr().out
    assert cloud.wait("again") == "Completed"
    assert uploads(cloud) - before == 1


def uploads(cloud: AzureMLEmulator) -> int:
    """How many code snapshots have been put into the store."""
    return [seen.operation for seen in cloud.requests].count("codes.put")


def test_storage_and_tokens_in_the_container(cloud: AzureMLEmulator, ml: Any, tmp_path: Path) -> None:
    """az://container@account... and azure-identity, inside, without a key in the job."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "store.py").write_text(
        "import os\n"
        "from azure.identity import DefaultAzureCredential\n"
        "from isthmus.storage.filesystems import filesystem\n"
        "fs, path = filesystem(os.environ['PLACE'])\n"
        "print(fs.cat(path + '/x.txt'))\n"
        "token = DefaultAzureCredential().get_token('https://storage.azure.com/.default').token\n"
        "print('token', token.count('.'))\n"
    )
    place = cloud.container_uri("data", "a")
    submit(ml, "inside", "python3 store.py", code=str(code), environment_variables={"PLACE": place})
    assert cloud.wait("inside") == "Completed", cloud.job("inside").error
    assert "b'hello'\ntoken 2\n" in log(cloud, "inside")


def test_cancel_tells_then_kills(cloud: AzureMLEmulator, ml: Any) -> None:
    submit(ml, "obeys", OBEY, nodes=2)
    submit(ml, "defies", DEFY)
    for job in ("obeys", "defies"):
        await_log(cloud, job, "ready")
    await_log(cloud, "obeys", "ready", node=1)
    hosts = cloud.hosts("obeys")
    assert len(hosts) == 2
    assert all(host.alive and host.pids for host in hosts)
    started = time.monotonic()
    pollers = [ml.jobs.begin_cancel(job) for job in ("obeys", "defies")]
    for poller in pollers:
        poller.result()
    assert 1.9 < time.monotonic() - started < 12
    assert [cloud.state(job) for job in ("obeys", "defies")] == ["Canceled", "Canceled"]
    assert "told" in log(cloud, "obeys")
    assert "told" in log(cloud, "defies")
    assert "CancelRequested" in [state for _, state in cloud.job("obeys").history]
    assert not [pid for host in hosts for pid in host.pids if Path(f"/proc/{pid}").exists()]


def test_a_preemption_warns_waits_and_kills_then_the_job_fails_or_is_queued_again(
    cloud: AzureMLEmulator, ml: Any
) -> None:
    submit(ml, "evicted", DEFY, nodes=2)
    submit(ml, "requeued", OBEY)
    for node in (0, 1):
        await_log(cloud, "evicted", "ready", node=node)
    started = time.monotonic()
    cloud.evict("evicted")
    assert cloud.wait("evicted") == "Failed"
    assert 0.9 < time.monotonic() - started < 8
    assert "told" in log(cloud, "evicted")
    error = ml.jobs._runs_operations.get_run_details("evicted").error
    assert "PreemptionError" in json.dumps(error.as_dict())
    cloud.options.on_preemption = "requeue"
    try:
        await_log(cloud, "requeued", "ready")
        cloud.evict("requeued")
        deadline = time.monotonic() + 20
        while log(cloud, "requeued").count("ready") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        cloud.options.on_preemption = "fail"
    assert [state for _, state in cloud.job("requeued").history].count("Queued") == 2
    ml.jobs.begin_cancel("requeued").result()


def test_a_node_that_dies_a_process_that_fails_a_job_that_is_too_long(
    cloud: AzureMLEmulator, ml: Any
) -> None:
    submit(ml, "loses", OBEY, nodes=2)
    submit(
        ml,
        "fails",
        "echo first; [ $RANK = 1 ] && { sleep 3; echo no such layer; exit 3; }; " + OBEY,
        nodes=2,
    )
    submit(ml, "long", OBEY, timeout=1)
    for node in (0, 1):
        await_log(cloud, "loses", "ready", node=node)
    cloud.kill_node("loses", 1)
    assert cloud.wait("loses") == "Failed"
    assert "was lost" in cloud.job("loses").error["message"]
    assert "told" in log(cloud, "loses", 0)
    assert cloud.wait("fails") == "Failed"
    message = cloud.job("fails").error["message"]
    assert "exited with status code 3" in message
    assert "std_log_process_1.txt" in message
    assert message.endswith("no such layer")
    assert "told" in log(cloud, "fails", 0)
    assert cloud.wait("long") == "Canceled"
    assert "limits.timeout" in cloud.job("long").error["message"]


def test_what_is_found_missing_at_the_start(cloud: AzureMLEmulator, ml: Any) -> None:
    from azure.ai.ml import Input, ManagedIdentityConfiguration

    def with_input(path: str) -> dict[str, Any]:
        return {"inputs": {"data": Input(type="uri_folder", mode="ro_mount", path=path)}}

    cloud.add_compute("nobody", "Standard_DS3_v2", nodes=1, identity=False)
    submit(
        ml,
        "no-input",
        "ls ${{inputs.data}}",
        **with_input("azureml://datastores/workspaceblobstore/paths/none/"),
    )
    submit(
        ml, "no-access", "ls ${{inputs.data}}", **with_input("https://other.blob.core.windows.net/data/a/")
    )
    submit(ml, "no-identity", "ls", compute="nobody", identity=ManagedIdentityConfiguration())
    for job, rule in (
        ("no-input", "input-missing"),
        ("no-access", "input-access"),
        ("no-identity", "identity-missing"),
    ):
        assert cloud.wait(job) == "Failed"
        assert cloud.job(job).error["rule"] == rule


def test_refusals_quota_and_throttling_as_the_client_tells_them(cloud: AzureMLEmulator, ml: Any) -> None:
    from azure.ai.ml.entities import AmlCompute
    from azure.core.exceptions import HttpResponseError

    with pytest.raises(HttpResponseError, match="Unknown compute target 'nowhere'"):
        submit(ml, "nowhere", "ls", compute="nowhere")
    cloud.quota["standardNDAMSv4_A100Family"] = 0
    size = "Standard_ND96amsr_A100_v4"
    with pytest.raises(HttpResponseError, match="insufficient for at least 1 requested managed compute node"):
        ml.compute.begin_create_or_update(AmlCompute(name="nd", size=size, max_instances=2)).result()
    usages = {usage.name["value"]: usage for usage in ml.compute.list_usage(location="eastus")}
    assert usages["Standard NDAMSv4_A100 Family Cluster Dedicated vCPUs"].limit == 0
    assert size in {found.name for found in ml.compute.list_sizes(location="eastus")}
    # The client's own retries get through, and make one job.
    cloud.fail_next("jobs.put", 429, times=2, retry_after=0.2)
    submit(ml, "throttled", "true")
    cloud.fail_next("jobs.put", "drop-after")
    submit(ml, "dropped", "true")
    names = [found["name"] for found in cloud.jobs()]
    assert [names.count(job) for job in ("throttled", "dropped")] == [1, 1]
    assert [
        seen.status for seen in cloud.requests if seen.path.endswith("/dropped") and seen.method == "PUT"
    ] == [None, 200]
    assert [cloud.wait(job) for job in ("throttled", "dropped")] == ["Completed", "Completed"]


def test_tokens_that_expire(cloud: AzureMLEmulator, ml: Any) -> None:
    from azure.core.exceptions import HttpResponseError

    mine = client(cloud)
    assert list(mine.compute.list())
    cloud.expire_tokens()
    with pytest.raises(HttpResponseError) as caught:
        list(mine.compute.list())
    assert caught.value.status_code == 401
    assert list(client(cloud).compute.list())
    # Before the end of a token's life the client asks for another by itself.
    cloud.tokens.lifetime = 4.0
    try:
        again = client(cloud)
        assert list(again.compute.list())
        time.sleep(4.2)
        assert list(again.compute.list())
    finally:
        cloud.tokens.lifetime = 3600.0


def test_nodes_come_within_quota_and_go_when_idle(cloud: AzureMLEmulator, ml: Any) -> None:
    cloud.add_compute("small", "Standard_E4s_v3", nodes=4)
    cluster = cloud.world.clusters["small"]
    cluster.idle_seconds = 0.3
    cloud.quota["standardESv3Family"] = 8
    cloud.options.start_delay = 0.5
    mine = client(cloud)
    try:
        submit(mine, "fits", "true", nodes=2, compute="small")
        submit(mine, "waits", "true", nodes=3, compute="small")
        assert cloud.wait("fits") == "Completed"
        spent = dict(reversed([(state, when) for when, state in cloud.job("fits").history]))
        assert spent["Preparing"] - spent["Queued"] > 0.4
        deadline = time.monotonic() + 10
        while not mine.compute.get("small").provisioning_errors and not cluster.errors:
            assert time.monotonic() < deadline
        assert cluster.errors[0]["error"]["code"] == "ClusterCoreQuotaReached"
        assert cloud.state("waits") == "Queued"
        cloud.quota["standardESv3Family"] = 12
        assert cloud.wait("waits") == "Completed"
        time.sleep(0.4)
        assert list(mine.compute.list_nodes("small")) == []
    finally:
        cloud.options.start_delay = 0.0
