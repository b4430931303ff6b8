"""YAML 1.2 text -> plain data, with the line of every value.

Built from parser events rather than with a YAML constructor: no tag can make an object, no alias can blow up,
depth and size are bounded, a repeated key is an error, and every key keeps its line for error messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]
"""Where a value is: ``("stages", 0, "steps")``."""

MAX_BYTES = 1_000_000
MAX_DEPTH = 32

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$|0o[0-7_]+$|0x[0-9a-fA-F_]+$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


class DocumentError(Exception):
    """The text is not a YAML document that a recipe may be.

    Args:
        message: what is wrong, one line.
        line: counted from one.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message = " ".join(message.split())
        self.line = line


@dataclass(slots=True)
class Document:
    """Plain data (dict, list, str, int, float, bool, None) and the line of every key and item."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)


def scalar(text: str) -> Any:
    """An unquoted YAML scalar under the 1.2 core schema; ``1e-4`` is a number, ``no`` is a string.

    Underscores may group digits, as in ``100_000``. ``.inf`` and ``.nan`` stay text: no field takes them.
    Raises ValueError for a number of absurd size.
    """
    if text in _SPECIAL:
        return _SPECIAL[text]
    if text[0] in "-+.0123456789":
        if len(text) > 100 and (_INT.match(text) or _FLOAT.match(text)):
            raise ValueError("a number of more than 100 digits")
        if _INT.match(text):
            return int(text, 0)
        if _FLOAT.match(text):
            number = float(text)
            if number in (float("inf"), float("-inf")):
                raise ValueError(f"the number {text} is too large")
            return number
    return text


def parse(text: str) -> Document:
    """Read one YAML document. Raises :class:`DocumentError`."""
    if len(text) > MAX_BYTES:
        raise DocumentError(f"the recipe has {len(text):,} characters, more than {MAX_BYTES:,}", 1)
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return _build(YAML(typ="safe", pure=True).parse(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not valid"
        raise DocumentError(f"not valid YAML: {problem}", mark.line + 1 if mark else 1) from None
    except YAMLError as error:
        # Reader errors: a character that YAML forbids.
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
        raise DocumentError(f"not valid YAML: {getattr(error, 'reason', error)}", line) from None
    except RecursionError:
        raise DocumentError("nested too deeply", 1) from None
    except (ValueError, IndexError, AttributeError, TypeError, AssertionError) as error:
        # The pure scanner has a few such corners, an incomplete escape at the end of the text for one.
        raise DocumentError(f"not valid YAML: {error}", 1) from None


_UNSET: Any = object()


def _build(events: Any) -> Document:
    """Iterative, so that depth is bounded by us and not by the interpreter's stack."""
    from ruamel.yaml import events as ev

    document = Document(_UNSET)
    stack: list[tuple[Any, Path]] = []  # open containers with their paths
    keys: list[Any] = []  # the pending key of each open mapping, _UNSET when a key is expected
    documents = 0

    def place(value: Any, line: int) -> Path:
        """Attach a value (not a key) to the innermost container; its path."""
        if not stack:
            document.data = value
            return ()
        container, path = stack[-1]
        if isinstance(container, list):
            where: Path = (*path, len(container))
            container.append(value)
            document.lines[where] = line
        else:
            where = (*path, keys[-1])
            container[keys[-1]] = value
            keys[-1] = _UNSET
        return where

    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 1
        expects_key = bool(stack) and isinstance(stack[-1][0], dict) and keys[-1] is _UNSET
        if isinstance(event, ev.AliasEvent):
            raise DocumentError(f"aliases (*{event.anchor}) are not supported; write the value out", line)
        if getattr(event, "anchor", None):
            raise DocumentError(f"anchors (&{event.anchor}) are not supported; write the value out", line)
        if isinstance(event, ev.ScalarEvent):
            if event.tag and str(event.tag) != "!":
                raise DocumentError(f"tags ({event.tag}) are not supported; write a plain value", line)
            if expects_key:
                _open_key(event, stack, keys, document, line)
                continue
            try:
                value = scalar(event.value) if event.implicit[0] and not event.style else event.value
            except ValueError as error:
                raise DocumentError(str(error), line) from None
            place(value, line)
        elif isinstance(event, (ev.MappingStartEvent, ev.SequenceStartEvent)):
            if event.tag and str(event.tag) != "!":
                raise DocumentError(f"tags ({event.tag}) are not supported; write a plain value", line)
            if expects_key:
                raise DocumentError("a key must be a plain word", line)
            if len(stack) >= MAX_DEPTH:
                raise DocumentError(f"nested more than {MAX_DEPTH} levels deep", line)
            fresh: Any = {} if isinstance(event, ev.MappingStartEvent) else []
            stack.append((fresh, place(fresh, line)))
            keys.append(_UNSET)
        elif isinstance(event, (ev.MappingEndEvent, ev.SequenceEndEvent)):
            stack.pop()
            keys.pop()
        elif isinstance(event, ev.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise DocumentError("a second document (`---`) follows; a recipe is one document", line)
    if document.data is _UNSET:
        document.data = None
    return document


def _open_key(
    event: Any, stack: list[tuple[Any, Path]], keys: list[Any], document: Document, line: int
) -> None:
    container, path = stack[-1]
    key = str(event.value)
    if key == "<<" and not event.style:
        raise DocumentError("merge keys (<<) are not supported; write the values out", line)
    if key in container:
        first = document.lines[(*path, key)]
        raise DocumentError(f"the key `{key[:60]}` is repeated (first on line {first})", line)
    keys[-1] = key
    document.lines[(*path, key)] = line
