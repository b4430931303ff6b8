"""Real servers for tests, and one of ours that misbehaves on demand.

Fixtures (tests/conftest.py makes them known to every test; each skips with a line that says what to install):

    s3        a bucket of its own in moto's server, the environment set for it: `s3.root` is "s3://bucket/data", `s3.put(name, bytes)`
    blob      a container of its own in Azurite, the same way: `blob.root` is "az://container/data"
    nginx     `nginx(folder, delay_s=0.02, bytes_per_s=80e6)` -> "http://127.0.0.1:port": the folder, each answer delayed, each connection limited
    faulty    `faulty(source)` -> `FaultyServer`: the source is a folder, or the address of another server to stand in front of

A `FaultyServer` answers like its source until told otherwise:

    server = faulty(folder)
    server.fail(slow_down(retry_after=1), times=3)      # the next three GETs
    server.fail(stall(), match="part-00001", after=2)   # from the third GET on whose path contains this
    ... open_ranges(server.url) ...
    server.requests                                     # what was asked: method, path, headers, time
    with server.away(): ...                             # the port refuses connections inside the block

Faults (all in `faulty`): slow_down, too_many, refused(status, code), expired, reset, truncated(honest=...), wrong_etag, wrong_length, wrong_range,
stall, flipped, late(seconds).

A name that does not resolve for a while needs root (a private mount of /etc/hosts): tests/faults/test_ranges_mounts.py. Elsewhere
`away()` stands for it: to a reader both are a connection that cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
from faulty import FaultyServer

AZURITE = "3.37.0"  # the Makefile's `system` target installs the same
CACHE = Path(os.environ.get("ISTHMUS_TEST_CACHE", Path.home() / ".cache" / "isthmus-tests"))
AZURITE_ACCOUNT = "devstoreaccount1"
# Azurite's own account and key, printed in its manual: no secret.
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CREDENTIALS = ("AWS_", "AZURE_")
"""What a developer's own environment may hold; tests must not use it."""


@dataclass
class Store:
    """A place in an object store of a test."""

    root: str
    endpoint: str
    environment: dict[str, str]
    bucket: str
    put: Callable[[str, bytes], None]
    """Name below the root, content."""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int, *, limit_s: float = 60, **options: Any) -> Iterator[None]:
    """A server process, from the moment it accepts connections to the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not start to listen on port {port} within {limit_s:.0f} s")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment in which no store's credentials are found."""
    for name in list(os.environ):
        if name.startswith(CREDENTIALS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The address of moto's server, a process of its own."""
    pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    port = free_port()
    with running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def s3(moto: str, no_credentials: pytest.MonkeyPatch) -> Store:
    """A bucket of its own in moto, with the environment set so that s3:// means it."""
    import boto3

    environment = {
        "AWS_ENDPOINT_URL": moto,
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",  # the key of AWS's manual
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        no_credentials.setenv(name, value)
    client = boto3.client("s3")
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    return Store(
        root=f"s3://{bucket}/data",
        endpoint=moto,
        environment=environment,
        bucket=bucket,
        put=lambda name, data: client.put_object(Bucket=bucket, Key=f"data/{name}", Body=data) and None,
    )


def azurite_command() -> list[str] | None:
    """How to start Azurite's Blob service, from the PATH or from where `make system` puts it; None when it is not there."""
    if shutil.which("node") is None:
        return None
    local = CACHE / f"azurite-{AZURITE}" / "node_modules" / ".bin" / "azurite-blob"
    found = str(local) if local.exists() else shutil.which("azurite-blob")
    return [found] if found else None


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of Azurite's Blob service, its account included."""
    command = azurite_command()
    if command is None:
        pytest.skip("Azurite is missing: `make system` installs it where there is npm")
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    options += ["--disableTelemetry", "--location", str(tmp_path_factory.mktemp("azurite"))]
    with running([*command, *options], port):
        yield f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"


def connection_string(endpoint: str) -> str:
    """Azurite's connection string with its Blob service at an address (its own, or a proxy's)."""
    return f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY};BlobEndpoint={endpoint};"


@pytest.fixture
def blob(azurite: str, no_credentials: pytest.MonkeyPatch) -> Store:
    """A container of its own in Azurite, with the environment set so that az:// means it."""
    from azure.storage.blob import BlobServiceClient

    environment = {"AZURE_STORAGE_CONNECTION_STRING": connection_string(azurite)}
    for name, value in environment.items():
        no_credentials.setenv(name, value)
    container = f"test-{uuid.uuid4().hex[:12]}"
    client = BlobServiceClient.from_connection_string(connection_string(azurite)).create_container(container)
    return Store(
        root=f"az://{container}/data",
        endpoint=azurite,
        environment=environment,
        bucket=container,
        put=lambda name, data: client.upload_blob(f"data/{name}", data, overwrite=True) and None,
    )


class StartNginx(Protocol):
    """What the fixture `nginx` is."""

    def __call__(self, folder: Path, *, delay_s: float = 0.0, bytes_per_s: float | None = None) -> str:
        """The address at which the folder can be read."""


@contextlib.contextmanager
def nginx_serving(
    folder: Path,
    work: Path,
    *,
    delay_s: float = 0.0,
    bytes_per_s: float | None = None,
    pair: tuple[Path, Path] | None = None,
) -> Iterator[str]:
    """nginx over a folder: each answer's first byte `delay_s` late, each connection at most so fast.

    Args:
        folder: what is served.
        work: an empty folder for its configuration and temporary files.
        pair: a certificate and its key, for TLS.
    """
    modules = Path("/usr/lib/nginx/modules")
    if shutil.which("nginx") is None or (delay_s and not (modules / "ngx_http_lua_module.so").exists()):
        pytest.skip("nginx with its lua module is missing: `make system` installs it on Debian and Ubuntu")
    port = free_port()
    lua = f"access_by_lua_block {{ ngx.sleep({delay_s}) }}" if delay_s else ""
    packages = 'lua_package_path "/usr/share/lua/5.1/?.lua;;";' if delay_s else ""
    rate = f"limit_rate {int(bytes_per_s)};" if bytes_per_s else ""
    tls = f"ssl_certificate {pair[0]}; ssl_certificate_key {pair[1]};" if pair else ""
    load = [f"load_module {modules}/{name}_module.so;" for name in ("ndk_http", "ngx_http_lua") if delay_s]
    user = "user root;" if os.geteuid() == 0 else ""
    temporary = " ".join(
        f"{kind}_temp_path {work}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (work / "nginx.conf").write_text(f"""
        {" ".join(load)} {user} daemon off; worker_processes 1; pid {work}/pid; error_log {work}/error.log warn;
        events {{ worker_connections 1024; }}
        http {{
          access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000; keepalive_timeout 300;
          default_type application/octet-stream; {packages} {temporary}
          server {{ listen 127.0.0.1:{port}{" ssl" if pair else ""}; {tls} root {folder}; location / {{ {lua} {rate} }} }}
        }}""")
    with running(["nginx", "-p", str(work), "-c", str(work / "nginx.conf")], port):
        yield f"{'https' if pair else 'http'}://127.0.0.1:{port}"


@pytest.fixture
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNginx]:
    """Starts nginx over a folder; stopped after the test."""
    with contextlib.ExitStack() as servers:

        def start(folder: Path, *, delay_s: float = 0.0, bytes_per_s: float | None = None) -> str:
            work = tmp_path_factory.mktemp("nginx")
            return servers.enter_context(
                nginx_serving(folder, work, delay_s=delay_s, bytes_per_s=bytes_per_s)
            )

        yield start


@pytest.fixture
def faulty() -> Iterator[Callable[[Path | str], FaultyServer]]:
    """Starts a `FaultyServer` over a folder or in front of a server; stopped after the test."""
    with contextlib.ExitStack() as servers:
        yield lambda source: servers.enter_context(FaultyServer(source))
