"""From a recipe to a launch that is ready to start: job, findings, native request. Starts and writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from isthmus.backends import encoding, own_code
from isthmus.backends.destinations import Destination, destinations, known_destinations
from isthmus.backends.places import recipe_changes, with_absolute_paths, with_paths_of
from isthmus.backends.preflight import look
from isthmus.backends.registry import backend_names, get_backend
from isthmus.backends.runs import Record, check_run_id, new_run_id
from isthmus.backends.shortened import check_steps_done
from isthmus.backends.spec import Backend, Capability, Finding, Job, Offer, Rendered
from isthmus.backends.submission import rendered_of
from isthmus.core.packaging import Package
from isthmus.core.recipe import LoadedRecipe, Recipe, parse_recipe, resolve
from isthmus.core.recipe.dump import recipe_hash
from isthmus.errors import PreflightRefused, RecipeError, UsageError
from isthmus.storage import filesystems
from isthmus.storage.rundir import RunDirectory
from isthmus.storage.rundir.submissions import Submission

_FIXED = ("model", "encoders", "seed", "data.lanes", "data.sources", "encode")
"""What a run was begun with: with another of these its weights or its sample order would mean something else."""


Price = Callable[[Recipe, str, str | None, str, str | None], float | None]
"""US dollars an hour of all nodes: recipe, backend, region, tier, SKU; None where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch, ready to start."""

    backend: Backend
    job: Job
    rendered: Rendered
    findings: tuple[Finding, ...] = ()
    changes: dict[str, Any] | None = None
    """Of a resumed run's recipe: field -> [before, now]; None: the run is begun, or begun again under its id."""
    code: Package | None = None
    """The recipe's own code, to be put into the run directory before the job begins."""
    destinations: tuple[Destination, ...] = ()
    """Where the run may go, in order."""
    choice: int = 0
    """Which of them this is."""
    offer: Offer | None = None
    """What it runs on, as the backend tells."""
    pending: Submission | None = None
    """An earlier launch put this attempt down and it is not known whether it arrived: it is sent again as it was."""

    @property
    def usd_per_hour(self) -> float | None:
        """Of all nodes together, where somebody knows."""
        return (
            self.job.usd_per_hour
            if self.job.usd_per_hour is not None
            else (self.offer.usd_per_hour if self.offer is not None else None)
        )


def prepare(
    loaded: LoadedRecipe,
    *,
    backend: str | None = None,
    backends: Sequence[str] = (),
    choice: int = 0,
    run_id: str | None = None,
    detach: bool = False,
    price: Price | None = None,
    offline: bool = False,
) -> Launch:
    """A new run, or another attempt of the run with that id and the same recipe.

    Args:
        loaded: as read from the file, with its overrides.
        backend: the name of the only one; short for `backends`.
        backends: names of those it may go to, in order; none: those of `compute.offers`, or `local`.
        choice: which of the destinations that follow from these is meant.
        run_id: None makes a new one.
        detach: whether it shall go on when the launcher ends, on a backend that can do both.
        price: what an hour costs, where the backend itself does not know.
        offline: do not look whether there is a run of that id; it is taken for a new one.

    Raises:
        UsageError: no such backend, a bad run id; RecipeError: a problem in the backend's section.
    """
    source = loaded.recipe
    places = destinations(source, [backend] if backend else backends)
    destination = places[choice]
    found = get_backend(destination.backend)
    _check_sections(loaded)
    settings = backend_settings(found, loaded)
    resolved = resolve(source, found.name)
    if found.name == "local":
        resolved = with_absolute_paths(resolved)
    assert isinstance(resolved.run_directory, str)
    attempt, known, pending = 1, None, None
    if run_id is None:
        # Nothing can be there, so a dry run needs no network to look.
        run_id = new_run_id(source.name, recipe_hash(source))
        run = RunDirectory(filesystems.join(resolved.run_directory, run_id))
    else:
        run = RunDirectory(filesystems.join(resolved.run_directory, check_run_id(run_id)))
        if not offline and run.exists():
            run.check_same_recipe(recipe_hash(source))
            known = run
            attempt, pending = _next_attempt(run)
            _same_backend(pending, found.name, run_id)
    code = own_code.packaged(resolved, known)
    resolved = own_code.referred(resolved, code)
    launch = _launch(
        found,
        Job(
            recipe=resolved,
            source=source,
            backend=found.name,
            run_id=run_id,
            run_uri=run.uri,
            settings=settings,
            attempt=attempt,
            offer=destination.offer,
            detach=detach,
        ),
        price,
    )
    return replace(
        _as_put_down(launch, pending),
        code=code,
        findings=(*launch.findings, *own_code.notes(code)),
        destinations=places,
        choice=choice,
    )


def prepare_resume(
    record: Record,
    overrides: Sequence[str] = (),
    *,
    backends: Sequence[str] = (),
    choice: int | None = None,
    detach: bool = False,
    price: Price | None = None,
    keep_price: bool = True,
) -> Launch:
    """The next attempt of a run, from its newest checkpoint, with changes to its recipe.

    Args:
        backends: where it may go from now on; none: where it might before, beginning with where it is.
        choice: which of those it goes to; None: the one it was on.
        keep_price: on the same machines an hour costs what it did; otherwise it is priced again.

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
    _refuse_changes(record.id, changes, allow_data=loaded.recipe.data.allow_changed)
    if any(path.startswith("stages") for path in changes):
        check_steps_done(before, loaded.recipe, max(run.checkpoints(), default=0))
    attempt, pending = _next_attempt(run)
    if pending is not None and (changes or backends):
        raise UsageError(
            f"submission {pending.number} of {record.id} was begun and not confirmed",
            hint=f"`isthmus supervise {record.id}` completes it; then come back",
        )
    if backends:
        places, choice = destinations(loaded.recipe, backends), choice or 0
    else:
        places = known_destinations(data, loaded.recipe)
        if choice is None:
            choice = _choice_before(run, places)
    destination = places[choice]
    found = get_backend(destination.backend)
    settings = backend_settings(found, loaded)
    resolved = resolve(loaded.recipe, found.name)
    if found.name == "local" and data.get("backend") == "local":
        # Relative paths meant something where the run was launched, which may not be here.
        resolved = with_paths_of(resolved, run.read_recipe())
    elif found.name == "local":
        resolved = with_absolute_paths(resolved)
    code, resolved, notes = own_code.resumed(resolved, data, overrides, changes)
    if keep_price and (usd := _price_before(run, destination, changes)) is not None:
        price = _always(usd)
    launch = _launch(
        found,
        Job(
            recipe=resolved,
            source=loaded.recipe,
            backend=found.name,
            run_id=record.id,
            run_uri=run.uri,
            settings=settings,
            attempt=attempt,
            offer=destination.offer,
            detach=detach,
        ),
        price,
    )
    return replace(
        _as_put_down(launch, pending),
        changes=changes,
        code=code,
        findings=(*launch.findings, *notes),
        destinations=places,
        choice=choice,
    )


def _next_attempt(run: RunDirectory) -> tuple[int, Submission | None]:
    """The number of the next submission, and the one that it is if that was put down already and nobody knows more."""
    newest = run.submissions().newest()
    if newest is not None and newest.answer is None:
        return newest.number, newest
    return next_number(newest, run.read_run_json()), None


def next_number(newest: Submission | None, run_json: Mapping[str, Any]) -> int:
    """Of the attempt after the newest submission."""
    # Runs of before there were submissions have only the job ids.
    return max(newest.number if newest else 0, len(run_json.get("job_ids", []))) + 1


def _price_before(run: RunDirectory, destination: Destination, changes: Mapping[str, Any]) -> float | None:
    """What an hour there cost the run's last attempt of the same machines, where somebody knew it.

    It may have come from a file of prices that is not here, and without a price nobody keeps `budget.max_usd`.
    """
    if any(path.startswith(("compute", "backends")) for path in changes):
        return None
    for submission in reversed(run.submissions().all()):
        usd = submission.data.get("usd_per_hour")
        if submission.data.get("destination") == destination.to_json() and usd is not None:
            return float(usd)
        if submission.data.get("by") != "supervise":
            break  # before it the run may have had other machines
    return None


def _always(usd: float) -> Price:
    return lambda *_: usd


def _choice_before(run: RunDirectory, places: Sequence[Destination]) -> int:
    newest = run.submissions().newest()
    choice = int(newest.data.get("choice", 0)) if newest is not None else 0
    return choice if choice < len(places) else 0


def _same_backend(pending: Submission | None, name: str, run_id: str) -> None:
    if pending is not None and pending.data["rendered"]["backend"] != name:
        raise UsageError(
            f"a submission of {run_id} to {pending.data['rendered']['backend']} was begun and not confirmed",
            hint=f"`isthmus supervise {run_id}` completes it",
        )


def _as_put_down(launch: Launch, pending: Submission | None) -> Launch:
    if pending is None:
        return launch
    rendered = rendered_of(pending)
    note = f"an earlier launch began to submit {rendered.job_id}; it is completed under the same name"
    return replace(
        launch,
        pending=pending,
        rendered=rendered,
        findings=(*launch.findings, Finding("launch.pending", "note", note)),
    )


def _refuse_changes(run_id: str, changes: dict[str, Any], *, allow_data: bool) -> None:
    # Asked for, other data is taken; the trainer says what that means.
    fixed = [field for field in _FIXED if field != "data.sources" or not allow_data]
    refused = [
        path for path in changes if any(path == field or path.startswith(f"{field}.") for field in fixed)
    ]
    if refused:
        raise UsageError(
            f"a run keeps what it was begun with; changed: {', '.join(refused)}",
            where=run_id,
            hint="launch a new run with that recipe",
        )


def _launch(backend: Backend, job: Job, price: Price | None) -> Launch:
    """Priced, linted and rendered."""
    if Capability.ATTACHED not in backend.capabilities:
        job = replace(job, detach=True)
    offer = _priced(backend, job, price)
    job = replace(job, usd_per_hour=offer.usd_per_hour if offer is not None else None)
    findings = (*encoding.lint(job, backend.capabilities), *backend.lint(job))
    if job.detach and Capability.DETACHED not in backend.capabilities:
        findings = (
            *findings,
            Finding("detach", "error", f"{backend.name} cannot detach", "leave out --detach", 2),
        )
    return Launch(backend=backend, job=job, rendered=backend.render(job), findings=findings, offer=offer)


def _priced(backend: Backend, job: Job, price: Price | None) -> Offer | None:
    """What the job runs on, with what that costs."""
    offers = backend.offers(job)
    wanted = job.offer
    if wanted is not None:
        # A backend may list what the recipe's other offers come to, too.
        offers = [
            one
            for one in offers
            if one.tier == wanted.tier
            and wanted.region in (None, one.region)
            and wanted.sku in (None, one.sku)
        ] or offers
    offer = next(iter(offers), None)
    if offer is None or offer.usd_per_hour is not None or price is None:
        return offer
    return replace(offer, usd_per_hour=price(job.source, backend.name, offer.region, offer.tier, offer.sku))


def preflight(launch: Launch) -> Launch:
    """The launch with what its backend found by looking; skipped when the lint refuses it already."""
    if any(finding.level == "error" for finding in launch.findings):
        return launch
    found = list(launch.backend.preflight(launch.job))
    if Capability.ATTACHED not in launch.backend.capabilities:
        # What a cloud cannot know; a backend of this machine looks by itself, at more than these.
        known = {finding.message for finding in found}
        shared = [finding for _, findings in look(launch.job) for finding in findings]
        found += [finding for finding in shared if finding.message not in known]
    return replace(launch, findings=(*launch.findings, *found))


def refuse_errors(launch: Launch) -> None:
    """Raises PreflightRefused (3) when a finding is an error, whichever: `doctor` says the same of it."""
    errors = [finding for finding in launch.findings if finding.level == "error"]
    if not errors:
        return
    first, *others = errors
    message = first.message + "".join(f"; also: {finding.message}" for finding in others)
    raise PreflightRefused(message, hint=first.fix)


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

    sections = set(loaded.recipe.backends)
    unknown = sorted(sections - set(backend_names())) if sections else []
    if unknown:
        known = backend_names()
        near = closest(unknown[0], known)
        hint = f"did you mean `{near}`?" if near else f"there are {', '.join(known)}"
        place = loaded.where(f"backends.{unknown[0]}")
        raise RecipeError([f"{place}: backends.{unknown[0]}: no such backend ({hint})"])


def launch_folder(loaded: LoadedRecipe | None) -> Path:
    """Where the code that a launch belongs to is looked for: beside the recipe's file, or here."""
    if loaded is not None and Path(loaded.filename).is_file():
        return Path(loaded.filename).absolute().parent
    return Path.cwd()
