"""Turns pydantic's validation errors into problems that say what is allowed, with a did-you-mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from isthmus.core.recipe.document import Path
from isthmus.core.recipe.problems import Problem, closest

_KINDS = {
    "int": "a whole number", "float": "a number", "string": "a text", "bool": "true or false",
    "list": "a list", "tuple": "a list", "dict": "a section", "model": "a section",
}  # fmt: skip


def explain(error: ValidationError, schema: type[BaseModel], data: Any) -> list[Problem]:
    """One problem for each field that is wrong, in the order of the schema."""
    grouped: dict[Path, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        grouped.setdefault(_field(detail, data), []).append(detail)
    return [_problem(path, details, schema) for path, details in grouped.items()]


def _field(detail: Mapping[str, Any], data: Any) -> Path:
    """The part of a location that exists in the data; what follows names a branch of a union or a key."""
    path: list[str | int] = []
    location = detail["loc"]
    for position, part in enumerate(location):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if not inside:
            if detail["type"] == "missing" and position == len(location) - 1:
                path.append(part)
            break
        path.append(part)
        data = data[part]
    return tuple(path)


def _problem(path: Path, details: list[Mapping[str, Any]], schema: type[BaseModel]) -> Problem:
    first = details[0]
    if first["type"] == "missing":
        return Problem(path, "is missing", _about(schema, path))
    if first["type"] == "extra_forbidden":
        known = _fields_of(_annotation(schema, path[:-1]))
        guess = closest(str(path[-1]), known)
        meant = f"did you mean `{guess}`?" if guess else f"allowed: {', '.join(known)}"
        return Problem(path, "is not a field of a recipe", meant)
    allowed: list[str] = []
    for detail in details:
        text = _allowed(detail)
        if text not in allowed:
            allowed.append(text)
    value = first["input"]
    hint: str | None = None
    if isinstance(value, str):
        choices = _choices(_annotation(schema, path))
        guess = closest(value, choices) if choices else None
        hint = f"did you mean `{guess}`?" if guess and guess != value else _unquote(value, details)
    elif isinstance(value, float) and value.is_integer() and any(d["type"] == "int_type" for d in details):
        hint = f"write {int(value)}" if abs(value) < 1e15 else None
    return Problem(path, f"must be {' or '.join(allowed)}, not {shown(value)}", hint)


def _allowed(detail: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        return "one of " + str(context["expected"]).replace("'", "`").replace(" or ", ", ")
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_pattern_mismatch":
        return f"a text that matches {context['pattern']}"
    if kind in ("too_short", "too_long"):
        bound = "at least" if kind == "too_short" else "at most"
        count = context.get("min_length", context.get("max_length"))
        return f"{bound} {count} item{'' if count == 1 else 's'} long"
    if kind == "finite_number":
        return "a finite number"
    for bound, words in {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}.items():
        if bound in context:
            limit = context[bound]
            return f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}"
    expected = kind.removesuffix("_type").removesuffix("_parsing")
    return _KINDS.get(expected, str(detail["msg"]).removeprefix("Input should be ").lower())


def shown(value: Any) -> str:
    """A value as an error shows it: short, and never the content of a section."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value) if abs(value) < 1e30 or value != value else "a number that large"
    if isinstance(value, str):
        return f"`{value if len(value) <= 60 else value[:57] + '...'}`"
    return "a list" if isinstance(value, (list, tuple)) else "a section"


def _unquote(value: str, details: list[Mapping[str, Any]]) -> str | None:
    wanted = {detail["type"] for detail in details}
    if wanted & {"int_type", "float_type", "bool_type"}:
        from isthmus.core.recipe.document import scalar

        try:
            if not isinstance(scalar(value), (str, NoneType)):
                return "write it without quotes"
        except ValueError:
            pass
        if value.lower() in ("yes", "no", "on", "off") and "bool_type" in wanted:
            return "YAML 1.2 has true and false"
    return None


def _about(schema: type[BaseModel], path: Path) -> str | None:
    annotation = _annotation(schema, path)
    choices = _choices(annotation)
    if choices:
        return "one of " + ", ".join(f"`{choice}`" for choice in choices)
    fields = _fields_of(annotation)
    return f"a section with {', '.join(fields)}" if fields else None


def _strip(annotation: Any) -> Iterable[Any]:
    """The members of a union, without Annotated and None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _strip(member)
    elif annotation is not NoneType:
        yield annotation


def _annotation(schema: type[BaseModel], path: Path) -> Any:
    """The type of the field at a path; None where there is none."""
    annotation: Any = schema
    for part in path:
        inner = None
        for member in _strip(annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                for name, info in member.model_fields.items():
                    if part in (name, info.alias):
                        inner = info.annotation
            elif get_origin(member) is list:
                inner = get_args(member)[0]
            elif get_origin(member) is dict:
                inner = get_args(member)[1]
        if inner is None:
            return None
        annotation = inner
    return annotation


def _choices(annotation: Any) -> list[str]:
    return [
        str(choice)
        for member in _strip(annotation)
        if get_origin(member) is Literal
        for choice in get_args(member)
    ]


def _fields_of(annotation: Any) -> list[str]:
    return [
        info.alias or name
        for member in _strip(annotation)
        if isinstance(member, type) and issubclass(member, BaseModel)
        for name, info in member.model_fields.items()
    ]
