"""What an encode job (a recipe with `encode`) needs beside what every job does: its source, its destination, its encoders.

Offline: places that a cloud's job can reach. Online, from where the launch is: a source with something in it, a destination
without a dataset of another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from isthmus.backends.rules import Rule
from isthmus.backends.spec import Capability, Finding, Job
from isthmus.core.recipe.encoding import Encode
from isthmus.errors import IsthmusError, NotInstalled, StorageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

PLACE = Rule(
    id="encode.place",
    level="error",
    title="an encode job's source or destination on the launcher's machine",
    why="The job runs elsewhere: it reads and writes s3://, az://, abfss:// and, for the source, https://. `encode.access` may have "
    "its cloud mount or copy the source; data.access is of training.",
    fix="`isthmus data copy` brings pictures into a store",
    exit_code=2,
)
CHANNEL = Rule(
    id="encode.channel",
    level="error",
    title="a source that the job's backend cannot mount or copy",
    why="`encode.access: mount` and `download` make the source an input of the job: SageMaker's FastFile or File channel, Azure ML's "
    "ro_mount or download. An input is a folder in the cloud's own store: no single file, no numbered files, no web server.",
    fix="encode.access: stream",
    exit_code=2,
)
OTHER_CLOUD = Rule(
    id="encode.other-cloud",
    level="warning",
    title="a source or destination in another cloud than the job",
    why="The job's identity is its own cloud's, so the other store's credentials must reach it by the image or the environment, "
    "and every byte pays egress.",
    fix="`isthmus data copy` the pictures to the job's cloud, or encode where they are and copy the latents, which are smaller",
)
MODEL = Rule(
    id="encode.model",
    level="error",
    title="an encoder in a folder of the launcher's machine",
    why="The job loads the autoencoder and the text encoders where it runs.",
    fix="a hub name, or a URI: encoders.autoencoder.source: s3://bucket/vae",
    exit_code=2,
)
MODEL_IN_IMAGE = Rule(
    id="encode.model-in-image",
    level="warning",
    title="an encoder at an absolute path",
    why="The job finds it only if the image holds it there.",
    fix="a hub name or a URI, unless the image has it",
)
ISOLATED = Rule(
    id="encode.isolated",
    level="error",
    title="an encode job without a network",
    why="It reads its pictures and writes its shards in a store, by requests of its own.",
    fix="backends.sagemaker.network_isolation: false; a VPC with an S3 endpoint keeps it off the internet",
)
SOURCE = Rule(
    id="encode.source",
    level="error",
    title="a source that is not there, or with nothing in it",
    why="Looked at before machines are paid for; which pictures can be used, the job finds out.",
    fix="a folder or URI of pictures, tars, parquet or arrow files",
    exit_code=2,
)
DEST = Rule(
    id="encode.dest",
    level="error",
    title="a destination that holds a dataset",
    why="A dataset is never overwritten.",
    fix="another destination, or remove that one",
    exit_code=2,
)
UNSEEN = Rule(
    id="encode.unseen",
    level="warning",
    title="a source or destination that cannot be looked at from here",
    why="A store behind a private endpoint may refuse this machine and serve the job.",
    fix="launch from where the store can be reached, or go on",
)
RULES = (PLACE, CHANNEL, OTHER_CLOUD, MODEL, MODEL_IN_IMAGE, ISOLATED, SOURCE, DEST, UNSEEN)

_OWN = {"azure": ("az", "abfs", "abfss"), "sagemaker": ("s3",)}
"""Schemes of a cloud's own stores."""
_STORES = ("s3", "az", "abfs", "abfss")
_FILES = (".tar", ".parquet", ".arrow", ".csv", ".jsonl")
"""Ends of the names of sources that are one file."""
BEGUN = "encode/begun.json"
"""In the run directory once the run has made a plan at its destination."""


def lint(job: Job, capabilities: frozenset[Capability]) -> Iterator[Finding]:
    """What is wrong offline. A backend of this machine reaches whatever the launcher does."""
    section = job.recipe.encode
    if section is None:
        return
    yield from _channel(job, section, attached=Capability.ATTACHED in capabilities)
    if Capability.ATTACHED in capabilities:
        return
    for field, uri in _places(section):
        scheme, separator, _ = uri.partition("://")
        readable = (*_STORES, "https") if field == "encode.source" else _STORES
        if not separator or scheme not in readable:
            what = "a web server" if scheme in ("http", "https") and separator else "a path of this machine"
            cannot = "read it" if field == "encode.source" else "write there"
            yield PLACE.found(f"{field} {uri} is {what}; a job on {job.backend} cannot {cannot}")
        elif scheme in _STORES and scheme not in _OWN.get(job.backend, _STORES):
            yield OTHER_CLOUD.found(f"{field} {uri} is not in {job.backend}'s cloud")
    if getattr(job.settings, "network_isolation", False):
        yield ISOLATED.found(f"backends.{job.backend}.network_isolation is true")
    encoders = job.recipe.encoders
    models: list[tuple[str, str, str]]
    models = [(f"encoders.text.{at}.source", one.source, one.kind) for at, one in enumerate(encoders.text)]
    models.append(("encoders.autoencoder.source", encoders.autoencoder.source, encoders.autoencoder.kind))
    for field, source, kind in models:
        if kind in ("patch_pca", "minilm") or "://" in source.removeprefix("file://"):
            continue
        if source.startswith("/"):
            yield MODEL_IN_IMAGE.found(f"{field} is {source}")
        elif source.startswith((".", "~", "file://")) or "/" not in source.strip("/"):
            yield MODEL.found(f"{field} {source} is a folder of this machine")


def _channel(job: Job, section: Encode, *, attached: bool) -> Iterator[Finding]:
    """Whether the source can be what `encode.access` says."""
    uri = str(section.source)
    scheme, separator, _ = uri.partition("://")
    if section.access == "stream" or (attached and not separator):
        return  # a path of this machine is read as a mount is
    said = f"encode.access is {section.access}, and "
    if job.backend not in _OWN:
        yield CHANNEL.found(f"{said}{job.backend} mounts and copies nothing: {uri}")
    elif not separator:
        return  # told as a place
    elif scheme not in _OWN[job.backend]:
        yield CHANNEL.found(f"{said}encode.source {uri} is not in {job.backend}'s own store")
    elif "{" in uri:
        yield CHANNEL.found(f"{said}encode.source {uri} names numbered files, not a folder")
    elif uri.lower().endswith(_FILES):
        yield CHANNEL.found(
            f"{said}encode.source {uri} is one file, not a folder",
            "name its folder; or encode.access: stream",
        )


def look(job: Job) -> list[Finding]:
    """What is wrong with the places of an encode job, seen from here."""
    section = job.recipe.encode
    if section is None:
        return []
    found: list[Finding] = []
    for rule, check in ((SOURCE, _source), (DEST, _dest)):
        try:
            found += check(job, section)
        except (StorageError, NotInstalled) as error:
            told = f"{error.where}: {error.message}" if error.where else error.message
            found.append(UNSEEN.found(f"cannot be looked at from here: {told}", error.hint))
        except IsthmusError as error:
            found.append(Finding.of(rule.id, error))
    return found


def _places(section: Encode) -> list[tuple[str, str]]:
    assert isinstance(section.source, str)
    assert isinstance(section.dest, str)
    return [("encode.source", section.source), ("encode.dest", section.dest)]


def _source(job: Job, section: Encode) -> Iterator[Finding]:
    uri = str(section.source)
    if uri == "emoji" or "{" in uri or uri.startswith(("http://", "https://")):
        return  # numbered files of a server that lists nothing: the job opens each
    store, path = filesystems.filesystem(uri)
    with filesystems.storage_errors("list", uri):
        store.invalidate_cache()
        if store.isfile(path):
            return
        try:
            listed = any(islice(store.walk(path), 1)) and bool(store.ls(path, detail=False))
        except FileNotFoundError:
            listed = False
    if not listed:
        yield SOURCE.found(f"encode.source: there is nothing at {uri}")


def _dest(job: Job, section: Encode) -> Iterator[Finding]:
    uri = filesystems.join(str(section.dest), "manifest.json")
    store, path = filesystems.filesystem(uri)
    with filesystems.storage_errors("read", uri):
        store.invalidate_cache()
        there = store.exists(path)
    if there and RunDirectory(job.run_uri).read_file(BEGUN) is None:
        yield DEST.found(f"encode.dest: {section.dest} holds a dataset already")
