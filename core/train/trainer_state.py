"""What a checkpoint holds beside its tensors, and whether it belongs to the run that reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from isthmus.errors import CheckpointError, DatasetMismatch
from isthmus.storage import filesystems

STATE_FILE = "trainer.json"
CHANGED_DATA_HINT = "data that has changed needs a new run, or data.allow_changed: true"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must share with the run that reads it."""

    model: str
    """Hash of the diffusers class and its configuration."""
    datasets: tuple[str, ...]
    """Fingerprints of the sources, in order."""
    recipe_version: int


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state beside the tensors. The data's state is the step and the plan."""

    identity: Identity
    step: int = 0
    """Optimizer steps done over all stages."""
    stage: int = -1
    """The stage last entered; -1 before the first."""
    samples: int = 0
    """Samples trained on."""
    skipped: int = 0
    """Steps skipped because a loss or gradient was not finite."""
    skipped_in_a_row: int = 0
    ema_updates: int = 0
    world_size: int = 1
    """Of the run that wrote it; any may read it."""
    stages: tuple[tuple[str, int, int], ...] = ()
    """Name, steps and global batch size of each stage of the recipe that wrote it; empty in older checkpoints."""
    losses: tuple[float, ...] = ()
    """The newest, where loss spikes are watched for: a resumed run judges the next one as it would have."""

    def but(self, **changes: Any) -> TrainerState:
        """A copy with changes."""
        return replace(self, **changes)


def check_identity(
    uri: str, written: Identity, wanted: Identity, *, allow_changed_data: bool = False
) -> None:
    """Raise what tells a checkpoint of another model, dataset or recipe format."""
    if written.model != wanted.model:
        raise CheckpointError(
            "is of another model configuration",
            where=uri,
            hint="choose another run directory for another model",
        )
    if written.datasets != wanted.datasets and not allow_changed_data:
        raise DatasetMismatch(
            f"was trained on datasets {_short(written.datasets)}, the recipe's are {_short(wanted.datasets)}",
            where=uri,
            hint=CHANGED_DATA_HINT,
        )
    if written.recipe_version != wanted.recipe_version:
        raise CheckpointError(
            f"was written under recipe version {written.recipe_version}, this is {wanted.recipe_version}",
            where=uri,
        )


def read_state(uri: str) -> TrainerState:
    """The trainer's state in a checkpoint. Raises CheckpointError when it cannot be read."""
    files, path = filesystems.filesystem(uri)
    try:
        found = json.loads(files.cat_file(f"{path}/{STATE_FILE}"))
        identity = found.pop("identity")
        known = {field.name for field in fields(TrainerState)}
        identity["datasets"] = tuple(identity["datasets"])
        found["stages"] = tuple(
            (str(name), int(steps), int(batch)) for name, steps, batch in found.get("stages", ())
        )
        found["losses"] = tuple(float(loss) for loss in found.get("losses", ()))
        return TrainerState(
            identity=Identity(**identity), **{key: value for key, value in found.items() if key in known}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{STATE_FILE} cannot be read: {error}", where=uri) from error


def _short(fingerprints: tuple[str, ...]) -> str:
    return ", ".join(fingerprint[:12] for fingerprint in fingerprints) or "none"
