"""The emulated Azure ML as plain processes, and that nothing is left of it; the slow ones of test_emulator_azureml.py."""

# ruff: noqa: F811 -- fixtures are imported, and are parameters of the same names
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from azureml_cloud import (  # noqa: F401  fixtures
    DEFY,
    MEET,
    await_log,
    client,
    cloud,
    environment,
    log,
    ml,
    submit,
)

from isthmus.emulators.azureml import AzureMLEmulator


@pytest.mark.slow
def test_plain_processes_do_as_well(
    tmp_path: Path, environment: pytest.MonkeyPatch, cloud: AzureMLEmulator
) -> None:
    """Slow: an Azurite of its own, and processes that have to be killed one by one."""
    with AzureMLEmulator(tmp_path / "aml", privileges="processes", grace=0.5, cancel_grace=0.5) as plain:
        before = {name: os.environ[name] for name in plain.environment()}
        for name, value in plain.environment().items():
            environment.setenv(name, value)
        try:
            plain.add_compute("low", "Standard_DS3_v2", nodes=4, low_priority=True)
            plain.add_environment("train", "1", "x")
            mine = client(plain)
            (tmp_path / "code").mkdir()
            (tmp_path / "code" / "meet.py").write_text(MEET.partition("for name")[0])
            submit(mine, "meeting", "python3 meet.py", nodes=2, code=str(tmp_path / "code"))
            # A grandchild that left the process group must go, too.
            submit(mine, "orphans", "setsid sleep 300 & " + DEFY, nodes=2)
            assert plain.wait("meeting") == "Completed", plain.job("meeting").error
            assert "met rank 1 of 2" in log(plain, "meeting")
            await_log(plain, "orphans", "ready", node=1)
            pids = [pid for host in plain.hosts("orphans") for pid in host.pids]
            assert len(pids) >= 4
            plain.evict("orphans", 0)
            assert plain.wait("orphans") == "Failed"
            assert not [pid for pid in pids if alive(pid)]
        finally:
            for name, value in before.items():
                environment.setenv(name, value)


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_ends_or_is_killed(
    tmp_path: Path, environment: pytest.MonkeyPatch, cloud: AzureMLEmulator, number: int
) -> None:
    """Slow: a whole emulator in a process of its own, with a running job and a mount."""
    command = [sys.executable, "-m", "isthmus.emulators.azureml", "--folder", str(tmp_path / "aml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    before = {name: os.environ[name] for name in ready["environment"]}
    for name, value in ready["environment"].items():
        environment.setenv(name, value)
    try:
        from azure.ai.ml import Input
        from azure.ai.ml.entities import AmlCompute, Environment
        from azure.storage.blob import BlobServiceClient

        store = BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"])
        store.create_container("data").upload_blob("a/x.txt", b"hello")
        mine = client(cloud)
        mine.compute.begin_create_or_update(
            AmlCompute(name="low", size="Standard_DS3_v2", max_instances=2)
        ).result()
        mine.environments.create_or_update(Environment(name="train", version="1", image="x"))
        place = "https://devstoreaccount1.blob.core.windows.net/data/a/"
        given = {"inputs": {"data": Input(type="uri_folder", mode="ro_mount", path=place)}}
        submit(mine, "running", "ls ${{inputs.data}}; setsid sleep 300 & " + DEFY, nodes=2, **given)
        deadline = time.monotonic() + 30
        while mine.jobs.get("running").status != "Running":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(30)
        deadline = time.monotonic() + 20
        while left := traces(tmp_path):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
        for name, value in before.items():
            environment.setenv(name, value)


def traces(folder: Path) -> list[str]:
    """Processes that mention a folder in their command line or working directory, and mounts in it."""
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    for entry in Path("/proc").iterdir():
        if not re.fullmatch(r"\d+", entry.name) or int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "cmdline").read_bytes().decode(errors="replace") + str((entry / "cwd").readlink())
        except OSError:
            continue
        if str(folder) in said and alive(int(entry.name)):
            found.append(said.replace("\0", " "))
    return found
