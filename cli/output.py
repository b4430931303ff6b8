"""What every command prints, and how an error looks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from isthmus.errors import IsthmusError, RecipeError


def emit(data: object, *, as_json: bool, text: Callable[[], str] | str) -> None:
    """Print a result: one JSON document for programs, or text for people.

    Args:
        data: JSON-able; sizes and times in the units that its field names say.
        as_json: the command's ``--json``.
        text: what people read, or what makes it when it costs something to make.
    """
    if as_json:
        from json import dumps

        print(dumps(data, indent=2, ensure_ascii=False))
    else:
        print(text() if callable(text) else text)


def counted(number: int, one: str, several: str = "") -> str:
    """`1 group`, `2,000 groups`.

    Args:
        several: the plural, where it is not one with an s at the end.
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def fail(error: IsthmusError) -> NoReturn:
    """Print an error as ``error: ...`` with its ``hint: ...`` and exit with its code. Never a traceback, never a credential."""
    from isthmus.core.recipe.secrets import redact

    sys.stdout.flush()
    if isinstance(error, RecipeError):
        # The places make each line clickable in an editor's terminal.
        for problem in error.problems:
            print(redact(f"error: {problem}"), file=sys.stderr)
    else:
        where = f"{error.where}: " if error.where else ""
        print(redact(f"error: {where}{error.message}"), file=sys.stderr)
        if error.hint:
            print(redact(f"hint: {error.hint}"), file=sys.stderr)
    sys.exit(error.exit_code)
