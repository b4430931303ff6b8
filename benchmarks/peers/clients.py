"""Plain clients of object stores: the ranges that our blocks lie in, so many in flight, and nothing else."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from peers import rows
from peers.harness import LISTING, Batch, Reader, Request

Get = Callable[[str, int, int], Any]
"""File name, start, end -> bytes-like."""


def load() -> None:
    """Imports what all clients need."""
    import torch  # noqa: F401


def open_reader(request: Request) -> Reader:
    """One block after the other, shuffled, `request.depth` ranges in flight."""
    assert request.depth is not None
    with urlopen(f"{request.folder}/{LISTING}") as answer:
        blocks = json.load(answer)["blocks"]
    return Reader(_read(_CLIENTS[request.case](request), blocks, request.depth), whole=False)


def _read(get: Get, blocks: list[dict[str, Any]], depth: int) -> Iterator[Batch]:
    import torch

    names = list(rows.ARRAYS)
    with ThreadPoolExecutor(depth) as pool:
        waiting: deque[Any] = deque()
        upcoming = iter(blocks)

        def ahead() -> None:
            # More than the depth is asked for, so that a connection never waits for the consumer.
            while len(waiting) <= depth and (block := next(upcoming, None)):
                futures = [pool.submit(get, *where) for where in block["ranges"]]
                waiting.append((block["rows"], futures))

        ahead()
        while waiting:
            count, futures = waiting.popleft()
            tensors = [torch.frombuffer(future.result(), dtype=torch.uint8) for future in futures]
            ahead()
            # A range holds several columns; that all of it is looked at is what matters here.
            arrays = {name: tensors[at % len(tensors)] for at, name in enumerate(names[-len(tensors) :])}
            yield {"key": [""] * count, **dict.fromkeys(names, tensors[0][:1]), **arrays}


def _obstore(request: Request) -> Get:
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(request.folder, client_options={"allow_http": True})
    return lambda name, start, end: obstore.get_range(store, name, start=start, end=end)


def _fsspec_http(request: Request) -> Get:
    import fsspec

    store = fsspec.filesystem("http")
    # Writable, because torch warns of memory that it might write to.
    return lambda name, start, end: bytearray(
        store.cat_file(f"{request.folder}/{name}", start=start, end=end)
    )


def _s3fs(request: Request) -> Get:
    import s3fs

    address = urlsplit(request.folder)
    store = s3fs.S3FileSystem(
        anon=True,
        endpoint_url=f"{address.scheme}://{address.netloc}",
        config_kwargs={"max_pool_connections": request.depth, "s3": {"addressing_style": "path"}},
    )
    bucket = address.path.strip("/")
    return lambda name, start, end: store.cat_file(f"{bucket}/{name}", start=start, end=end)


def _boto3(request: Request) -> Get:
    import boto3
    import botocore
    from botocore.config import Config

    address = urlsplit(request.folder)
    client = boto3.client(
        "s3",
        endpoint_url=f"{address.scheme}://{address.netloc}",
        region_name="us-east-1",
        config=Config(
            signature_version=botocore.UNSIGNED,
            max_pool_connections=request.depth,
            s3={"addressing_style": "path"},
            response_checksum_validation="when_required",
        ),
    )
    bucket = address.path.strip("/")

    def get(name: str, start: int, end: int) -> Any:
        answer = client.get_object(Bucket=bucket, Key=name, Range=f"bytes={start}-{end - 1}")
        return answer["Body"].read()

    return get


def _http_client(request: Request) -> Get:
    import http.client

    address = urlsplit(request.folder)
    own = threading.local()

    def get(name: str, start: int, end: int) -> Any:
        if not hasattr(own, "connection"):
            assert address.hostname is not None
            own.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
            own.spare = []
        own.connection.request("GET", f"{address.path}/{name}", headers={"Range": f"bytes={start}-{end - 1}"})
        answer = own.connection.getresponse()
        if answer.status != 206:
            raise RuntimeError(f"HTTP {answer.status} for {name}")
        buffer = bytearray(end - start)
        view, filled = memoryview(buffer), 0
        while got := answer.readinto(view[filled:]):
            filled += got
        return buffer

    return get


_CLIENTS: dict[str, Callable[[Request], Get]] = {
    "obstore": _obstore,
    "s3fs": _s3fs,
    "fsspec_http": _fsspec_http,
    "boto3": _boto3,
    "http_client": _http_client,
}
CLIENTS = tuple(_CLIENTS)
"""Their names."""
