"""All that is checked before a launch, for each place that it might go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.backends.destinations import Destination, destinations
from isthmus.backends.preflight import look
from isthmus.backends.prepare import Launch, Price, prepare
from isthmus.backends.spec import Capability, Finding
from isthmus.core.recipe import LoadedRecipe
from isthmus.errors import IsthmusError, PreflightRefused


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the checklist."""

    id: str
    level: str
    """`ok`, `note`, `warning` or `error`."""
    message: str
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The checklist of one destination."""

    destination: Destination
    rows: tuple[Row, ...]
    exit_code: int = 0
    """Of a launch there: 0 where nothing refuses it."""
    passed_over: bool = False
    """Whether a launch goes on to the next place: it is full or too dear. What its user has to put right ends it here."""

    @property
    def good(self) -> bool:
        """Whether a launch there would not be refused."""
        return self.exit_code == 0

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        rows = [
            {"id": row.id, "level": row.level, "message": row.message, "fix": row.fix} for row in self.rows
        ]
        return {**self.destination.to_json(), "ok": self.good, "checks": rows}

    def __str__(self) -> str:
        lines = [str(self.destination)]
        for row in self.rows:
            lines.append(f"  {row.level:7}  {row.message}  [{row.id}]")
            if row.fix and row.level in ("error", "warning"):
                lines.append(f"           fix: {row.fix}")
        return "\n".join(lines)


def verdict(places: Sequence[Place]) -> int:
    """The exit code of a launch that may go to these, in their order."""
    for place in places:
        if not place.passed_over:
            return place.exit_code
    return places[0].exit_code


def examine(
    loaded: LoadedRecipe,
    backends: Sequence[str] = (),
    *,
    price: Price | None = None,
    more: Callable[[Launch], Launch] = lambda launch: launch,
) -> list[Place]:
    """The checklist of each destination; starts and writes nothing that stays.

    Args:
        price: what an hour costs, where the backend itself does not know.
        more: adds findings of whoever launches, such as those about the budget.

    Raises:
        IsthmusError: a problem of the recipe or its backend's section, where there is no other place to go.
    """
    found = []
    places = destinations(loaded.recipe, backends)
    for choice, destination in enumerate(places):
        try:
            launch = prepare(loaded, backends=backends, choice=choice, price=price)
        except IsthmusError as error:
            if len(places) == 1:
                raise
            refused = isinstance(error, PreflightRefused)
            rows = [_row(Finding.of("recipe", error))]
            found.append(Place(destination, tuple(rows), error.exit_code, passed_over=refused))
            continue
        made = list(launch.findings)
        rows = [Row("recipe", "ok", f"recipe {loaded.recipe.name} is valid, and renders")]
        rows += _rows("lint", f"lint of {launch.backend.name}", launch.findings)
        budget = launch.job.source.budget
        if budget.max_usd is not None or budget.max_hours is not None:
            extra = more(launch).findings[len(launch.findings) :]
            if extra or not any(finding.id.endswith(".price") for finding in launch.findings):
                # Of a price that nobody knows the backend has told; then nothing was compared.
                rows += _rows("budget", "the budget is enough for what is estimated", extra)
            made += extra
        try:
            asked = launch.backend.preflight(launch.job)
            rows += _rows("preflight", f"preflight of {launch.backend.name}", asked)
        except IsthmusError as error:
            asked = [Finding.of("preflight", error)]
            rows.append(_row(asked[0]))
        made += asked
        if Capability.ATTACHED not in launch.backend.capabilities:
            known = {row.message for row in rows}
            for check, findings in look(launch.job):
                if not findings:
                    rows.append(Row(check.id, "ok", check.title))
                rows += [_row(finding) for finding in findings if finding.message not in known]
                made += findings
        errors = [finding for finding in made if finding.level == "error"]
        elsewhere = bool(errors) and all(finding.exit_code == 3 for finding in errors)
        found.append(Place(destination, tuple(rows), 3 if errors else 0, passed_over=elsewhere))
    return found


def _rows(id: str, title: str, findings: Sequence[Finding]) -> list[Row]:
    rows = [_row(finding) for finding in findings]
    if all(row.level in ("ok", "note") for row in rows):
        rows.insert(0, Row(id, "ok", title))
    return rows


def _row(finding: Finding) -> Row:
    return Row(finding.id, finding.level, finding.message, finding.fix)
