"""Problems of a recipe: where each one is, what is wrong, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.core.recipe.document import Path


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a recipe.

    Args:
        path: of the field, such as ``("stages", 1, "global_batch_size")``; empty for the document.
        message: what is wrong, one line.
        hint: what is allowed, or the nearest fix.
    """

    path: Path
    message: str
    hint: str | None = None

    def line(self, place: str) -> str:
        """``file:line: path: message (hint)``, given the place in the file."""
        message, field = " ".join(self.message.split()), dotted(self.path)
        # A message that compares two settings opens with the field itself.
        parts = [place, message] if message.startswith(f"{field} ") or not field else [place, field, message]
        text = ": ".join(parts)
        return f"{text} ({self.hint})" if self.hint else text


def dotted(path: Path) -> str:
    """``("stages", 1, "steps")`` -> ``"stages[1].steps"``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, or None."""
    from difflib import get_close_matches

    known = list(known)
    folded = word.lower().replace("-", "_").replace(" ", "_")[:100]
    for candidate in known:
        if candidate.lower().replace("-", "_") == folded:
            return candidate
    matches = get_close_matches(folded, known, n=1, cutoff=0.6)
    return matches[0] if matches else None
