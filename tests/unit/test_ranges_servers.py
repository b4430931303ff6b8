"""The servers that other tests stand on are what they say."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import faulty as faults
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers import StartNginx, Store


def get(url: str, span: tuple[int, int] | None = None, timeout: float = 5) -> tuple[int, bytes]:
    headers = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_faulty_folder_answers_ranges_and_fails_as_told(
    tmp_path: Path, faulty: Callable[[Path | str], faults.FaultyServer]
) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "a").write_bytes(data)
    server = faulty(tmp_path)
    url = f"{server.url}/a"
    assert get(url, (10, 50)) == (206, data[10:50])
    assert get(url)[1] == data
    assert get(f"{server.url}/b")[0] == 404
    assert get(url, (20_000, 20_001))[0] == 416

    server.fail(faults.slow_down(retry_after=1))
    server.fail(faults.flipped(), times=1)
    assert get(url, (0, 100))[0] == 503
    assert get(url, (0, 100))[1] != data[:100]
    assert get(url, (0, 100)) == (206, data[:100])

    server.fail(faults.truncated(honest=False))
    with pytest.raises(http.client.IncompleteRead):
        get(url, (0, 1000))
    server.fail(faults.truncated(honest=True))
    assert len(get(url, (0, 1000))[1]) == 500
    server.fail(faults.reset())
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        get(url, (0, 1000))
    server.fail(faults.stall())
    with pytest.raises(TimeoutError):
        get(url, (0, 1000), timeout=0.2)

    with server.away(), pytest.raises(urllib.error.URLError):
        get(url)
    assert get(url, (0, 10)) == (206, data[:10])
    assert server.requests[0].headers["Range"] == "bytes=10-49"


def test_nginx_delays_each_answer(tmp_path: Path, nginx: StartNginx) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    url = nginx(tmp_path, delay_s=0.05)
    began = time.monotonic()
    assert get(f"{url}/a", (0, 10)) == (206, b"x" * 10)
    assert time.monotonic() - began >= 0.05


def test_moto_and_azurite_keep_what_is_put(s3: Store, blob: Store) -> None:
    import fsspec

    for store, options in (
        (s3, {"endpoint_url": s3.endpoint}),
        (blob, {"connection_string": blob.environment["AZURE_STORAGE_CONNECTION_STRING"]}),
    ):
        store.put("a", b"hello")
        filesystem, path = fsspec.core.url_to_fs(store.root, **options)
        assert filesystem.cat_file(f"{path}/a") == b"hello"
