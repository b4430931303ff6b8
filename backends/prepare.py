"""From a recipe to a launch that is ready to start: job, findings, native request. Starts and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from isthmus.backends import own_code
from isthmus.backends.registry import LATER, backend_names, get_backend
from isthmus.backends.runs import Record, check_run_id, new_run_id
from isthmus.backends.spec import Backend, Capability, Finding, Job, Rendered
from isthmus.core.packaging import Package
from isthmus.core.recipe import LoadedRecipe, Recipe, parse_recipe, resolve
from isthmus.core.recipe.dump import recipe_data, recipe_hash
from isthmus.errors import IsthmusError, PreflightRefused, RecipeError, StorageError, UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory

_FIXED = ("model", "encoders", "seed", "data.lanes", "data.sources")
"""What a run was begun with: with another of these its weights or its sample order would mean something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch, ready to start."""

    backend: Backend
    job: Job
    rendered: Rendered
    findings: tuple[Finding, ...] = ()
    changes: dict[str, Any] | None = None
    """Of a resumed run's recipe: field -> [before, now]."""
    code: Package | None = None
    """The recipe's own code, to be put into the run directory before the job begins."""


def prepare(
    loaded: LoadedRecipe,
    *,
    backend: str | None = None,
    run_id: str | None = None,
    detach: bool = False,
) -> Launch:
    """A new run, or another attempt of the run with that id and the same recipe.

    Args:
        loaded: as read from the file, with its overrides.
        backend: its name; None: that of the first of `compute.offers`, or `local`.
        run_id: None makes a new one.
        detach: whether it shall go on when the launcher ends, on a backend that can do both.

    Raises:
        UsageError: no such backend, a bad run id; RecipeError: a problem in the backend's section.
    """
    source = loaded.recipe
    name = backend or next((offer.backend for offer in source.compute.offers), "local")
    found = get_backend(name)
    _check_sections(loaded)
    settings = backend_settings(found, loaded)
    resolved = resolve(source, name)
    if name == "local":
        resolved = with_absolute_paths(resolved)
    assert isinstance(resolved.run_directory, str)
    attempt, known = 1, None
    if run_id is None:
        # Nothing can be there, so a dry run needs no network to look.
        run_id = new_run_id(source.name, recipe_hash(source))
        run = RunDirectory(filesystems.join(resolved.run_directory, run_id))
    else:
        run = RunDirectory(filesystems.join(resolved.run_directory, check_run_id(run_id)))
        run.check_same_recipe(recipe_hash(source))
        attempt += len(run.events("submitted"))
        known = run if run.exists() else None
    code = own_code.packaged(resolved, known)
    resolved = own_code.referred(resolved, code)
    launch = _launch(
        found, resolved, source, settings, run_id=run_id, run=run, attempt=attempt, detach=detach
    )
    return replace(launch, code=code, findings=(*launch.findings, *own_code.notes(code)))


def prepare_resume(record: Record, overrides: Sequence[str] = (), *, detach: bool = False) -> Launch:
    """The next attempt of a run, from its newest checkpoint, with changes to its recipe.

    Raises:
        UsageError: a change that would make it another run; names the fields.
    """
    run = RunDirectory.open(record.run_uri)
    data = run.read_run_json()
    # JSON is YAML; the loader applies the overrides and checks the whole again.
    text = json.dumps(data["recipe"])
    before = parse_recipe(text, filename=f"{record.id}/run.json").recipe
    loaded = parse_recipe(text, filename=f"{record.id}/run.json", overrides=overrides)
    changes = recipe_changes(before, loaded.recipe)
    # Asked for, other data is taken; the trainer says what that means.
    fixed = [field for field in _FIXED if field != "data.sources" or not loaded.recipe.data.allow_changed]
    refused = [
        path for path in changes if any(path == field or path.startswith(f"{field}.") for field in fixed)
    ]
    if refused:
        raise UsageError(
            f"a run keeps what it was begun with; changed: {', '.join(refused)}",
            where=record.id,
            hint="launch a new run with that recipe",
        )
    found = get_backend(record.backend)
    settings = backend_settings(found, loaded)
    resolved = resolve(loaded.recipe, record.backend)
    if record.backend == "local":
        # Relative paths meant something where the run was launched, which may not be here.
        resolved = _with_paths_of(resolved, run.read_recipe())
    attempt = len(run.events("submitted")) + 1
    code, resolved, notes = own_code.resumed(resolved, data, overrides, changes)
    launch = _launch(
        found, resolved, loaded.recipe, settings, run_id=record.id, run=run, attempt=attempt, detach=detach
    )
    return replace(launch, changes=changes, code=code, findings=(*launch.findings, *notes))


def _launch(
    backend: Backend,
    resolved: Recipe,
    source: Recipe,
    settings: BaseModel,
    *,
    run_id: str,
    run: RunDirectory,
    attempt: int,
    detach: bool,
) -> Launch:
    if Capability.ATTACHED not in backend.capabilities:
        detach = True
    job = Job(
        recipe=resolved,
        source=source,
        backend=backend.name,
        run_id=run_id,
        run_uri=run.uri,
        settings=settings,
        attempt=attempt,
        detach=detach,
    )
    findings = tuple(backend.lint(job))
    if detach and Capability.DETACHED not in backend.capabilities:
        findings = (
            *findings,
            Finding("detach", "error", f"{backend.name} cannot detach", "leave out --detach", 2),
        )
    return Launch(backend=backend, job=job, rendered=backend.render(job), findings=findings)


def preflight(launch: Launch) -> Launch:
    """The launch with what its backend found by looking; skipped when the lint refuses it already."""
    if any(finding.level == "error" for finding in launch.findings):
        return launch
    return replace(launch, findings=(*launch.findings, *launch.backend.preflight(launch.job)))


def refuse_errors(launch: Launch) -> None:
    """Raises when a finding is an error: StorageError (1), UsageError (2) or PreflightRefused (3), by the first."""
    errors = [finding for finding in launch.findings if finding.level == "error"]
    if not errors:
        return
    kinds: dict[int, type[IsthmusError]] = {1: StorageError, 2: UsageError, 3: PreflightRefused}
    first, *others = errors
    message = first.message + "".join(f"; also: {finding.message}" for finding in others)
    raise kinds.get(first.exit_code, PreflightRefused)(message, hint=first.fix)


def backend_settings(backend: Backend, loaded: LoadedRecipe) -> BaseModel:
    """The recipe's section of a backend, validated by the backend's own model. Raises RecipeError."""
    section = loaded.recipe.backends.get(backend.name, {})
    try:
        return backend.settings.model_validate(section)
    except ValidationError as error:
        from isthmus.core.recipe.explain import explain
        from isthmus.core.recipe.problems import Problem

        lines = []
        for problem in explain(error, backend.settings, section):
            path = ("backends", backend.name, *problem.path)
            place = loaded.where(".".join(str(part) for part in path))
            lines.append(Problem(path, problem.message, problem.hint).line(place))
        raise RecipeError(lines) from None


def _check_sections(loaded: LoadedRecipe) -> None:
    """A section for a backend that nobody has is a typing error, not a wish."""
    from isthmus.core.recipe.problems import closest

    sections = set(loaded.recipe.backends) - set(LATER)
    unknown = sorted(sections - set(backend_names())) if sections else []
    if unknown:
        known = [*backend_names(), *LATER]
        near = closest(unknown[0], known)
        hint = f"did you mean `{near}`?" if near else f"there are {', '.join(known)}"
        place = loaded.where(f"backends.{unknown[0]}")
        raise RecipeError([f"{place}: backends.{unknown[0]}: no such backend ({hint})"])


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """A resolved recipe whose paths on this machine hold in any working directory."""

    def absolute(uri: str) -> str:
        return str(filesystems.local_path(uri)) if filesystems.is_local(uri) else uri

    def sources(listed: Sequence[Any]) -> list[Any]:
        return [
            source.model_copy(update={"uri": [absolute(uri) for uri in _uris(source)]}) for source in listed
        ]

    assert isinstance(recipe.run_directory, str)
    update: dict[str, Any] = {
        "data": recipe.data.model_copy(update={"sources": sources(recipe.data.sources)}),
        "run_directory": absolute(recipe.run_directory),
    }
    if isinstance(recipe.model.init_from, str):
        update["model"] = recipe.model.model_copy(update={"init_from": absolute(recipe.model.init_from)})
    if recipe.validation.sources:
        held_out = sources(recipe.validation.sources)
        update["validation"] = recipe.validation.model_copy(update={"sources": held_out})
    return recipe.model_copy(update=update)


def _with_paths_of(recipe: Recipe, resolved_text: str) -> Recipe:
    """The recipe with the data and run directory of the one that the run was resolved to."""
    old = parse_recipe(resolved_text, filename="recipe.yaml").recipe
    update: dict[str, Any] = {
        "data": recipe.data.model_copy(update={"sources": old.data.sources}),
        "run_directory": old.run_directory,
        "model": recipe.model.model_copy(update={"init_from": old.model.init_from}),
    }
    if recipe.validation.sources:
        # Held-out data may change on a resume; the training data may not.
        same = len(old.validation.sources) == len(recipe.validation.sources)
        sources = old.validation.sources if same else with_absolute_paths(recipe).validation.sources
        update["validation"] = recipe.validation.model_copy(update={"sources": sources})
    return recipe.model_copy(update=update)


def _uris(source: Any) -> list[str]:
    return [source.uri] if isinstance(source.uri, str) else list(source.uri)


def recipe_changes(before: Recipe, now: Recipe) -> dict[str, list[Any]]:
    """Dotted field -> [before, now], for each field that differs; an absent one is None."""
    old, new = _flat(recipe_data(before)), _flat(recipe_data(now))
    return {
        path: [old.get(path), new.get(path)]
        for path in [*old, *(path for path in new if path not in old)]
        if old.get(path) != new.get(path)
    }


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found.update(_flat(inner, f"{path}.{key}" if path else str(key)))
    return found


def launch_folder(loaded: LoadedRecipe | None) -> Path:
    """Where the code that a launch belongs to is looked for: beside the recipe's file, or here."""
    if loaded is not None and Path(loaded.filename).is_file():
        return Path(loaded.filename).absolute().parent
    return Path.cwd()
