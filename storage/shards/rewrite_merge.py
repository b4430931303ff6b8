"""What several datasets have in common, or why they cannot become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from isthmus.errors import DatasetMismatch, UsageError
from isthmus.storage.filesystems import filesystem, join, storage_errors
from isthmus.storage.shards import manifest as names
from isthmus.storage.shards.dataset import Dataset, read_side_file
from isthmus.storage.shards.files import text_file
from isthmus.storage.shards.rewrite_plan import Shapes
from isthmus.storage.shards.spec import DatasetSpec, FieldSpec, TextColumn

PATCH_PCA_FILES = ("autoencoder.safetensors", "config.json")
_MAX_EXTRA = 1 << 26
_ROUNDING = 0.02
"""Of the largest value: how far null embeddings of the same encoder may differ, that other hardware rounded."""


def common_spec(datasets: Sequence[Dataset]) -> tuple[DatasetSpec, Shapes]:
    """The spec that fits all datasets, and the latent shapes of all their buckets.

    Raises:
        DatasetMismatch: encoders, captions, resolutions, shapes or null embeddings differ; lists everything.
    """
    first = datasets[0]
    problems: list[str] = []
    for other in datasets[1:]:
        problems += [f"{other.uri}: {difference}" for difference in _differences(first, other)]
    resolutions = tuple(sorted({r for dataset in datasets for r in dataset.spec.resolutions}))
    shapes: dict[str, dict[int, tuple[int, int, int]]] = {}
    for dataset in datasets:
        for size in sorted({size for sizes in dataset.manifest.rows.values() for size in sizes}):
            lacks = [r for r in resolutions if r <= size and r not in dataset.spec.resolutions]
            if lacks:
                problems.append(f"{dataset.uri}: its pictures of {size} px have no latents at {lacks} px")
        for bucket, by_resolution in dataset.manifest.latent_shapes.items():
            for resolution, shape in by_resolution.items():
                told = shapes.setdefault(bucket, {}).setdefault(resolution, shape)
                if told != shape:
                    problems.append(
                        f"{dataset.uri}: bucket {bucket} at {resolution} px is {list(shape)}, not {list(told)}"
                    )
    fields: dict[str, FieldSpec] = {}
    for dataset in datasets:
        for own in dataset.spec.fields:
            kind = fields.setdefault(own.name, own).kind
            if kind != own.kind:
                problems.append(f"{dataset.uri}: field {own.name} is of kind {own.kind}, not {kind}")
    if problems:
        raise DatasetMismatch(
            "the datasets cannot become one: " + "; ".join(problems[:8]),
            where=first.uri,
            hint="encode them with the same encoders and data.buckets, or list them as sources of one recipe",
        )
    spec = DatasetSpec(
        autoencoder=first.spec.autoencoder,
        text=first.spec.text,
        resolutions=resolutions,
        captions=first.spec.captions,
        buckets=tuple(dict.fromkeys(b for dataset in datasets for b in dataset.spec.buckets)),
        fields=tuple(fields.values()),
    )
    return spec, shapes


def _differences(first: Dataset, other: Dataset) -> list[str]:
    found = []
    mine, theirs = asdict(first.spec.autoencoder), asdict(other.spec.autoencoder)
    found += [
        f"autoencoder.{name} is {_short(theirs[name])}, not {_short(value)}"
        for name, value in mine.items()
        if theirs[name] != value
    ]
    encoders = {encoder.name: encoder for encoder in other.spec.text}
    for encoder in first.spec.text:
        told = encoders.pop(encoder.name, None)
        if told is None:
            found.append(f"it has no text encoder {encoder.name}")
            continue
        theirs = asdict(told)
        found += [
            f"{encoder.name}.{name} is {_short(theirs[name])}, not {_short(value)}"
            for name, value in asdict(encoder).items()
            if theirs[name] != value
        ]
    found += [f"it has another text encoder, {name}" for name in encoders]
    if first.spec.captions != other.spec.captions:
        found.append(f"it has {other.spec.captions} captions a sample, not {first.spec.captions}")
    return found or _other_null(first.null_text, other.null_text)


def _other_null(mine: Mapping[str, TextColumn], theirs: Mapping[str, TextColumn]) -> list[str]:
    for name, column in mine.items():
        other = theirs[name]
        pairs = [(column.tokens, other.tokens)]
        if column.pooled is not None and other.pooled is not None:
            pairs.append((column.pooled, other.pooled))
        for a, b in pairs:
            a32, b32 = a.astype(np.float32), b.astype(np.float32)
            if float(np.abs(a32 - b32).max()) > _ROUNDING * float(np.abs(a32).max()):
                return [f"its null embedding of {name} is another one"]
    return []


def _short(value: object) -> str:
    return f"{value[:12]}" if isinstance(value, str) else str(value)


def side_files(datasets: Sequence[Dataset], spec: DatasetSpec) -> dict[str, bytes]:
    """The files beside the shards, but for the index: of one dataset as they are; of several put together."""
    found = {}
    for name in (names.NULL_TEXT, names.PROMPTS, names.REJECTED):
        data = [_side_file(dataset, name) for dataset in datasets]
        if name == names.REJECTED:
            found[name] = b"".join(
                part + (b"\n" if part and not part.endswith(b"\n") else b"") for part in data
            )
        elif name == names.PROMPTS and len(set(data)) > 1:
            found[name] = _prompts(datasets, spec)
        else:
            found[name] = data[0]
    return found


def _side_file(dataset: Dataset, name: str) -> bytes:
    if name in dataset.manifest.files:
        return read_side_file(dataset.uri, name, dataset.manifest)
    if name == names.NULL_TEXT:
        raise UsageError("the dataset has no null embedding", where=dataset.uri)
    return b"" if name == names.REJECTED else text_file(dataset.spec, {}, 0, {"prompt": []})


def _prompts(datasets: Sequence[Dataset], spec: DatasetSpec) -> bytes:
    """The prompts of all datasets, each once."""
    places: dict[str, tuple[Dataset, int]] = {}
    for dataset in datasets:
        for row, prompt in enumerate(dataset.prompts):
            places.setdefault(prompt, (dataset, row))
    text = {}
    for encoder in spec.text:
        rows = [(dataset.prompt_text[encoder.name], row) for dataset, row in places.values()]
        if not rows:
            continue
        pooled = [c.pooled[row] for c, row in rows if c.pooled is not None]
        text[encoder.name] = TextColumn(
            np.stack([column.tokens[row] for column, row in rows]),
            np.array([column.length[row] for column, row in rows], np.int32),
            np.stack(pooled) if pooled else None,
        )
    return text_file(spec, text, len(places), {"prompt": list(places)})


def extras(datasets: Sequence[Dataset]) -> dict[str, bytes]:
    """A patch_pca autoencoder that was fitted to the pictures lies in a folder of the dataset: its files, by name."""
    if datasets[0].spec.autoencoder.kind != "patch_pca":
        return {}
    for dataset in datasets:
        store, path = filesystem(dataset.uri)
        with storage_errors("list", dataset.uri):
            listed = store.ls(path, detail=True)
        folders = [str(entry["name"]).rstrip("/") for entry in listed if entry["type"] == "directory"]
        for folder in sorted(folders):
            found = {}
            for name in PATCH_PCA_FILES:
                where = join(dataset.uri, folder.rpartition("/")[2], name)
                try:
                    with storage_errors("read", where):
                        if int(store.info(f"{folder}/{name}")["size"]) > _MAX_EXTRA:
                            break
                        found[f"{folder.rpartition('/')[2]}/{name}"] = store.cat_file(f"{folder}/{name}")
                except FileNotFoundError:
                    break
            if len(found) == len(PATCH_PCA_FILES):
                return found
    return {}
