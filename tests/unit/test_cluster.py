"""Who am I among which hosts: the container contracts' own files and variables, right and wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.cluster import endings, failure_file, find_cluster
from isthmus.core.cluster import hosts as names
from isthmus.core.cluster.joining import announce, join, stop_came_first, type_of
from isthmus.core.cluster.ranks import flight_recorder
from isthmus.core.cluster.watching import EventWatch
from isthmus.core.outcome import Verdict
from isthmus.core.recipe import Recipe, load_recipe
from isthmus.core.recipe.mounted import parse_places, with_places
from isthmus.errors import IsthmusError, TrainingFailed, UsageError
from isthmus.storage.rundir import RunDirectory

AZURE = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105", "NODE_RANK": "1", "AZUREML_NODE_COUNT": "2"}


def opt_ml(place: Path, **resources: Any) -> dict[str, str]:
    """The tree of a SageMaker container, as environment."""
    config = place / "input" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    return {"SAGEMAKER_BASE_DIR": str(place)}


def test_sagemaker_takes_hosts_as_given_and_never_the_host_name(tmp_path: Path) -> None:
    hosts = ["algo-1", "algo-10", "algo-2"]  # as SageMaker sorts them
    environ = opt_ml(tmp_path, current_host="algo-2", hosts=hosts, network_interface_name="eth0")
    found = find_cluster("sagemaker")(3, environ)
    assert (found.hosts, found.node_rank, found.nodes) == (tuple(hosts), 2, 3)
    assert (found.master_addr, found.master_port, found.interface) == ("algo-1", 29500, "eth0")
    assert (found.grace, found.failure_file) == (120.0, tmp_path / "output" / "failure")
    assert find_cluster("sagemaker")(3, {**environ, "MASTER_PORT": "7777"}).master_port == 7777
    alone = find_cluster("sagemaker")(1, opt_ml(tmp_path, current_host="algo-1", hosts=["algo-1"]))
    assert (alone.master_addr, alone.master_port) == ("127.0.0.1", None)
    assert failure_file("sagemaker", {}) == Path("/opt/ml/output/failure")
    assert failure_file("azureml", {}) is failure_file("nobody", {}) is None


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"current_host": "algo-1", "hosts": ["algo-1"]}, "the job has 1 hosts, the recipe asks for 2"),
        ({"current_host": "algo-3", "hosts": ["algo-1", "algo-2"]}, "does not tell the hosts and this one"),
        ({"hosts": ["algo-1", "algo-2"]}, "does not tell the hosts and this one: KeyError('current_host')"),
        ({}, "does not tell"),
    ],
)
def test_sagemaker_refuses_in_one_line(tmp_path: Path, resources: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=r"resourceconfig\.json") as refused:
        find_cluster("sagemaker")(2, opt_ml(tmp_path, **resources))
    assert said in str(refused.value)


def test_sagemaker_elsewhere_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        find_cluster("sagemaker")(1, {"SAGEMAKER_BASE_DIR": str(tmp_path)})
    opt_ml(tmp_path)
    (tmp_path / "input/config/resourceconfig.json").write_text("{")
    with pytest.raises(UsageError, match="does not tell the hosts"):
        find_cluster("sagemaker")(1, {"SAGEMAKER_BASE_DIR": str(tmp_path)})


def test_azureml_takes_all_from_variables() -> None:
    found = find_cluster("azureml")(2, AZURE)
    assert (found.node_rank, found.nodes, found.master_addr, found.master_port) == (1, 2, "10.0.0.4", 6105)
    assert (found.grace, found.failure_file, found.interface) == (30.0, None, None)
    # With one process a node RANK and WORLD_SIZE are the node's and the nodes'.
    only = {"MASTER_ADDR": "10.0.0.4", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert find_cluster("azureml")(2, only).node_rank == 0
    assert find_cluster("azureml")(1, {}).master_port is None
    assert find_cluster("azureml")(1, {**AZURE, "AZUREML_NODE_COUNT": "1"}).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"AZUREML_NODE_COUNT": "4"}, "the job has 4 nodes, the recipe asks for 2"),
        ({"AZUREML_NODE_COUNT": ""}, "the job has 1 nodes"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"NODE_RANK": ""}, "NODE_RANK is not set"),
        ({"NODE_RANK": "2"}, "NODE_RANK is 2, of 2 nodes"),
        ({"NODE_RANK": "one"}, "NODE_RANK: 'one' is no number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: '65536' is no port"),
        ({"LOCAL_WORLD_SIZE": "8"}, "process_count_per_instance: 1"),
    ],
)
def test_azureml_refuses_in_one_line(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_cluster("azureml")(2, {**AZURE, **changes})
    assert said in str(refused.value)


def test_a_name_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    names.wait_for_name("127.0.0.1", threading.Event())
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match=r"the name of algo-1\.invalid cannot be resolved"):
        names.wait_for_name("algo-1.invalid", threading.Event(), patience=0.0)
    interrupted = threading.Event()
    interrupted.set()
    names.wait_for_name("algo-1.invalid", interrupted)
    assert time.monotonic() - began < 5


def recipe_of(*uris: Any, held_out: tuple[str, ...] = (), init: str | None = None) -> Recipe:
    """A recipe with these places."""
    recipe = load_recipe("quickstart").recipe
    source = recipe.data.sources[0]
    sources = [source.model_copy(update={"uri": uri}) for uri in uris]
    others = [source.model_copy(update={"uri": uri}) for uri in held_out]
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"sources": sources}),
            "validation": recipe.validation.model_copy(update={"sources": others}),
            "model": recipe.model.model_copy(update={"init_from": init}),
        }
    )


def test_places_of_a_command_line() -> None:
    recipe = recipe_of(
        "place:data0", ["place:data1", "place:data2/part", "az://c@a.blob.core.windows.net/x"],
        held_out=("place:val0",), init="place:init",
    )  # fmt: skip
    options = ["data0=/mnt/a", "data1=/mnt/b=c", "data2=/mnt/d/", "val0=/mnt/v", "init=/mnt/i"]
    found = with_places(recipe, parse_places(options))
    assert [source.uri for source in found.data.sources] == [
        "/mnt/a", ["/mnt/b=c", "/mnt/d/part", "az://c@a.blob.core.windows.net/x"],
    ]  # fmt: skip
    assert found.validation.sources[0].uri == "/mnt/v"
    assert found.model.init_from == "/mnt/i"
    assert with_places(recipe_of("s3://b/x"), {}).data.sources[0].uri == "s3://b/x"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["data0"], "'data0' is not NAME=PATH"),
        (["=x"], "is not NAME=PATH"),
        (["data0=/a", "data0=/b"], "data0 is given twice"),
        ([], "data.sources.0.uri: place:data0 has no path (--place data0=PATH)"),
        (["data0=/a", "val0=/b"], "--place val0: the recipe has no place:val0"),
    ],
)
def test_places_that_do_not_fit(options: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        with_places(recipe_of("place:data0"), parse_places(options))
    assert said in str(refused.value)


def test_a_node_joins_only_its_own_job(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    never = threading.Event()
    with run.lease(60, "one") as lease:
        first = announce(run, lease, job="job-01", nodes=2, world_size=2)
        assert join(run, job="job-01", wait=1, interrupted=never) == first
        assert join(run, job=None, wait=1, interrupted=never) == first
        with pytest.raises(UsageError, match="node 0 has not begun after 0 s"):
            join(run, job="job-02", wait=0.01, interrupted=never)
    with pytest.raises(UsageError, match="node 0 has not begun"):
        join(run, job="job-01", wait=0.01, interrupted=never)  # released: nobody runs


def test_a_stop_before_the_start_is_seen_by_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    assert not stop_came_first(run)
    run.event("submitted")
    run.event("stop-requested", by="user")
    run.event("alarm", message="x")
    monkeypatch.setattr(run._store, "read", None)
    assert stop_came_first(run)
    run.event("started", attempt=1)
    assert not stop_came_first(run)
    assert type_of("00001796066700000-checkpoint-committed-a1b2c3.json") == "checkpoint-committed"


def test_events_are_told_until_taken_and_a_store_that_is_away_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    run.event("failed", attempt=1)  # of an attempt before
    run.event("started", attempt=2)
    run.event("stop-requested", by="user")
    heard: list[str] = []

    def tell(event: Any) -> bool:
        heard.append(event["type"])
        return len(heard) > 1

    watch = EventWatch(run, tell)
    for _ in range(3):
        watch.look()
    assert heard == ["stop-requested", "stop-requested"]
    run.event("checkpoint-committed", step=1)
    run.event("failed", attempt=2, node=1)
    watch.look()
    assert heard[2:] == ["failed"]

    def away(folder: str) -> list[str]:
        raise IsthmusError("away")

    with monkeypatch.context() as broken, EventWatch(run, tell, every=0.01):
        broken.setattr(run, "file_names", away)
        time.sleep(0.05)
        broken.undo()
        run.event("failed", attempt=2, node=1)
        deadline = time.monotonic() + 10
        while len(heard) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "failed" in heard[3:]


def test_a_node_that_lost_others_takes_over_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "_PATIENCE_S", 0.0)
    run = RunDirectory(tmp_path / "run")
    with run.lease(60, "one") as lease:
        attempt = announce(run, lease, job="job-01", nodes=2, world_size=2)
        lost = Verdict("failed", 1, "rank 0 lost contact with another rank", 0, 10.0, echo=True)
        silent = endings.better_word(run, lost, attempt)
        assert (silent.status, silent.exit_code, silent.echo) == ("preempted", 75, True)
        assert str(silent.cause).endswith("no word from its node, whose machine may be gone")
        endings.record(run, silent, attempt, node=2)
        assert run.events()[-1]["node"] == 2, "node 0 may be what is gone"
        endings.record(run, silent, attempt, node=3)
        assert len(run.events("preempted")) == 1, "once is enough"

        monkeypatch.setattr(endings, "_PATIENCE_S", 5.0)
        full = Verdict("failed", 1, "shard 3: the disk is full", 1, 9.5)
        endings.record(run, full, attempt, node=1)
        heard = endings.better_word(run, lost, attempt)
        assert (heard.status, heard.cause, heard.rank, heard.at) == ("failed", full.cause, 1, 9.5)
        assert endings.better_word(run, full, attempt) == full, "who knows why needs nobody"
        # Ranks that had to be ended, because those of another node had failed.
        unknown = Verdict("failed", 1, "no word from 1 of 1 ranks; the log may say why")
        told = endings.better_word(run, unknown, attempt, peer=run.events("failed")[0])
        assert told.cause == full.cause
    with run.lease(60, "two"):
        endings.record(run, full, attempt, node=1)
        assert len(run.events("failed")) == 1, "another attempt's run by now"


def test_the_flight_recorder_is_named_as_the_installed_torch_names_it(tmp_path: Path) -> None:
    told = flight_recorder(tmp_path, {})
    assert told["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight_")
    # A user's own values stay, by whichever name.
    assert "TORCH_FR_BUFFER_SIZE" not in flight_recorder(tmp_path, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"})
    assert (
        flight_recorder(tmp_path, {"TORCH_FR_BUFFER_SIZE": "7"}).keys().isdisjoint({"TORCH_FR_BUFFER_SIZE"})
    )
    program = (
        "import json, torch, torch.distributed as dist;"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 1);"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1);"
        "dist.all_reduce(torch.ones(1)); from torch._C._distributed_c10d import _dump_fr_trace_json;"
        "print(len(json.loads(_dump_fr_trace_json())['entries'])); dist.destroy_process_group()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "deprecated" not in ran.stderr
    assert int(ran.stdout) >= 1
