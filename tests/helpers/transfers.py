"""What the tests of copies share: trees of files, and places in real servers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from servers import Store

from isthmus.storage.transfer.copy import Copied, Copy, Options
from isthmus.storage.transfer.plan import Plan

MIB = 1 << 20
TREE = {
    "part-00000.bin": 21 * MIB + 3,
    "deep/er/part-00001.bin": 5 * MIB,
    "small.txt": 10,
    "empty": 0,
    "uni ü/x+y &=%#~'.bin": 70_001,
}
"""Name -> size. With parts of 5 MiB: five parts, one, ..."""
QUICK = Options(part_bytes=5 * MIB, parallel=4, budget_s=5.0, stall_s=20.0)


def make_tree(root: Path, sizes: Mapping[str, int] = TREE, seed: int = 1) -> Path:
    """Files of random bytes."""
    chance = random.Random(seed)
    for name, size in sizes.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(size))
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Name -> bytes of all files below a folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def fetched(store: Store, prefix: str) -> dict[str, bytes]:
    """Name -> bytes of all files below `prefix` of a store's bucket, by the cloud's own client."""
    base = prefix.rstrip("/") + "/"
    found = {}
    if store.root.startswith("s3://"):
        import boto3

        client = boto3.client("s3", endpoint_url=store.endpoint)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=store.bucket, Prefix=base):
            for row in page.get("Contents", ()):
                answer = client.get_object(Bucket=store.bucket, Key=row["Key"])
                found[row["Key"].removeprefix(base)] = answer["Body"].read()
        return found
    from azure.storage.blob import BlobServiceClient
    from servers import connection_string

    container = BlobServiceClient.from_connection_string(
        connection_string(store.endpoint)
    ).get_container_client(store.bucket)
    for blob in container.list_blobs(name_starts_with=base):
        found[blob.name.removeprefix(base)] = container.download_blob(blob.name).readall()
    return found


def copied(
    source: str | Path, target: str | Path, state: Path, options: Options = QUICK
) -> tuple[Plan, Copied]:
    """Plans and copies."""
    with Copy(str(source), str(target), options, state) as one:
        plan = one.plan()
        return plan, one.run(plan)


def planned(source: str | Path, target: str | Path, state: Path, options: Options = QUICK) -> Plan:
    """Only plans."""
    with Copy(str(source), str(target), options, state, dry=True) as one:
        return one.plan()
