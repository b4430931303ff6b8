"""What every backend's launch looks at before anything starts: data, run directory, memory. Imports no torch.

A cloud's own preflight asks the cloud; these look at what the cloud cannot know. They look from where the launch is, which
may be outside of the network that the job is in: what cannot be looked at from here is a warning, what is wrong an error.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.backends import encoding
from isthmus.backends.places import uris
from isthmus.backends.rules import Rule
from isthmus.backends.spec import Finding, Job
from isthmus.core.recipe.dump import recipe_hash
from isthmus.core.recipe.hub import is_hub
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import (
    DatasetMismatch,
    DatasetNotFound,
    IsthmusError,
    NotInstalled,
    StorageError,
    UsageError,
)
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

RUN_DIRECTORY = Rule(
    id="preflight.run-directory",
    level="error",
    title="a run directory that cannot be written, or holds a run of another recipe",
    why="All that is known of a run is in it: the launcher writes it before it submits. Two recipes in one directory would "
    "make one run of two.",
    fix="another run_directory or --run-id; `az login` or `aws sso login` for a store that refuses",
)
DATA = Rule(
    id="preflight.data",
    level="error",
    title="no latent dataset, another one than the run's, or one that does not fit the recipe",
    why="Read before anything starts: the manifest, its fingerprint when the run goes on, the encoders it was made with, the "
    "latents of each stage's resolution, and the memory that the sample order needs on each rank.",
    fix="encode one with `isthmus data encode`, or correct data.sources",
    exit_code=2,
)
DATA_UNSEEN = Rule(
    id="preflight.data-unseen",
    level="warning",
    title="data that cannot be looked at from here",
    why="A store behind a private endpoint may refuse this machine and serve the job; whether there is a dataset is then seen "
    "only when the job has started.",
    fix="run `isthmus doctor` where the store can be reached",
)
INIT_FROM = Rule(
    id="preflight.init-from",
    level="error",
    title="`model.init_from` names no folder",
    why="The first weights are read from it; what is in it, the trainer looks at.",
    fix="a folder or URI of a diffusers checkpoint",
    exit_code=2,
)
MEMORY = Rule(
    id="preflight.memory",
    level="error",
    title="a stage that does not fit into a GPU",
    why="Weights, gradients, optimizer, EMA, working copies and activations of one rank are added up against the GPU's "
    "memory; the message shows the sum.",
    fix="a smaller micro_batch_size, activation_checkpointing, or fsdp",
)
RULES = (RUN_DIRECTORY, DATA, DATA_UNSEEN, INIT_FROM, MEMORY)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is looked at."""

    rule: Rule
    title: str
    """What is so where nothing is found."""
    look: Callable[[Job], Sequence[Finding] | None]

    @property
    def id(self) -> str:
        """Of its rule."""
        return self.rule.id


def check_data(recipe: Recipe, world_size: int, fingerprints: Sequence[str] = ()) -> None:
    """Every dataset is there, was made with the recipe's encoders, has the stages' latents, and fits in memory.

    Args:
        fingerprints: of the training datasets that the run was begun with; none: it begins now.

    Raises:
        DatasetNotFound, DatasetMismatch, UsageError, StorageError.
    """
    from isthmus.storage.shards import open_dataset
    from isthmus.storage.stream.stage import StageReader

    autoencoder = recipe.encoders.autoencoder
    datasets = []
    for source in [*recipe.data.sources, *recipe.validation.sources]:
        dataset = open_dataset(source.uri if isinstance(source.uri, str) else list(source.uri))
        dataset.check_encoders(
            {
                encoder.name: (encoder.max_tokens, encoder.width, encoder.pooled_width)
                for encoder in recipe.encoders.text
            },
            kind=autoencoder.kind,
            latent_channels=autoencoder.latent_channels,
            factor=autoencoder.factor,
        )
        datasets.append(dataset)
    training = datasets[: len(recipe.data.sources)]
    now = [dataset.fingerprint for dataset in training]
    if fingerprints and list(fingerprints) != now and not recipe.data.allow_changed:
        raise DatasetMismatch(
            "the data is not the run's: its fingerprint changed since the run began",
            where=training[0].uri,
            hint="name the run's data, or --set data.allow_changed=true",
        )
    names = {bucket for dataset in training for bucket in dataset.manifest.rows}
    buckets = sorted(names | {bucket for dataset in training for bucket in dataset.spec.buckets})
    for number, stage in enumerate(recipe.stages):
        StageReader(
            number,
            stage.resolution,
            training,
            [source.repeat for source in recipe.data.sources],
            buckets,
            seed=recipe.seed,
            lanes=recipe.data.lanes,
            shuffle_window=recipe.data.shuffle_window,
        ).check_memory(recipe.data.memory_limit, world_size, stage.global_batch_size)


def check_init_from(recipe: Recipe) -> None:
    """The folder that a run's first weights come from is there; what is in it, the trainer looks at."""
    place = recipe.model.init_from
    if place is None or (isinstance(place, str) and is_hub(place)):
        return
    if isinstance(place, str) and filesystems.is_local(place) and not filesystems.local_path(place).is_dir():
        raise UsageError(
            "no such folder",
            where=f"model.init_from {place}",
            hint="a folder or URI of a diffusers checkpoint",
        )


def check_run_directory(job: Job) -> None:
    """It can be written, and holds no run of another recipe."""
    run = RunDirectory(job.run_uri)
    if job.attempt == 1:
        run.check_same_recipe(recipe_hash(job.source))
    probe = f"events/.probe-{secrets.token_hex(4)}"
    place = run.local_path("events")
    missing = [] if place is None else [folder for folder in (place, *place.parents) if not folder.exists()]
    try:
        run.write_file(probe, b"")
        run.remove_file(probe)
    finally:
        # A launch that is refused after all leaves no empty folders.
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _data(job: Job) -> list[Finding]:
    recipe = job.recipe
    places = ", ".join(uri for source in recipe.data.sources for uri in uris(source))
    try:
        fingerprints: Sequence[str] = ()
        run = RunDirectory(job.run_uri)
        if job.attempt > 1 and run.exists():
            fingerprints = run.read_run_json().get("dataset_fingerprints") or ()
        check_data(recipe, job.world_size, fingerprints)
    except DatasetNotFound as error:
        return [Finding.of(DATA.id, error)]
    except (StorageError, NotInstalled) as error:
        message = f"the data at {places} cannot be looked at from here: {error.message}"
        return [DATA_UNSEEN.found(message, error.hint)]
    return []


def _memory(job: Job) -> list[Finding]:
    from isthmus.core.models.memory import memory_fit

    found = []
    for number, stage in enumerate(job.recipe.stages):
        fit = memory_fit(job.recipe, number)
        if fit is None:
            continue
        title = f"stage {stage.name}: {fit.arithmetic()}"
        if fit.fits:
            found.append(Finding(MEMORY.id, "note", title))
        else:
            found.append(MEMORY.found(title, fit.change or "a GPU with more memory: compute.gpu"))
    return found


def _run_directory(job: Job) -> None:
    check_run_directory(job)


def _init_from(job: Job) -> None:
    check_init_from(job.recipe)


CHECKS = (
    Check(RUN_DIRECTORY, "run directory can be written and is this run's", _run_directory),
    Check(DATA, "data is a latent dataset made with the recipe's encoders, and fits", _data),
    Check(INIT_FROM, "first weights are there", _init_from),
    Check(MEMORY, "model, optimizer, EMA and activations fit a GPU", _memory),
)
"""In the order that they are made; the cheap and fatal ones first."""
ENCODE_CHECKS = (CHECKS[0], Check(encoding.SOURCE, "source is there, destination is free", encoding.look))
"""Of an encode job."""


def look(job: Job) -> list[tuple[Check, list[Finding]]]:
    """What each check finds; nothing where all is well."""
    found = []
    for check in CHECKS if job.recipe.encode is None else ENCODE_CHECKS:
        try:
            findings = list(check.look(job) or [])
        except IsthmusError as error:
            findings = [Finding.of(check.id, error)]
        found.append((check, findings))
    return found
