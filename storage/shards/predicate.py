"""Predicates over a dataset's small columns, as SQL writes them: parsed by hand, checked, and compiled to functions.

::

    width >= 512 and height >= 512 and not (caption like '%watermark%' or caption is null)
    bucket in ('4:3', '3:4') and length(caption) between 10 and 400 and key not like 'test/%'

Nothing is evaluated as Python. Text compares by code points, `like` knows `%`, `_` and a backslash before them, and tells
capitals from small letters (`lower(caption) like ...`). `is null` is true of an empty text, of a field that nobody told, and of
an original size or crop of 0 by 0, which stand for "not told". A comparison with a quotient by zero, or with a field's number
that nobody told, is false; its text then is empty.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError
from isthmus.storage.shards.layout import CROP_COLUMNS, SIZE_COLUMNS
from isthmus.storage.shards.predicate_nodes import (
    COMPARE,
    Node,
    Type,
    apply,
    compared,
    each,
    like,
    null,
    number,
    quotient,
    turned,
    words,
)
from isthmus.storage.shards.spec import DatasetSpec

Flags = NDArray[np.bool_]

MAX_LENGTH, MAX_DEPTH, MAX_LIST = 100_000, 64, 10_000
"""Characters of a predicate, brackets within brackets, and values of one `in`."""
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|'(?P<text>(?:[^']|'')*)'|\"(?P<quoted>(?:[^\"]|\"\")*)\""
    r"|(?P<sign><=|>=|<>|!=|==|[=<>()+\-*/,]))"
)
_WORDS = {"and", "or", "not", "in", "is", "null", "like", "between", "true", "false"}
_ZERO_IS_NULL = {*SIZE_COLUMNS, "crop_height", "crop_width"}
ALIASES = {"height": "original_height", "width": "original_width"}


def column_types(spec: DatasetSpec) -> dict[str, Type]:
    """The columns that a predicate may name, and what they are."""
    found: dict[str, Type] = {"key": "text", "caption": "text"}
    found |= {f"caption{at}": "text" for at in range(1, spec.captions)}
    found |= {"source": "text", "bucket": "text", "size_class": "number"}
    found |= dict.fromkeys((*SIZE_COLUMNS, *CROP_COLUMNS, *ALIASES), "number")
    found["flipped"] = "flag"
    found |= {f"{encoder.name}_length": "number" for encoder in spec.text}
    return found | {told.name: told.kind for told in spec.fields}


@dataclass(frozen=True, slots=True)
class Predicate:
    """A parsed predicate."""

    text: str
    columns: frozenset[str]
    """That it reads, by their names in the shards."""
    _test: Callable[[Mapping[str, Any], int], Any]

    def __call__(self, values: Mapping[str, Any], rows: int) -> Flags:
        """Which rows it is true of; [rows].

        Args:
            values: column -> numpy array of numbers or flags [rows], or a list of text.
        """
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.broadcast_to(np.asarray(self._test(values, rows), np.bool_), (rows,))


def parse_predicate(text: str, columns: Mapping[str, Type], nullable: Collection[str] = ()) -> Predicate:
    """The predicate in `text`.

    Args:
        nullable: columns of numbers that are NaN where nobody told.

    Raises:
        UsageError: it is none; says where, and what was expected.
    """
    if len(text) > MAX_LENGTH:
        raise UsageError(f"a predicate has at most {MAX_LENGTH} characters, not {len(text)}")
    parser = _Parser(text, columns, nullable)
    node = parser.either()
    if parser.token is not None:
        raise parser.wrong(f"`{parser.token[1]}` was not expected here")
    if node.type != "flag":
        raise parser.wrong(f"it gives a {node.type}, not true or false", node.at)
    return Predicate(text, frozenset(parser.used), node.of)


class _Parser:
    def __init__(self, text: str, columns: Mapping[str, Type], nullable: Collection[str]) -> None:
        self._text, self._columns, self._nullable = text, columns, nullable
        self.used: set[str] = set()
        self._end = self._depth = self._at = 0
        self.token: tuple[str, str] | None = None
        """Kind and value of the next token: number, name, word, text or sign."""
        self._next()

    def wrong(self, message: str, at: int | None = None) -> UsageError:
        at = self._at if at is None else at
        shown = self._text[max(0, at - 20) : at + 20]
        names = ", ".join(name for name in self._columns if name not in ALIASES.values())
        return UsageError(
            f"{message}, at character {at + 1} of the predicate (`{shown}`)",
            hint=f"such as: width >= 512 and caption not like '%draft%'; columns: {names}",
        )

    def _next(self) -> None:
        left = self._text[self._end :]
        if not left.strip():
            self.token, self._at = None, len(self._text)
            return
        match = _TOKEN.match(self._text, self._end)
        if match is None:
            start = self._end + len(left) - len(left.lstrip())
            what = "a text that is not closed" if self._text[start] in "'\"" else f"`{self._text[start]}`"
            raise self.wrong(f"{what} cannot be read", start)
        kind = match.lastgroup or ""
        self._at, self._end = match.start(kind) - (kind in ("text", "quoted")), match.end()
        value = match[kind]
        if kind == "quoted":
            kind, value = "text", value.replace('""', '"')
        elif kind == "text":
            value = value.replace("''", "'")
        elif kind == "name" and value.lower() in _WORDS:
            kind, value = "word", value.lower()
        self.token = kind, value

    def _take(self, *tokens: str) -> str | None:
        """The next token, when it is one of these words or signs."""
        if self.token is not None and self.token[0] in ("word", "sign") and self.token[1] in tokens:
            value = self.token[1]
            self._next()
            return value
        return None

    def _need(self, token: str) -> None:
        if self._take(token) is None:
            found = "it ends" if self.token is None else f"`{self.token[1]}` stands"
            raise self.wrong(f"{found} where `{token}` is expected")

    def _flag(self, node: Node, word: str) -> Node:
        if node.type != "flag":
            raise self.wrong(f"`{word}` joins comparisons, this is a {node.type}", node.at)
        return node

    def either(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.wrong(f"more than {MAX_DEPTH} brackets within brackets")
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        self._depth -= 1
        return self._joined(parts, "or", np.logical_or)

    def _both(self) -> Node:
        parts = [self._negated()]
        while self._take("and"):
            parts.append(self._negated())
        return self._joined(parts, "and", np.logical_and)

    def _joined(self, parts: list[Node], word: str, join: Any) -> Node:
        if len(parts) == 1:
            return parts[0]
        tests = [self._flag(part, word).of for part in parts]

        def of(values: Mapping[str, Any], rows: int) -> Any:
            found = tests[0](values, rows)
            for test in tests[1:]:
                found = join(found, test(values, rows))
            return found

        return Node("flag", of, parts[0].at)

    def _negated(self) -> Node:
        at, times = self._at, 0
        while self._take("not"):
            times += 1
        node = self._comparison()
        if not times:
            return node
        test = self._flag(node, "not").of
        return node if times % 2 == 0 else Node("flag", lambda v, n: np.logical_not(test(v, n)), at)

    def _comparison(self) -> Node:
        left = self._sum()
        sign = self._take(*COMPARE)
        if sign is not None:
            return compared(self.wrong, sign, left, self._sum())
        if self._take("is"):
            denied = self._take("not") is not None
            self._need("null")
            return turned(null(self.wrong, left), denied)
        at = self._at
        denied = self._take("not") is not None
        if self._take("in"):
            return turned(self._among(left), denied)
        if self._take("like"):
            if left.type != "text":
                raise self.wrong(f"`like` compares text, this is a {left.type}", left.at)
            return turned(like(left, self._literal("text")), denied)
        if self._take("between"):
            low = self._sum()
            self._need("and")
            pair = [compared(self.wrong, ">=", left, low), compared(self.wrong, "<=", left, self._sum())]
            return turned(self._joined(pair, "and", np.logical_and), denied)
        if denied:
            raise self.wrong("`not` stands before `in`, `like` or `between` here", at)
        return left

    def _among(self, left: Node) -> Node:
        if left.type == "flag":
            raise self.wrong("`in` compares text or numbers", left.at)
        self._need("(")
        values = [self._literal(left.type)]
        while self._take(","):
            values.append(self._literal(left.type))
            if len(values) > MAX_LIST:
                raise self.wrong(f"more than {MAX_LIST} values in one `in`")
        self._need(")")
        if left.type == "text":
            wanted = frozenset(values)
            return Node("flag", lambda v, n: each(left.of(v, n), lambda word: word in wanted), left.at)
        numbers = np.array(values)
        return Node("flag", lambda v, n: np.isin(left.of(v, n), numbers), left.at)

    def _literal(self, kind: Type) -> Any:
        sign = -1 if kind == "number" and self._take("-") else 1
        if self.token is None or self.token[0] != kind:
            raise self.wrong(f"a {kind} is expected" + (" in quotes" if kind == "text" else ""))
        value = self.token[1]
        self._next()
        return value if kind == "text" else sign * number(value)

    def _sum(self) -> Node:
        return self._chain(self._product, {"+": np.add, "-": np.subtract})

    def _product(self) -> Node:
        return self._chain(self._factor, {"*": np.multiply, "/": quotient})

    def _chain(self, part: Callable[[], Node], signs: Mapping[str, Any]) -> Node:
        left = part()
        while (sign := self._take(*signs)) is not None:
            right = part()
            for side in (left, right):
                if side.type != "number":
                    raise self.wrong(f"`{sign}` is for numbers, this is a {side.type}", side.at)
            left = Node("number", apply(signs[sign], left.of, right.of), left.at)
        return left

    def _factor(self) -> Node:
        at = self._at
        if self._take("-"):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise self.wrong(f"more than {MAX_DEPTH} signs in a row")
            inner = self._factor()
            self._depth -= 1
            if inner.type != "number":
                raise self.wrong(f"`-` is for numbers, this is a {inner.type}", inner.at)
            return Node("number", lambda v, n: np.negative(inner.of(v, n)), at)
        if self._take("("):
            inside = self.either()
            self._need(")")
            return inside
        told = self._take("true", "false")
        if told is not None:
            return Node("flag", lambda v, n: np.bool_(told == "true"), at)
        if self.token is None:
            raise self.wrong("it ends where a column or a value is expected")
        kind, value = self.token
        if kind in ("number", "text"):
            self._next()
            constant = number(value) if kind == "number" else value
            return Node("number" if kind == "number" else "text", lambda v, n: constant, at)
        if kind != "name":
            raise self.wrong(f"`{value}` stands where a column or a value is expected")
        self._next()
        return self._function(value.lower(), at) if self._take("(") else self._column(value, at)

    def _function(self, name: str, at: int) -> Node:
        if name not in ("length", "lower"):
            raise self.wrong(f"no function {name}(); there are length() and lower()", at)
        inner = self.either()
        self._need(")")
        if inner.type != "text":
            raise self.wrong(f"{name}() is for text, this is a {inner.type}", inner.at)
        if name == "lower":
            return Node("text", lambda v, n: words(inner.of(v, n), str.lower), at)
        return Node("number", lambda v, n: each(inner.of(v, n), len, np.int64), at)

    def _column(self, name: str, at: int) -> Node:
        if name not in self._columns:
            close = difflib.get_close_matches(name.lower(), self._columns, n=1)
            raise self.wrong(f"no column {name}" + (f"; did you mean {close[0]}?" if close else ""), at)
        stored = ALIASES.get(name, name)
        self.used.add(stored)
        kind, zero = self._columns[name], stored in _ZERO_IS_NULL
        return Node(kind, lambda v, n: v[stored], at, zero, kind == "number" and name in self._nullable)
