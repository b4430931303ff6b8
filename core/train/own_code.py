"""A run's own code on every rank, and whether their denoisers are the same."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from isthmus.core.models.bringing import bring
from isthmus.core.models.denoisers import find
from isthmus.core.models.presets import CLASSES
from isthmus.core.packaging import Package, digest_of, pack
from isthmus.core.recipe.schema import Recipe
from isthmus.core.train.agreement import everywhere, on_rank_0, shared
from isthmus.errors import PluginError, UsageError
from isthmus.storage.rundir import RunDirectory


def bring_code(recipe: Recipe, run: RunDirectory) -> None:
    """Bring the recipe's `code`, if it has any, into every rank, and see that a team's own family is there.

    A launcher has put the code into the run directory and the hash into the recipe. Without one (a trainer that was
    started by hand) rank 0 does both, and refuses a folder that has changed since the run began.

    Raises:
        UsageError, StorageError, DataError, PluginError: on all ranks, see `core/packaging.py` and `bring`.
    """
    code, family = recipe.code, recipe.model.family
    if code is not None:
        digest = on_rank_0(lambda: digest_of(code) or _packaged(code, run).sha256)
        everywhere(lambda: bring(run, digest))
    if family not in CLASSES:
        everywhere(lambda: _findable(family))


def _findable(family: str) -> None:
    find(family)


def _packaged(folder: str, run: RunDirectory) -> Package:
    package = pack(folder)
    known = run.read_run_json().get("code") or {}
    before = known.get("sha256")
    if before not in (None, package.sha256):
        raise changed(folder, str(before), package.sha256)
    run.write_file(package.name, package.data)
    run.update_run_json(code=package.facts())
    return package


def changed(folder: str, before: str, now: str) -> UsageError:
    """The refusal of another code than the run's."""
    return UsageError(
        f"is not the code that the run was begun with ({before[:12]}, now {now[:12]})",
        where=f"code {folder}",
        hint=f"isthmus resume RUN goes on with the run's own; with --set code={folder} it takes this one",
    )


def check_same_weights(denoiser: nn.Module, recipe: Recipe) -> None:
    """Refuses a team's own denoiser whose first weights differ between ranks: shards of different models are none."""
    if recipe.model.family in CLASSES:
        return

    def fingerprint() -> str:
        digest = hashlib.sha256()
        with torch.no_grad():
            for name, weight in denoiser.state_dict().items():
                figures = weight.double()
                digest.update(
                    f"{name}{tuple(weight.shape)}{figures.sum().item()}{figures.square().sum().item()}".encode()
                )
        return digest.hexdigest()

    found = everywhere(fingerprint)
    other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
    if other is not None:
        raise shared(
            PluginError(
                f"build gave rank {other} other weights than rank 0",
                where=f"model.family {recipe.model.family}",
                hint="draw them from torch's generator, which is seeded alike on every rank",
            )
        )
