"""What an encoding is asked, and the plan that follows from it: what its ranks agree on, and what a restart goes on from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from isthmus.core.encode.buckets import BucketTable
from isthmus.core.encode.ledger import Ledger
from isthmus.core.encode.pieces import Unit
from isthmus.core.encode.sources import ImageSource, Survey
from isthmus.errors import IsthmusError

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder
    from isthmus.core.encode.text import TextEncoderRunner
    from isthmus.core.recipe.pictures import Pictures
    from isthmus.core.recipe.schema import Recipe
    from isthmus.storage.shards import DatasetSpec

DEFAULT_CAPTIONS = 5
"""Captions kept of a picture unless told otherwise; each adds its embeddings to every sample."""
_PLAN_WAIT_S = 1800.0


def is_whole(dest_uri: str) -> bool:
    """Whether there is a dataset: its manifest is written last."""
    from isthmus.storage.filesystems import filesystem, join, storage_errors

    files, path = filesystem(join(dest_uri, "manifest.json"))
    with storage_errors("read", dest_uri):
        files.invalidate_cache()
        return bool(files.exists(path))


def asked_of(
    source: ImageSource,
    units: Sequence[Unit],
    recipe: Recipe,
    table: BucketTable,
    settings: Sequence[Any],
    given: Autoencoder | None,
) -> dict[str, Any]:
    """All that decides an encoding's bytes, as JSON.

    Args:
        settings: captions, bf16, batch size, rows of a group and of a shard.
        given: the autoencoder that takes the recipe's place.
    """
    return {
        "source": source.description,
        "units": [asdict(unit) for unit in units],
        "encoders": recipe.encoders.model_dump(mode="json"),
        "given_autoencoder": given.fingerprint if given else None,
        "buckets": [[b.name, [[r, *size] for r, size in sorted(b.sizes.items())]] for b in table.buckets],
        "pictures": recipe.data.pictures.model_dump(mode="json"),
        "prompts": list(recipe.validation.prompts),
        "settings": list(settings),
        "window": [recipe.data.shuffle_window, recipe.data.lanes],
    }


def wait_for_plan(ledger: Ledger, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The plan that rank 0 makes; None when the others have made the dataset whole before this rank saw one."""
    end = time.monotonic() + _PLAN_WAIT_S
    while time.monotonic() < end:
        plan = ledger.plan()
        if plan is not None and plan["asked"] == asked:
            return plan
        if is_whole(ledger.uri):
            return None
        time.sleep(0.5)
    raise IsthmusError(
        f"rank 0 made no plan for these settings within {_PLAN_WAIT_S / 60:.0f} minutes",
        where=ledger.uri,
        hint="start it with the same source, recipe and options",
    )


def begin_plan(
    dest_uri: str,
    ledger: Ledger,
    asked: dict[str, Any],
    encoders: tuple[Autoencoder, list[TextEncoderRunner], BucketTable],
    survey: Survey,
    recipe: Recipe,
) -> dict[str, Any]:
    """A plan, in a place that is cleared for it."""
    from isthmus.storage.shards import balanced_row_groups, rows_by_bytes
    from isthmus.storage.shards.parts import remove_shards

    captions, _, _, rows_per_group, rows_per_shard = asked["settings"]
    count = captions or max(1, min(survey.most_captions, DEFAULT_CAPTIONS))
    spec = spec_of(*encoders, count, recipe.data.pictures)
    block, shard = rows_by_bytes(spec)
    # A lane holds at least one block of every bucket: larger ones than its share of the shuffle window would cost
    # memory and shuffle nothing.
    block = max(1, min(block, recipe.data.shuffle_window // recipe.data.lanes))
    groups = balanced_row_groups(_bucket_counts(survey, encoders[2]), rows_per_group or block)
    ledger.remove()
    remove_shards(dest_uri)
    return {
        "asked": asked,
        "captions": count,
        "fingerprints": fingerprints_of(spec),
        "rows_per_group": groups,
        "rows_per_shard": max(rows_per_shard or shard, *groups.values()),
        "pictures": survey.sizes.total() if survey.pictures is None else survey.pictures,
    }


def share_of(pictures: int, own: Sequence[Unit], units: Sequence[Unit]) -> int:
    """Pictures of some units, about: by bytes, where the source tells them."""
    whole = sum(unit.size for unit in units)
    part = sum(unit.size for unit in own) / whole if whole else len(own) / len(units)
    return round(pictures * part)


def fingerprints_of(spec: DatasetSpec) -> dict[str, str]:
    """The autoencoder's fingerprint under no name, each text encoder's under its own."""
    return {"": spec.autoencoder.fingerprint, **{encoder.name: encoder.fingerprint for encoder in spec.text}}


def _bucket_counts(survey: Survey, table: BucketTable) -> dict[str, int]:
    """How many pictures each bucket will have, about."""
    counts = dict.fromkeys((bucket.name for bucket in table.buckets), 0)
    for size, count in survey.sizes.items():
        bucket = table.choose(size)
        if bucket.size_class(size) is not None:
            counts[bucket.name] += count
    return counts


def spec_of(
    autoencoder: Autoencoder,
    text: Sequence[TextEncoderRunner],
    table: BucketTable,
    captions: int,
    pictures: Pictures,
) -> DatasetSpec:
    """What the manifest says of the encoders and the layout."""
    from isthmus.core.encode.hashes import FIELDS
    from isthmus.storage.shards import AutoencoderSpec, DatasetSpec, EncoderSpec, FieldSpec

    fields = [FieldSpec(item.stored, item.kind) for item in pictures.keep]

    return DatasetSpec(
        autoencoder=AutoencoderSpec(
            kind=autoencoder.kind,
            fingerprint=autoencoder.fingerprint,
            latent_channels=autoencoder.latent_channels,
            factor=autoencoder.factor,
            scaling_factor=autoencoder.scaling_factor,
            shift_factor=autoencoder.shift_factor,
        ),
        text=tuple(
            EncoderSpec(
                name=encoder.name,
                max_tokens=encoder.max_tokens,
                width=encoder.width,
                pooled_width=encoder.pooled_width,
                fingerprint=encoder.fingerprint,
            )
            for encoder in text
        ),
        resolutions=table.resolutions,
        captions=captions,
        buckets=tuple(bucket.name for bucket in table.buckets),
        fields=(*fields, *(FieldSpec(name, "text") for name in FIELDS if pictures.phash)),
    )
