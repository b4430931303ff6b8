"""An emulated Azure ML workspace for the tests that drive it with the real azure-ai-ml client.

A test module imports the fixtures that it uses: `environment`, `cloud`, `ml`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from isthmus.emulators.azureml import AzureMLEmulator
from isthmus.errors import IsthmusError

MEET = """
import os, socket, sys, time
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["NODE_RANK"] == "0":
    with socket.create_server(address) as server:
        other, peer = server.accept()
        print("met", other.recv(100).decode())
else:
    for _ in range(200):
        try:
            with socket.create_connection(address) as there:
                there.sendall(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}".encode())
            break
        except OSError:
            time.sleep(0.05)
for name, folder in zip(("mounted", "copied"), sys.argv[1:3]):
    print(name, open(folder + "/x.txt").read())
try:
    open(sys.argv[1] + "/new", "w")
    print("writable")
except OSError as error:
    print("read-only")
print("here", os.getcwd(), *sys.argv[1:])
with open(sys.argv[3] + "/of-" + os.environ["RANK"], "w") as file:
    file.write("out")
"""
OBEY = "trap 'echo told; exit 75' TERM; echo ready; while :; do sleep 0.05; done"
DEFY = "trap 'echo told' TERM; echo ready; while :; do sleep 0.05; done"


@pytest.fixture(scope="module")
def environment() -> Iterator[pytest.MonkeyPatch]:
    """The environment of this process, restored afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AZURE", "IDENTITY_", "MSI_")):
                patch.delenv(name)
        yield patch


@pytest.fixture(scope="module")
def cloud(
    tmp_path_factory: pytest.TempPathFactory, environment: pytest.MonkeyPatch
) -> Iterator[AzureMLEmulator]:
    """A workspace with one cluster and one environment."""
    pytest.importorskip("azure.storage.blob")
    pytest.importorskip("cryptography")
    try:
        emulator = AzureMLEmulator(tmp_path_factory.mktemp("aml"), grace=1.0, cancel_grace=2.0, heartbeat=0.2)
    except IsthmusError as error:
        pytest.skip(str(error))
    with emulator:
        for name, value in emulator.environment().items():
            environment.setenv(name, value)
        emulator.add_compute("low", "Standard_DS3_v2", nodes=8, low_priority=True)
        emulator.add_environment("train", "1", "team/train@sha256:0")
        emulator.blobs.container("data").upload_blob("a/x.txt", b"hello", overwrite=True)
        yield emulator


@pytest.fixture
def ml(cloud: AzureMLEmulator) -> Any:
    """A client with a credential that it finds itself."""
    pytest.importorskip("azure.ai.ml")
    return client(cloud)


def client(cloud: AzureMLEmulator) -> Any:
    """A new client with a new credential."""
    from azure.ai.ml import MLClient
    from azure.identity import DefaultAzureCredential

    world = cloud.world
    options: dict[str, Any] = {"enable_telemetry": False, "show_progress": False}
    return MLClient(
        DefaultAzureCredential(), world.subscription, world.resource_group, world.workspace, **options
    )


def submit(ml: Any, name: str, command: str, *, nodes: int = 1, **more: Any) -> Any:
    """A command job with one process a node."""
    from azure.ai.ml import PyTorchDistribution
    from azure.ai.ml import command as build

    options: dict[str, Any] = {"environment": "train:1", "compute": "low"} | more
    job = build(
        name=name,
        command=command,
        instance_count=nodes,
        distribution=PyTorchDistribution(process_count_per_instance=1),
        **options,
    )
    return ml.jobs.create_or_update(job)


def log(cloud: AzureMLEmulator, job: str, node: int = 0) -> str:
    """What a node's process has said so far, as the store has it."""
    return cloud.log(job, f"user_logs/std_log_process_{node}.txt")


def await_log(cloud: AzureMLEmulator, job: str, text: str, *, node: int = 0) -> None:
    """Returns when a node's log holds the text."""
    deadline = time.monotonic() + 30
    while text not in log(cloud, job, node):
        assert time.monotonic() < deadline, (cloud.state(job), cloud.job(job).error)
        assert not cloud.job(job).over, cloud.job(job).error
        time.sleep(0.05)
