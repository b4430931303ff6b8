"""The workspace's storage account: Azurite's Blob service, a process of its own."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from isthmus.emulators.azureml.guarded import Guarded, free_port
from isthmus.emulators.azureml.rules import missing
from isthmus.errors import NotInstalled

if TYPE_CHECKING:
    from azure.storage.blob import BlobServiceClient, ContainerClient

ACCOUNT = "devstoreaccount1"
# Azurite's own account and key, printed in its manual: no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
ARTIFACTS = "azureml"
"""The container of runs' logs and outputs."""


class Place(NamedTuple):
    """A path in a container of the account; the path without slashes at its ends."""

    container: str
    path: str


def azurite_command() -> list[str]:
    """How to start Azurite: from the tests' cache, else from the PATH.

    Raises:
        UsageError: it is on neither.
    """
    cache = Path(os.environ.get("ISTHMUS_TEST_CACHE", Path.home() / ".cache" / "isthmus-tests"))
    found = sorted(cache.glob("azurite-*/node_modules/.bin/azurite-blob"))
    command = str(found[-1]) if found else shutil.which("azurite-blob")
    if command is None or shutil.which("node") is None:
        raise missing(
            "Azurite (Azure's Blob service on this machine)", "npm install -g azurite; it needs Node.js"
        )
    return [command]


class Blobs:
    """Azurite, started at construction with its data in a folder, on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        try:
            from azure.storage.blob import BlobServiceClient
        except ImportError:
            raise NotInstalled("the Azure ML emulator", extra="azure", module="azure-storage-blob") from None
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        command = [*azurite_command(), "--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--silent"]
        command += ["--skipApiVersionCheck", "--disableTelemetry", "--location", str(folder)]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)}
        self._process = Guarded(command, environment=environment, log=folder / "azurite.log")
        try:
            self._process.await_port(self.port)
        except BaseException:
            self._process.stop()
            raise
        self.client: BlobServiceClient = BlobServiceClient.from_connection_string(self.connection_string)

    @property
    def connection_string(self) -> str:
        """What opens the account."""
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.endpoint};"

    def stop(self) -> None:
        """Ends Azurite; its data stay in the folder."""
        self.client.close()
        self._process.stop()

    def container(self, name: str) -> ContainerClient:
        """A container, created where it is not there."""
        client = self.client.get_container_client(name)
        if not client.exists():
            client.create_container()
        return client

    def sas_url(self, place: Place, permissions: str, *, hours: float = 24 * 30) -> str:
        """An address of a blob (or of a container, where the path is empty) that needs no other credential."""
        from azure.storage.blob import generate_blob_sas, generate_container_sas

        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hours)
        if place.path:
            token = generate_blob_sas(
                ACCOUNT, place.container, place.path, account_key=KEY, permission=permissions, expiry=until
            )
            from urllib.parse import quote

            return f"{self.endpoint}/{place.container}/{quote(place.path)}?{token}"
        token = generate_container_sas(
            ACCOUNT, place.container, account_key=KEY, permission=permissions, expiry=until
        )
        return f"{self.endpoint}/{place.container}?{token}"

    def names(self, place: Place) -> Iterator[str]:
        """The blobs at or below a place, by their whole names."""
        client = self.client.get_container_client(place.container)
        if not client.exists():
            return
        for name in client.list_blob_names(name_starts_with=place.path or None):
            if not place.path or name == place.path or name.startswith(place.path + "/"):
                yield str(name)

    def is_blob(self, place: Place) -> bool:
        """Whether the place is a file."""
        return bool(place.path) and bool(self.client.get_blob_client(place.container, place.path).exists())

    def download(self, place: Place, folder: Path) -> int:
        """Copies what lies below a place (or the one file it is) into a folder; returns how many files."""
        count = 0
        for name in self.names(place):
            below = name[len(place.path) :].strip("/") or name.rpartition("/")[2]
            target = folder / below
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                self.client.get_blob_client(place.container, name).download_blob().readinto(file)
            count += 1
        return count

    def upload(self, folder: Path, place: Place) -> int:
        """Copies a folder's files to below a place; returns how many."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        if files:
            client = self.container(place.container)
            for path in files:
                name = "/".join(part for part in (place.path, path.relative_to(folder).as_posix()) if part)
                with path.open("rb") as file:
                    client.upload_blob(name, file, overwrite=True)
        return len(files)

    def append(self, place: Place, data: bytes) -> None:
        """Adds to an append blob, created where it is not there."""
        client = self.client.get_blob_client(place.container, place.path)
        if not client.exists():
            client.create_append_blob()
        for start in range(0, len(data), 4 << 20):
            client.append_block(data[start : start + (4 << 20)])
