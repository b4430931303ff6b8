"""The same copy in the words of azcopy, rclone or s5cmd, for whoever would rather use them. Pure; nothing is started.

Each is two commands where there is a manifest: all the rest, then what says that all is there.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from isthmus.errors import UsageError
from isthmus.storage import filesystems
from isthmus.storage.ranges.settings import AZURE_SCHEMES, S3, AzureAccount, container_and_path
from isthmus.storage.transfer.plan import MANIFEST

TOOLS = ("azcopy", "rclone", "s5cmd")


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a copy."""

    kind: str
    """local, s3 or azure."""
    bucket: str
    path: str
    account: AzureAccount | None = None

    @property
    def s3(self) -> str:
        return f"s3://{self.bucket}/{self.path}".rstrip("/")


def commands(
    tool: str,
    source: str,
    target: str,
    *,
    environment: Mapping[str, str],
    parallel: int = 16,
    bandwidth: float | None = None,
    delete: bool = False,
    manifest: bool = True,
) -> str:
    """What to type into a shell.

    Args:
        tool: azcopy, rclone or s5cmd.
        environment: where endpoints, region and account are found; no secret of it is printed.
        bandwidth: bytes a second.
        manifest: whether the source has a manifest, which is to be written last.

    Raises:
        UsageError: the tool cannot do it, or an unknown tool.
    """
    if tool not in TOOLS:
        raise UsageError(f"no tool {tool!r}", where="--command", hint=f"one of {', '.join(TOOLS)}")
    one, other = _end(source, environment), _end(target, environment)
    make = {"azcopy": _azcopy, "rclone": _rclone, "s5cmd": _s5cmd}[tool]
    found = make(one, other, S3.of(environment), parallel, bandwidth, delete, manifest)
    return " &&\n".join(shlex.join(words) for words in found)


def _end(uri: str, environment: Mapping[str, str]) -> _End:
    scheme = filesystems.scheme_of(uri)
    if scheme == "file":
        return _End("local", "", str(filesystems.local_path(uri)))
    bucket, path = container_and_path(uri)
    if scheme == "s3":
        return _End("s3", bucket, path)
    if scheme in AZURE_SCHEMES:
        return _End("azure", bucket, path, AzureAccount.of(uri, environment))
    raise UsageError(f"{scheme}:// cannot be copied", where=uri)


def _azcopy(
    one: _End, other: _End, s3: S3, parallel: int, bandwidth: float | None, delete: bool, manifest: bool
) -> list[list[str]]:
    if (
        other.kind == "s3"
        or (one.kind == "s3" and other.kind == "local")
        or (one.kind, other.kind) == ("local", "local")
    ):
        raise UsageError(
            "azcopy copies into Azure and out of it",
            where="--command azcopy",
            hint="rclone and s5cmd know S3",
        )
    if one.kind == "s3" and s3.endpoint:
        raise UsageError(
            "azcopy reads S3 of AWS only", where="--command azcopy", hint="rclone takes an endpoint"
        )
    if one.kind == "s3" and delete:
        raise UsageError(
            "azcopy does not delete what S3 no longer has", where="--command azcopy", hint="use rclone"
        )
    more = [f"--cap-mbps={bandwidth * 8 / 1e6:.0f}"] if bandwidth else []
    more += (
        ["--put-md5"]
        if one.kind == "local"
        else ["--check-md5=FailIfDifferent"]
        if other.kind == "local"
        else []
    )
    settings = ["env", f"AZCOPY_CONCURRENCY_VALUE={parallel}"]
    here, there = _azcopy_url(one), _azcopy_url(other)
    left_out = [f"--exclude-pattern={MANIFEST}"] if manifest else []
    if one.kind == "s3":
        # `sync` does not know S3.
        first = [
            "azcopy",
            "copy",
            f"{here}/*",
            there,
            "--recursive",
            "--overwrite=ifSourceNewer",
            *left_out,
            *more,
        ]
    else:
        first = [
            "azcopy",
            "sync",
            here,
            there,
            f"--delete-destination={str(delete).lower()}",
            *left_out,
            *more,
        ]
    found = [[*settings, *first]]
    if manifest:
        found.append(["azcopy", "copy", f"{here}/{MANIFEST}", f"{there}/{MANIFEST}"])
    return found


def _azcopy_url(end: _End) -> str:
    if end.kind == "local":
        return end.path
    path = quote(f"{end.bucket}/{end.path}".rstrip("/"), safe="/-_.~$")
    if end.account is not None:
        return f"{end.account.endpoint}/{path}"
    return f"https://s3.amazonaws.com/{path}"


def _rclone(
    one: _End, other: _End, s3: S3, parallel: int, bandwidth: float | None, delete: bool, manifest: bool
) -> list[list[str]]:
    here, there = _rclone_remote(one, s3), _rclone_remote(other, s3)
    more = [f"--transfers={parallel}", "--checksum"]
    if bandwidth:
        more.append(f"--bwlimit={bandwidth:.0f}B")
    verb = "sync" if delete else "copy"
    found = [["rclone", verb, here, there, *([f"--exclude=/{MANIFEST}"] if manifest else []), *more]]
    if manifest:
        found.append(["rclone", "copyto", f"{here}/{MANIFEST}", f"{there}/{MANIFEST}", "--checksum"])
    return found


def _rclone_remote(end: _End, s3: S3) -> str:
    """A remote that needs no configuration; values are quoted as rclone's manual has it ("Connection strings")."""
    if end.kind == "local":
        return end.path
    options: dict[str, str] = {}
    if end.account is not None:
        kind = "azureblob"
        options = {"account": end.account.name, "env_auth": "true"}
        if not end.account.endpoint.endswith(".blob.core.windows.net"):
            options["endpoint"] = end.account.endpoint
    else:
        kind = "s3"
        options = {"provider": "Other" if s3.endpoint else "AWS", "env_auth": "true"}
        if s3.region:
            options["region"] = s3.region
        if s3.endpoint:
            options["endpoint"] = s3.endpoint
        if s3.anonymous:
            options["env_auth"] = "false"
    words = ",".join(f"{name}={_quoted(value)}" for name, value in options.items())
    return f":{kind},{words}:{end.bucket}/{end.path}".rstrip("/")


def _quoted(value: str) -> str:
    if any(character in value for character in ",:\"'= "):
        return '"' + value.replace('"', '""') + '"'
    return value


def _s5cmd(
    one: _End, other: _End, s3: S3, parallel: int, bandwidth: float | None, delete: bool, manifest: bool
) -> list[list[str]]:
    if "azure" in {one.kind, other.kind} or one.kind == other.kind == "local":
        raise UsageError(
            "s5cmd knows S3 and this machine only", where="--command s5cmd", hint="use rclone or azcopy"
        )
    if bandwidth:
        raise UsageError("s5cmd has no limit on the bandwidth", where="--command s5cmd", hint="use rclone")
    for end in (one, other):
        if end.kind == "s3" and set(end.path) & set("*?[]"):
            raise UsageError("s5cmd would take the path for a pattern", where=end.s3, hint="use rclone")
    head = ["s5cmd", f"--numworkers={parallel}"]
    if s3.endpoint:
        head.append(f"--endpoint-url={s3.endpoint}")
    if s3.anonymous:
        head.append("--no-sign-request")
    here = f"{one.path}/" if one.kind == "local" else f"{one.s3}/*"
    there = f"{other.path}/" if other.kind == "local" else f"{other.s3}/"
    base = one.path if one.kind == "local" else one.s3
    first = [
        *head,
        "sync",
        *(["--delete"] if delete else []),
        *([f"--exclude={MANIFEST}"] if manifest else []),
        here,
        there,
    ]
    found = [first]
    if manifest:
        found.append([*head, "cp", f"{base}/{MANIFEST}", f"{there}{MANIFEST}"])
    return found
