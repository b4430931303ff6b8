"""The commands of other tools: exact words, safe in a shell, and refused where the tool cannot do it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from transfers import contents, make_tree

from isthmus.errors import UsageError
from isthmus.storage.transfer.commands import commands

AWS = {"AWS_REGION": "eu-west-1"}
BLOB = "az://data@account.blob.core.windows.net/set one"
NASTY = '/data/it\'s; rm -rf $HOME `x` "y" *'


def words(text: str) -> list[list[str]]:
    """Each command as the shell would split it."""
    return [shlex.split(part) for part in text.split(" &&\n")]


def test_azcopy_into_blob() -> None:
    first, last = words(
        commands("azcopy", NASTY, BLOB, environment={}, parallel=32, bandwidth=200e6, delete=True)
    )
    url = "https://account.blob.core.windows.net/data/set%20one"
    assert first == [
        *("env", "AZCOPY_CONCURRENCY_VALUE=32", "azcopy", "sync", NASTY, url),
        *("--delete-destination=true", "--exclude-pattern=manifest.json", "--cap-mbps=1600", "--put-md5"),
    ]
    assert last == ["azcopy", "copy", f"{NASTY}/manifest.json", f"{url}/manifest.json"]


def test_azcopy_from_s3() -> None:
    first, _ = words(commands("azcopy", "s3://bucket/a b", BLOB, environment=AWS))
    assert first[2:6] == [
        *("azcopy", "copy", "https://s3.amazonaws.com/bucket/a%20b/*"),
        "https://account.blob.core.windows.net/data/set%20one",
    ]
    assert "--overwrite=ifSourceNewer" in first


def test_rclone_between_the_clouds() -> None:
    first, last = words(
        commands("rclone", "s3://bucket/a b", BLOB, environment=AWS, bandwidth=2e8, delete=True)
    )
    s3 = ":s3,provider=AWS,env_auth=true,region=eu-west-1:bucket/a b"
    blob = ":azureblob,account=account,env_auth=true:data/set one"
    assert first == [
        *("rclone", "sync", s3, blob, "--exclude=/manifest.json"),
        *("--transfers=16", "--checksum", "--bwlimit=200000000B"),
    ]
    assert last == ["rclone", "copyto", f"{s3}/manifest.json", f"{blob}/manifest.json", "--checksum"]


def test_s5cmd() -> None:
    environment = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    first, last = words(commands("s5cmd", NASTY, "s3://bucket/x", environment=environment, delete=True))
    head = ["s5cmd", "--numworkers=16", "--endpoint-url=http://127.0.0.1:9"]
    assert first == [*head, "sync", "--delete", "--exclude=manifest.json", f"{NASTY}/", "s3://bucket/x/"]
    assert last == [*head, "cp", f"{NASTY}/manifest.json", "s3://bucket/x/manifest.json"]
    (only,) = words(commands("s5cmd", "s3://bucket/x", "/data", environment={}, manifest=False))
    assert only == ["s5cmd", "--numworkers=16", "sync", "s3://bucket/x/*", "/data/"]


def test_no_secret_is_printed() -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AZURE_STORAGE_CONNECTION_STRING": "AccountName=account;AccountKey=YS1zZWNyZXQ=;",
        "AZURE_STORAGE_SAS_TOKEN": "sig=a-secret",
    }
    for tool in ("azcopy", "rclone"):
        text = commands(tool, "s3://bucket/x", "az://data/x", environment=environment)
        assert not [value for value in ("secret", "AKIA", "YS1z") if value in text]


@pytest.mark.parametrize(
    ("tool", "source", "target", "more"),
    [
        ("azcopy", "/data", "s3://bucket/x", {}),
        ("azcopy", "/data", "/other", {}),
        ("azcopy", "s3://bucket/x", BLOB, {"delete": True}),
        ("s5cmd", "/data", BLOB, {}),
        ("s5cmd", "/data", "s3://bucket/x", {"bandwidth": 1e6}),
        ("s5cmd", "s3://bucket/x*", "/data", {}),
        ("gsutil", "/data", "s3://bucket/x", {}),
    ],
)
def test_what_a_tool_cannot_do_is_refused(
    tool: str, source: str, target: str, more: dict[str, object]
) -> None:
    with pytest.raises(UsageError):
        commands(tool, source, target, environment={}, **more)  # type: ignore[arg-type]


def test_rclone_does_it_when_a_shell_is_given_the_words(tmp_path: Path) -> None:
    import shutil

    if shutil.which("rclone") is None:
        pytest.skip("apt-get install rclone")
    tree = make_tree(
        tmp_path / "it's a $HOME", {"manifest.json": 9, "sub dir/x": 100, "sub dir/manifest.json": 7}
    )
    text = commands("rclone", str(tree), str(tmp_path / "there"), environment={})
    subprocess.run(["bash", "-c", text], check=True, capture_output=True)
    assert contents(tmp_path / "there") == contents(tree)
