"""``--set a.b.0.c=value``: changes to a recipe's data before it is validated."""

from __future__ import annotations

import re
from typing import Any

from isthmus.core.recipe.document import DocumentError, Path, parse
from isthmus.core.recipe.problems import dotted

_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class OverrideError(Exception):
    """An override that cannot be applied; the message says why."""


def split_path(text: str) -> Path:
    """``stages.0.steps`` or ``stages[0].steps`` -> ``("stages", 0, "steps")``. Raises OverrideError."""
    parts: list[str | int] = []
    position = 0
    for match in _PART.finditer(text):
        between = text[position : match.start()]
        if between not in ("", ".") or (match.start() and match[2] and between != "."):
            break
        index, name = match[1], match[2]
        digits = index or (name if name.isascii() and name.isdigit() else None)
        parts.append(int(digits) if digits is not None and len(digits) < 10 else name)
        position = match.end()
    if position != len(text) or not parts:
        raise OverrideError(f"`{text[:80]}` is not a field path such as `stages.0.steps`")
    return tuple(parts)


def split_override(text: str) -> tuple[Path, Any]:
    """``"stages.0.steps=500"`` -> its path and its value, typed as YAML types it. Raises OverrideError."""
    name, equals, value = text.partition("=")
    if not equals:
        raise OverrideError("an override is `path.to.field=value`")
    path = split_path(name.strip())
    try:
        return path, parse(value).data
    except DocumentError as error:
        raise OverrideError(f"the value is {error.message}") from None


def apply(data: Any, path: Path, value: Any) -> None:
    """Set a value in nested dicts and lists, in place; missing sections are made.

    Whether a field of that name may exist is left to validation, which knows the schema. A list may be
    extended by one item. Raises OverrideError for an index out of range or a path through a plain value.
    """
    container = data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        above = _text(path[:depth])
        if isinstance(container, list):
            if not isinstance(part, int):
                raise OverrideError(f"{above} is a list; give an index from 0 to {len(container) - 1}")
            if part > len(container) or (part == len(container) and not last):
                count = f"{len(container)} item{'' if len(container) == 1 else 's'}"
                raise OverrideError(f"{above} has {count}; {part} is out of range")
            if part == len(container):
                container.append(None)
        elif isinstance(container, dict):
            part = str(part)
            if part not in container or (container[part] is None and not last):
                container[part] = {}
        else:
            raise OverrideError(f"{above} is a single value and has no field `{part}`")
        if last:
            container[part] = value
        else:
            container = container[part]


def _text(path: Path) -> str:
    return dotted(path) or "the recipe"
