"""What predicates are made of: functions of columns, each knowing the type that it gives."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from isthmus.errors import UsageError

Type = Literal["text", "number", "flag"]
Wrong = Callable[[str, int], UsageError]
"""The error for a message and a place in the predicate."""

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<>": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a predicate: what it gives, and how. Text is a list, or one text for all rows."""

    type: Type
    of: Callable[[Mapping[str, Any], int], Any]
    at: int
    """Where it begins in the text."""
    zero_is_null: bool = False
    nan_is_null: bool = False


def apply(function: Any, left: Any, right: Any) -> Callable[[Mapping[str, Any], int], Any]:
    """A function of what two nodes give."""
    return lambda values, rows: function(left(values, rows), right(values, rows))


def number(text: str) -> int | float:
    """A number as written: whole where it fits."""
    return int(text) if text.isdigit() and len(text) < 19 else float(text)


def quotient(left: Any, right: Any) -> Any:
    """left / right, no number where right is 0."""
    return np.where(np.equal(right, 0), np.nan, np.true_divide(left, right))


def turned(node: Node, turned: bool) -> Node:
    """The contrary of a node, when it is asked for."""
    return Node("flag", lambda v, n: np.logical_not(node.of(v, n)), node.at) if turned else node


def each(value: Any, function: Callable[[str], Any], kind: Any = np.bool_) -> Any:
    """A function of each row's text, or of the one text for all rows."""
    if isinstance(value, str):
        return kind(function(value))
    return np.fromiter(map(function, value), kind, len(value))


def words(value: Any, function: Callable[[str], str]) -> Any:
    """A function of each row's text that gives text."""
    return function(value) if isinstance(value, str) else [function(word) for word in value]


def compared(wrong: Wrong, sign: str, left: Node, right: Node) -> Node:
    """A comparison. UsageError when the two sides are of different types."""
    if left.type != right.type:
        raise wrong(f"`{sign}` compares a {left.type} with a {right.type}", left.at)
    compare = COMPARE[sign]
    if left.type == "flag" and compare not in (operator.eq, operator.ne):
        raise wrong(f"`{sign}` does not compare true and false", left.at)
    if left.type != "text":

        def numbers(values: Mapping[str, Any], rows: int) -> Any:
            a, b = left.of(values, rows), right.of(values, rows)
            # Of what is no number every comparison is false, also `!=`.
            return np.logical_and(compare(a, b), np.logical_and(np.equal(a, a), np.equal(b, b)))

        return Node("flag", numbers, left.at)

    def texts(values: Mapping[str, Any], rows: int) -> Any:
        a, b = left.of(values, rows), right.of(values, rows)
        if isinstance(a, str) and isinstance(b, str):
            return compare(a, b)
        one, other = ([side] * rows if isinstance(side, str) else side for side in (a, b))
        return np.fromiter(map(compare, one, other), np.bool_, rows)

    return Node("flag", texts, left.at)


def null(wrong: Wrong, node: Node) -> Node:
    """Whether nothing was told."""
    if node.type == "text":
        return Node("flag", lambda v, n: each(node.of(v, n), lambda word: not word), node.at)
    if node.zero_is_null:
        return Node("flag", lambda v, n: np.equal(node.of(v, n), 0), node.at)
    if node.nan_is_null:
        return Node("flag", lambda v, n: np.isnan(node.of(v, n)), node.at)
    raise wrong(
        "`is null` asks for text, kept fields, or an original size or crop; others are always told", node.at
    )


def like(left: Node, pattern: str) -> Node:
    """`%` is any text, `_` any character; each piece between two `%` is looked for once, from left to right."""
    pieces: list[list[str]] = [[]]
    letters = iter(pattern)
    for letter in letters:
        if letter == "%":
            pieces.append([])
        elif letter == "_":
            pieces[-1].append(".")
        else:
            taken = next(letters, "\\") if letter == "\\" else letter
            pieces[-1].append(re.escape(taken))
    finds = [re.compile("".join(piece), re.DOTALL) for piece in pieces]
    widths = [len(piece) for piece in pieces]

    def fits(word: str) -> bool:
        if len(finds) == 1:
            return finds[0].fullmatch(word) is not None
        if finds[0].match(word) is None:
            return False
        at, end = widths[0], len(word) - widths[-1]
        for find in finds[1:-1]:
            found = find.search(word, at, max(at, end))
            if found is None:
                return False
            at = found.end()
        return at <= end and finds[-1].fullmatch(word, end) is not None

    return Node("flag", lambda v, n: each(left.of(v, n), fits), left.at)
