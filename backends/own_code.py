"""The recipe's own code at a launch: packaged by content hash, and kept over a run's restarts unless asked otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.backends.spec import Finding
from isthmus.core.packaging import Package, digest_of, pack
from isthmus.core.recipe import Recipe
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory


def packaged(recipe: Recipe, known: RunDirectory | None) -> Package | None:
    """The code of a launch.

    Args:
        recipe: resolved.
        known: the run directory of a run that is launched again under its id, which keeps its code.

    Raises:
        UsageError: the folder cannot be packaged, or is not the code that the run was begun with.
    """
    if recipe.code is None:
        return None
    if digest_of(recipe.code) is not None:
        raise UsageError("names the hash of a run's code", where="code", hint="name the folder")
    package = pack(recipe.code)
    before = _sha256(known.read_run_json()) if known is not None else None
    if known is not None and before not in (None, package.sha256):
        raise UsageError(
            f"is not the code that the run was begun with ({str(before)[:12]}, now {package.sha256[:12]})",
            where=f"code {recipe.code}",
            hint=f"`isthmus resume RUN` goes on with its own, with --set code={recipe.code} it takes this one",
        )
    return package


def resumed(
    recipe: Recipe, run: Mapping[str, Any], overrides: Sequence[str], changes: dict[str, Any]
) -> tuple[Package | None, Recipe, list[Finding]]:
    """The code of a resumed run: its own, or with ``--set code=FOLDER`` another, which `changes` then tells.

    Args:
        recipe: resolved, with the overrides.
        run: run.json.

    Returns:
        What is to be put into the run directory, the recipe with the code's hash, and what the user should know.
    """
    if recipe.code is None:
        return None, recipe, []
    before = _sha256(run)
    if before is None or any(override.partition("=")[0].strip() == "code" for override in overrides):
        package = packaged(recipe, None)
        assert package is not None
        changes.pop("code", None)
        if before != package.sha256:
            changes["code"] = [before and f"sha256:{before}", package.reference]
        return package, referred(recipe, package), notes(package)
    return None, recipe.model_copy(update={"code": f"sha256:{before}"}), _unlike(recipe.code, before)


def referred(recipe: Recipe, package: Package | None) -> Recipe:
    """The recipe as the job gets it: with the hash in place of the folder."""
    return recipe if package is None else recipe.model_copy(update={"code": package.reference})


def notes(package: Package | None) -> list[Finding]:
    """What was packaged."""
    if package is None:
        return []
    size = f"{len(package.data) / 1e3:.3g} kB"
    message = f"code {package.folder}: {len(package.files)} files, {size}, sha256 {package.sha256[:12]}"
    if package.left_out:
        shown = ", ".join(package.left_out[:5]) + (", ..." if len(package.left_out) > 5 else "")
        message += f"; left out: {shown}"
    return [Finding("code.packaged", "note", message)]


def _unlike(folder: str, before: str) -> list[Finding]:
    """Tells a user whose folder has changed that the run goes on without the changes."""
    try:
        now = pack(folder).sha256
    except UsageError:
        return []  # resumed from another machine, or in the middle of editing
    if now == before:
        return []
    message = f"code {folder} has changed; the run goes on with what it was begun with"
    return [Finding("code.changed", "warning", message, f"--set code={folder} takes the changes")]


def _sha256(run: Mapping[str, Any]) -> str | None:
    known = run.get("code")
    return str(known["sha256"]) if isinstance(known, dict) and "sha256" in known else None
