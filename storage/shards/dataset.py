"""Opens a latent dataset: manifest, index, the embeddings beside the shards, and where each file is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.errors import DataError, DatasetMismatch, DatasetNotFound, StorageError, UsageError
from isthmus.storage.filesystems import FileSystem, filesystem, join, storage_errors
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.spec import Ranges
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.files import parse_text_file
from isthmus.storage.shards.index import Index, parse_index
from isthmus.storage.shards.manifest import MAX_MANIFEST_BYTES, Manifest, parse_manifest
from isthmus.storage.shards.spec import DatasetSpec, TextColumn

MAX_SIDE_FILE_BYTES = 1 << 31


@dataclass
class Dataset:
    """A latent dataset that was opened; holds no open files until one is read."""

    roots: tuple[str, ...]
    """Where its files are; the first holds the manifest and the files beside the shards."""
    manifest: Manifest
    index: Index
    places: Mapping[str, str] = field(default_factory=dict, repr=False)
    """File name -> root, when there are several roots."""

    @property
    def spec(self) -> DatasetSpec:
        """Encoders, resolutions, captions, buckets."""
        return self.manifest.spec

    @property
    def uri(self) -> str:
        """The first root."""
        return self.roots[0]

    @property
    def fingerprint(self) -> str:
        """sha256 of the index: what a run records and a resume checks."""
        return self.manifest.fingerprint

    def root(self, name: str) -> str:
        """The root that one of the dataset's files lies below."""
        return self.places.get(name, self.roots[0])

    def file_uri(self, name: str) -> str:
        """The URI of one of the dataset's files."""
        return join(self.root(name), name)

    @cached_property
    def _readers(self) -> dict[str, Ranges]:
        return {root: open_ranges(root) for root in self.roots}

    def ranges(self, name: str) -> Ranges:
        """A reader of one of the dataset's files, with the usual patience. For this process alone."""
        return self._readers[self.root(name)]

    @cached_property
    def null_text(self) -> dict[str, TextColumn]:
        """Encoder -> the embedding of the empty caption, one row."""
        return self._text(names.NULL_TEXT)[0]

    @cached_property
    def _prompt_file(self) -> tuple[dict[str, TextColumn], list[str]]:
        return self._text(names.PROMPTS)

    @property
    def prompts(self) -> list[str]:
        """The validation prompts whose embeddings are stored."""
        return self._prompt_file[1]

    @property
    def prompt_text(self) -> dict[str, TextColumn]:
        """Encoder -> the embeddings of `prompts`, one row each."""
        return self._prompt_file[0]

    def _text(self, name: str) -> tuple[dict[str, TextColumn], list[str]]:
        where = join(self.uri, name)
        try:
            return parse_text_file(self.spec, read_side_file(self.uri, name, self.manifest))
        except ValueError as error:
            raise DataError(f"not embeddings of this dataset: {error}", where=where) from None

    def check_encoders(
        self,
        text: Mapping[str, tuple[int, int, int | None]],
        *,
        kind: str | None = None,
        latent_channels: int | None = None,
        factor: int | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Checks that the dataset was made with these encoders; what is None or absent is not compared.

        Args:
            text: encoder name -> (max_tokens, width, pooled_width). A pooled width of None means it is not used.
            kind: of the autoencoder, with `latent_channels` and `factor`.
            fingerprints: encoder name, or `autoencoder` -> fingerprint.

        Raises:
            DatasetMismatch: lists everything that differs.
        """
        stored = {encoder.name: encoder for encoder in self.spec.text}
        autoencoder = self.spec.autoencoder
        problems = []
        for name, (max_tokens, width, pooled_width) in text.items():
            if name not in stored:
                problems.append(f"no text encoder {name}, it has {', '.join(stored)}")
                continue
            told = {"max_tokens": max_tokens, "width": width}
            if pooled_width is not None:
                told["pooled_width"] = pooled_width
            problems += [
                f"{name}.{setting} is {getattr(stored[name], setting)}, not {value}"
                for setting, value in told.items()
                if getattr(stored[name], setting) != value
            ]
        asked = {"kind": kind, "latent_channels": latent_channels, "factor": factor}
        problems += [
            f"autoencoder.{setting} is {getattr(autoencoder, setting)}, not {value}"
            for setting, value in asked.items()
            if value is not None and getattr(autoencoder, setting) != value
        ]
        known = {name: encoder.fingerprint for name, encoder in stored.items()}
        known["autoencoder"] = autoencoder.fingerprint
        problems += [
            f"{name} has fingerprint {known.get(name, '')[:12]}, not {value[:12]}"
            for name, value in (fingerprints or {}).items()
            if known.get(name) != value
        ]
        if problems:
            raise DatasetMismatch(
                "the dataset was made with other encoders: " + "; ".join(problems),
                where=self.uri,
                hint="encode it again with the recipe's encoders, or name the dataset's in the recipe",
            )


def open_dataset(uri: str | Sequence[str]) -> Dataset:
    """Opens the dataset at a root, or one whose shards are spread over several (the manifest is in the first).

    Raises:
        DatasetNotFound: there is no manifest.
        DataError: manifest or index is damaged.
    """
    roots = (uri,) if isinstance(uri, str) else tuple(uri)
    if not roots:
        raise UsageError("a dataset needs a place")
    manifest = read_manifest(roots[0])
    data = read_side_file(roots[0], names.INDEX, manifest)
    index = parse_index(data, manifest, join(roots[0], names.INDEX))
    places: dict[str, str] = {}
    if len(roots) > 1:
        for root in reversed(roots):
            places |= dict.fromkeys(_list(root, deep=manifest.columns is not None), root)
    return Dataset(roots, manifest, index, places)


def _list(root: str, *, deep: bool) -> list[str]:
    """The names of the files at a root; `deep`: those in its folders, too, which only foreign datasets have."""
    store, path = filesystem(root)
    try:
        with storage_errors("list", root):
            listed = store.find(path) if deep else store.ls(path, detail=False)
            if deep and not listed and not store.exists(path):
                raise FileNotFoundError
    except FileNotFoundError:
        raise DatasetNotFound("no such place", where=root) from None
    base = path.rstrip("/") + "/"
    return [str(entry).removeprefix(base) if deep else str(entry).rpartition("/")[2] for entry in listed]


def read_manifest(uri: str) -> Manifest:
    """The manifest of the dataset at `uri`."""
    where = join(uri, names.MANIFEST)
    store, path = filesystem(uri)
    try:
        with storage_errors("read", where), store.open(f"{path}/{names.MANIFEST}", "rb") as file:
            data = bytes(file.read(MAX_MANIFEST_BYTES + 1))
    except (FileNotFoundError, StorageError) as error:
        if isinstance(error, StorageError) and not isinstance(error.__cause__, NotADirectoryError):
            raise
        _say_unfinished(uri, store, path)
        raise DatasetNotFound(
            "no latent dataset here (there is no manifest.json)",
            where=uri,
            hint="encode one with `isthmus data encode`, or correct the place: data.sources, validation.sources",
        ) from None
    return parse_manifest(data, where)


def _say_unfinished(uri: str, store: FileSystem, path: str) -> None:
    """DatasetNotFound when a dataset was begun here: whoever writes one keeps a plan beside it until it is whole."""
    for folder, command in (("_encode", "encode"), ("_rewrite", "repack, merge, split or filter")):
        try:
            with storage_errors("read", uri):
                there = store.exists(f"{path}/{folder}/plan.json")
        except StorageError:
            return
        if there:
            raise DatasetNotFound(
                f"no latent dataset here yet: it was begun by `isthmus data {command}` and is not finished",
                where=uri,
                hint="run that command again: it goes on where it was",
            )


def read_side_file(uri: str, name: str, manifest: Manifest) -> bytes:
    """A file beside the shards, checked against the manifest. DataError when it is absent or another."""
    where = join(uri, name)
    entry = manifest.files.get(name)
    if entry is None or entry.size > MAX_SIDE_FILE_BYTES:
        raise DataError("the manifest does not list it, or with an impossible size", where=where)
    store, path = filesystem(uri)
    try:
        with storage_errors("read", where), store.open(f"{path}/{name}", "rb") as file:
            data = bytes(file.read(entry.size + 1))
    except FileNotFoundError:
        raise DataError("the file is missing", where=where) from None
    if len(data) != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise DataError("its contents are not those that the manifest lists", where=where)
    return data
