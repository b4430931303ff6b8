"""All that is checked before a launch, for each place that it might go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.backends.destinations import Destination, destinations
from isthmus.backends.preflight import look
from isthmus.backends.prepare import Price, prepare
from isthmus.backends.spec import Capability, Finding
from isthmus.core.recipe import LoadedRecipe
from isthmus.errors import IsthmusError


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

    @property
    def good(self) -> bool:
        """Whether a launch there would not be refused."""
        return all(row.level != "error" for row in self.rows)

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


def examine(loaded: LoadedRecipe, backends: Sequence[str] = (), *, price: Price | None = None) -> list[Place]:
    """The checklist of each destination; starts and writes nothing that stays.

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
            found.append(Place(destination, (_row(Finding.of("recipe", error)),)))
            continue
        rows = [Row("recipe", "ok", f"recipe {loaded.recipe.name} is valid, and renders")]
        rows += _rows("lint", f"lint of {launch.backend.name}", launch.findings)
        try:
            asked = launch.backend.preflight(launch.job)
            rows += _rows("preflight", f"preflight of {launch.backend.name}", asked)
        except IsthmusError as error:
            rows.append(_row(Finding.of("preflight", error)))
        if Capability.ATTACHED not in launch.backend.capabilities:
            known = {row.message for row in rows}
            for check, findings in look(launch.job):
                if not findings:
                    rows.append(Row(check.id, "ok", check.title))
                rows += [_row(finding) for finding in findings if finding.message not in known]
        found.append(Place(destination, tuple(rows)))
    return found


def _rows(id: str, title: str, findings: Sequence[Finding]) -> list[Row]:
    rows = [_row(finding) for finding in findings]
    if all(row.level in ("ok", "note") for row in rows):
        rows.insert(0, Row(id, "ok", title))
    return rows


def _row(finding: Finding) -> Row:
    return Row(finding.id, finding.level, finding.message, finding.fix)
