"""S3 as the machines around a container use it: list a prefix, download it, upload folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.emulators.sagemaker.requests import split_uri


def placed(client: Any, uri: str) -> Iterator[tuple[str, str, str]]:
    """Bucket, key and place below the target folder, of every object whose key begins with the URI's.

    A prefix is no folder: `s3://b/run-1` also means the objects of run-10. Their place is what follows the prefix.
    """
    bucket, prefix = split_uri(uri)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            key = entry["Key"]
            place = key[len(prefix) :].lstrip("/") or key.rpartition("/")[2]
            if place and not key.endswith("/"):
                yield bucket, key, place


def download(client: Any, objects: list[tuple[str, str, str]], folder: Path) -> None:
    """Downloads objects to their places below a folder."""
    for bucket, key, place in objects:
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(target))


def files(folder: Path) -> Iterator[Path]:
    """Every file below a folder; those that vanish meanwhile may be among them."""
    if folder.is_dir():
        yield from (path for path in sorted(folder.rglob("*")) if path.is_file())
