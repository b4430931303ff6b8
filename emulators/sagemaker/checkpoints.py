"""The mirror of the checkpoint folder in S3: restored before a start, kept up to date while it runs, deletions too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus.emulators.sagemaker.bucket import download, files, placed
from isthmus.emulators.sagemaker.requests import split_uri


class Mirror:
    """One host's checkpoint folder. Several hosts that write the same name overwrite one another, as on the service."""

    def __init__(self, client: Any, uri: str, folder: Path) -> None:
        self._client = client
        self._uri = uri
        self._folder = folder
        self._known: dict[Path, tuple[int, int]] = {}
        """File -> modification time and size of what is in S3."""

    def restore(self) -> None:
        """Downloads what lies below the prefix; without a `/` at its end that includes siblings."""
        download(self._client, list(placed(self._client, self._uri)), self._folder)
        self._known = self._state()

    def _state(self) -> dict[Path, tuple[int, int]]:
        state = {}
        for path in files(self._folder):
            try:
                now = path.stat()
            except FileNotFoundError:
                continue
            state[path] = (now.st_mtime_ns, now.st_size)
        return state

    def sync(self) -> None:
        """Uploads what is new or changed, deletes in S3 what this host had and has no more."""
        bucket, prefix = split_uri(self._uri)
        now = self._state()
        for path in self._known.keys() - now.keys():
            self._client.delete_object(Bucket=bucket, Key=self._key(prefix, path))
        for path, state in now.items():
            if self._known.get(path) != state:
                try:
                    self._client.upload_file(str(path), bucket, self._key(prefix, path))
                except FileNotFoundError:
                    continue
        self._known = now

    def _key(self, prefix: str, path: Path) -> str:
        return f"{prefix.rstrip('/')}/{path.relative_to(self._folder).as_posix()}".lstrip("/")
