"""Pictures and captions -> a dataset of latents and text embeddings, in one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from isthmus.core.encode.ahead import default_threads, prepared
from isthmus.core.encode.batches import batches, fit_patch_pca
from isthmus.core.encode.behind import WriteBehind
from isthmus.core.encode.buckets import bucket_table, latent_multiple
from isthmus.core.encode.captions import CaptionEncoder, finite_columns
from isthmus.core.encode.job import Progress, Reporter, UnitJob
from isthmus.core.encode.ledger import Ledger, digest
from isthmus.core.encode.pieces import Unit, items_of, units_of
from isthmus.core.encode.planning import (
    DEFAULT_CAPTIONS,
    asked_of,
    begin_plan,
    fingerprints_of,
    is_whole,
    share_of,
    spec_of,
    wait_for_plan,
)
from isthmus.core.encode.pretrained import on_gpu, require_torch
from isthmus.core.encode.sharing import Claims, shared
from isthmus.core.encode.sources import ImageSource
from isthmus.core.recipe.encoding import UNIT_BYTES
from isthmus.errors import UsageError

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder
    from isthmus.core.encode.text import TextEncoderRunner
    from isthmus.core.recipe.schema import Recipe
    from isthmus.storage.shards import DatasetSpec, Manifest

__all__ = ["DEFAULT_CAPTIONS", "UNIT_BYTES", "Progress", "Team", "encode", "encode_share"]

UNIT_PIECES = 20_000
"""Of a unit; its bytes are :data:`UNIT_BYTES`."""


class Team(Claims, Protocol):
    """The ranks of a job, as :func:`encode_share` sees them."""

    def began(self, asked: str) -> bool:
        """Whether this job began the encoding of that digest: a whole dataset is then its own."""

    def begin(self, asked: str, plan: Mapping[str, Any], done: Sequence[Mapping[str, Any] | None]) -> None:
        """Rank 0 has a plan; `done` are the records of the units of before."""

    def wait(self) -> None:
        """Between two looks for the others' units. Raises IsthmusError when they are gone."""


def encode(source: ImageSource, dest_uri: str, recipe: Recipe, **options: Any) -> Manifest:
    """Encodes a whole source on this rank alone; see :func:`encode_share`."""
    manifest = encode_share(source, dest_uri, recipe, **options)
    if manifest is None:
        raise UsageError("this is the share of one rank of several: encode_share", where=dest_uri)
    return manifest


def encode_share(
    source: ImageSource,
    dest_uri: str,
    recipe: Recipe,
    *,
    captions: int | None = None,
    autoencoder: Autoencoder | None = None,
    device: str = "auto",
    bf16: bool = False,
    batch_size: int = 32,
    rows_per_group: int | None = None,
    rows_per_shard: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    restart: bool = False,
    threads: int | None = None,
    unit_bytes: int = UNIT_BYTES,
    unit_pieces: int = UNIT_PIECES,
    progress: Callable[[Progress], None] | None = None,
    interval: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    team: Team | None = None,
) -> Manifest | None:
    """Encodes a rank's share of a source for a recipe's model; the rank that ends last makes the dataset whole.

    Every resolution of the recipe's stages that a picture reaches without being enlarged is written, so that one
    pass serves all stages. Pictures are not mirrored. The same source and settings give the same bytes on the same
    machine, whatever the number of ranks and however often they were killed and started again: the source is cut into units,
    each is encoded by itself, and one that was not finished is encoded again. Memory does not grow with the number of
    pictures.

    Args:
        source: the pictures; the first 10,000 are read twice when a patch_pca autoencoder is fitted.
        dest_uri: a folder or URI that holds no dataset yet, or one that was begun with the same settings.
        recipe: says the encoders, the stages' resolutions, the buckets and the validation prompts.
        captions: stored for each picture; by default the most that any has, up to `DEFAULT_CAPTIONS`. A picture
            with fewer repeats its own, one with more keeps the first ones, or those of most weight.
        autoencoder: takes the place of the recipe's. Held-out pictures need the patch_pca of the training
            pictures; one of their own would have other latents.
        device: a torch device for the encoders; `auto` is the first GPU, or the CPU.
        bf16: run the encoders in bfloat16; fp32 otherwise, and never fp16.
        batch_size: pictures that are encoded together.
        rows_per_group: rows of a block in the most frequent bucket; by default about 10 MB, and no more than a
            lane's share of the shuffle window. Rarer buckets have smaller blocks.
        rows_per_shard: by default about 1.5 GB.
        rank: this one, of
        ranks: how many encode at the same time. Rank 0 makes the plan, the others wait for it. Each has its share of the units;
            those of a team that are done with theirs take over what others have not begun.
        restart: forget what was done here with other settings, or from a source that has changed.
        threads: that decode and resize ahead of the encoders; by default as `default_threads` says.
        unit_bytes, unit_pieces: of a unit, at most, but for a piece that is larger by itself.
        progress: called every `interval` seconds of `clock`, and at the end.
        team: the ranks of a job, which end together; then rank 0 makes the dataset whole and every rank returns it.

    Returns:
        The manifest of the written dataset; None when other ranks are still at work.

    Raises:
        UsageError: there is a dataset already, or one begun otherwise; the recipe and the encoders disagree; no picture
            could be used.
        DataError: the null embedding or a validation prompt's is not finite; the source changes; a table is damaged.
        StorageError: a store refuses. What was done stays, and the same call goes on from there.
        NotInstalled: torch or the model libraries are missing.
    """
    require_torch("encoding")
    from isthmus.core.encode.autoencoders import load_autoencoder, patch_pca_folder
    from isthmus.core.encode.text import load_text_encoders
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.shards.parts import PartWriter

    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} of {ranks}: ranks count from 0")
    if restart and ranks > 1:
        raise UsageError("--restart is for one rank", hint="remove the folder _encode, then start all ranks")
    if captions is not None and not 1 <= captions <= 64:
        raise UsageError(f"captions must be from 1 to 64, not {captions}")
    table = bucket_table(
        recipe.data.buckets, [stage.resolution for stage in recipe.stages], latent_multiple(recipe)
    )
    units = units_of(source, max_bytes=unit_bytes, max_pieces=unit_pieces)
    section = recipe.encoders.autoencoder
    settings = [captions, bf16, batch_size, rows_per_group, rows_per_shard]
    asked = asked_of(source, units, recipe, table, settings, autoencoder)
    ledger = Ledger(dest_uri)
    finished = _finished(dest_uri, ledger, asked, team)
    if finished is not None:
        return finished
    plan = ledger.plan()
    if plan is None or plan["asked"] != asked or restart:
        if rank:
            plan = wait_for_plan(ledger, asked)
            if plan is None:
                return open_dataset(dest_uri).manifest
        else:
            if plan is not None and ledger.done() and not restart:
                raise UsageError(
                    "another encoding was begun here: with other settings, or the source has changed",
                    where=dest_uri,
                    hint="--restart forgets it; or choose another folder",
                )
            plan = None
    survey = source.survey() if plan is None else None
    if autoencoder is None:
        if section.kind != "patch_pca" or plan is not None:
            autoencoder = load_autoencoder(section, dest_uri, device=device, bf16=bf16)
        else:
            autoencoder = fit_patch_pca(
                source, table, factor=section.factor, latent_channels=section.latent_channels
            )
    text = load_text_encoders(recipe, device=device, bf16=bf16)
    encoders = (autoencoder, list(text.values()), table)
    if survey is not None:
        plan = begin_plan(dest_uri, ledger, asked, encoders, survey, recipe)
        if section.kind == "patch_pca":
            autoencoder.save(patch_pca_folder(section, dest_uri))
        plan = ledger.begin(plan)
    assert plan is not None
    pictures = recipe.data.pictures
    spec = spec_of(*encoders, plan["captions"], pictures)
    if plan["fingerprints"] != fingerprints_of(spec):
        raise UsageError(
            "the encoders are not those that this encoding was begun with",
            where=dest_uri,
            hint="--restart forgets what was done; or choose another folder",
        )
    reporter = Reporter(progress, interval, clock)
    threads = threads or default_threads(on_gpu=on_gpu(device))
    done = ledger.done()
    if team is not None and is_whole(dest_uri):
        # The others were faster than this rank's encoders could be loaded, and the ledger may be gone: that nothing in it is
        # done would be no reason to begin.
        return open_dataset(dest_uri).manifest
    mine = [unit for unit in units if unit.number % ranks == rank]
    own = [unit for unit in mine if unit.number not in done or ledger.record(unit.number, plan) is None]
    reporter.progress.expected = share_of(plan["pictures"], own, units)
    if team is not None and rank == 0:
        team.begin(digest(asked), plan, [ledger.record(number, plan) for number in sorted(done)])
    again = done - {unit.number for unit in own}
    for unit in own if team is None or ranks == 1 else shared(units, again, rank, ranks, team):
        writer = PartWriter(
            dest_uri,
            spec,
            unit.number,
            len(units),
            rows_per_group=plan["rows_per_group"],
            rows_per_shard=plan["rows_per_shard"],
        )
        with writer:
            # Nothing is remembered from one unit to the next: its bytes are its own.
            ready = prepared(
                items_of(source, unit),
                table,
                threads=threads,
                ahead=2 * batch_size + threads,
                phash=pictures.phash,
            )
            with WriteBehind(writer) as behind:
                job = UnitJob(behind, autoencoder, CaptionEncoder(text), plan["captions"], reporter)
                for batch in batches(ready, batch_size, job.reject):
                    job.write(batch)
            record = writer.seal()
        ledger.commit(unit.number, plan, {**record, **job.record()})
    while True:
        manifest = None
        if team is None or rank == 0:
            manifest = _finish(
                dest_uri, ledger, plan, units, spec, text, reporter, recipe, source.description
            )
        elif is_whole(dest_uri):
            manifest = open_dataset(dest_uri).manifest
        if manifest is not None or team is None:
            return manifest
        team.wait()


def _finished(dest_uri: str, ledger: Ledger, asked: dict[str, Any], team: Team | None) -> Manifest | None:
    """The dataset that is there already, when it is this one and at most the tidying is left.

    Raises:
        UsageError: it is another one.
    """
    from isthmus.storage.shards import open_dataset

    if not is_whole(dest_uri):
        return None
    plan = ledger.plan()
    ours = team is not None and team.began(digest(asked))
    if (plan is None and not ours) or (plan is not None and plan["asked"] != asked):
        raise UsageError(
            f"{dest_uri} holds a dataset already", hint="choose another folder, or remove that one"
        )
    ledger.remove()
    return open_dataset(dest_uri).manifest


def _finish(
    dest_uri: str,
    ledger: Ledger,
    plan: dict[str, Any],
    units: Sequence[Unit],
    spec: DatasetSpec,
    text: dict[str, TextEncoderRunner],
    reporter: Reporter,
    recipe: Recipe,
    description: str,
) -> Manifest | None:
    """Makes the dataset whole when every unit is done; whichever rank sees that may do it, to the same bytes."""
    from isthmus.storage.shards.parts import assemble

    records = []
    if len(ledger.done()) == len(units):
        found = [ledger.record(unit.number, plan) for unit in units]
        records = [record for record in found if record is not None]
    if len(records) < len(units):
        reporter.report(final=True)
        try:
            return _finished(dest_uri, ledger, plan["asked"], None)  # another rank may just have done it
        except UsageError:
            return None
    now = reporter.progress
    total = Progress(
        written=sum(record["written"] for record in records),
        captions_left_out=sum(record["captions_left_out"] for record in records),
    )
    for record in records:
        for reason, count in record["counts"].items():
            total.rejected[reason] = total.rejected.get(reason, 0) + count
        for counts, own in ((total.told, record["told"]), (total.unfit, record["unfit"])):
            for name, count in own.items():
                counts[name] = counts.get(name, 0) + count
    total.before = total.written + sum(total.rejected.values()) - now.written - sum(now.rejected.values())
    rejected = [item for record in records for item in record["rejected"]]
    if not total.written:
        ledger.remove()
        raise UsageError(
            f"no picture could be used: {_counts(total.rejected) or 'the source is empty'}",
            hint="; ".join(f"{item['key']}: {item['detail'] or item['reason']}" for item in rejected[:3])
            or None,
        )
    prompts = list(recipe.validation.prompts)
    manifest = assemble(
        dest_uri,
        spec,
        records,
        null_text=finite_columns(text, [""], "the null embedding"),
        prompts=prompts,
        prompt_text=finite_columns(text, prompts, "a validation prompt's embedding"),
        rejected=rejected,
        source=description,
    )
    ledger.remove()
    reporter.progress = total
    reporter.report(final=True)
    return manifest


def _counts(rejected: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items()))
