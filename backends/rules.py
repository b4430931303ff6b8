"""Rules of the lint and the preflight: one for each trap, with a stable id. `docs/lint.md` is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.backends.spec import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is checked, why, and what to do about it."""

    id: str
    """Stable: `<backend>.<words-with-dashes>`, such as `azure.timeout-low-priority`."""
    level: Literal["error", "warning", "note"]
    title: str
    """What is refused or warned of, in one line."""
    why: str
    """What happens on the cloud otherwise; one paragraph, with the service's own words or limit."""
    fix: str
    """What to write in the recipe instead."""
    source: str = ""
    """Where the rule was read: a page, a service model, an issue."""
    exit_code: int = 3

    def found(self, message: str, fix: str | None = None) -> Finding:
        """A finding of this rule; the message says what and where in this recipe, in one line."""
        return Finding(self.id, self.level, message, fix or self.fix, self.exit_code)
