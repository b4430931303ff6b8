"""A request against the service's own model (botocore's): what the front end refuses and the client library does not."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any


@functools.cache
def service_model() -> Any:
    """botocore's model of SageMaker."""
    import botocore.session

    return botocore.session.get_session().get_service_model("sagemaker")


def members(operation: str) -> frozenset[str]:
    """The fields of an operation's answer."""
    return frozenset(service_model().operation_model(operation).output_shape.members)


def violations(operation: str, request: Any) -> list[str]:
    """What is wrong with a request, each in the words of the service: value, place, constraint."""
    return list(_check(service_model().operation_model(operation).input_shape, request, ""))


def _at(path: str, name: str) -> str:
    # The service speaks of members in lower camel case: resourceConfig.instanceType.
    name = name[:1].lower() + name[1:]
    return f"{path}.{name}" if path else name


def _said(value: object, path: str, constraint: str) -> str:
    shown = str(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return f"Value '{shown}' at '{path}' failed to satisfy constraint: Member must {constraint}"


def _check(shape: Any, value: Any, path: str) -> Iterator[str]:
    checks = {"structure": _structure, "list": _list, "map": _map, "string": _string, "blob": _nothing}
    checks |= {"integer": _number, "long": _number, "float": _number, "double": _number, "boolean": _boolean}
    yield from checks.get(shape.type_name, _nothing)(shape, value, path)


def _nothing(shape: Any, value: Any, path: str) -> Iterator[str]:
    yield from ()


def _structure(shape: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _said(value, path, "be a structure")
        return
    for name, inner in value.items():
        if name not in shape.members:
            yield f"Unknown parameter '{_at(path, name)}'"
        elif inner is not None:
            yield from _check(shape.members[name], inner, _at(path, name))
    for name in shape.required_members:
        if value.get(name) is None:
            yield _said("null", _at(path, name), "not be null")


def _length(shape: Any, size: int, value: Any, path: str) -> Iterator[str]:
    limits = shape.metadata
    if size > limits.get("max", size):
        yield _said(value, path, f"have length less than or equal to {limits['max']}")
    if size < limits.get("min", 0):
        yield _said(value, path, f"have length greater than or equal to {limits['min']}")


def _list(shape: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield _said(value, path, "be a list")
        return
    yield from _length(shape, len(value), value, path)
    for index, inner in enumerate(value, start=1):
        yield from _check(shape.member, inner, f"{path}.{index}.member")


def _map(shape: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _said(value, path, "be a map")
        return
    yield from _length(shape, len(value), value, path)
    for key, inner in value.items():
        yield from _check(shape.key, key, f"{path}.key")
        yield from _check(shape.value, inner, f"{path}.{key}.member")


def _string(shape: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield _said(value, path, "be a string")
        return
    if shape.enum and value not in shape.enum:
        yield _said(value, path, f"satisfy enum value set: [{', '.join(shape.enum)}]")
    yield from _length(shape, len(value), value, path)
    pattern = _pattern(shape.metadata.get("pattern"))
    if pattern and not pattern.fullmatch(value):
        yield _said(value, path, f"satisfy regular expression pattern: {shape.metadata['pattern']}")


@functools.cache
def _pattern(text: str | None) -> re.Pattern[str] | None:
    """Python's form of a Java pattern; the Unicode classes of tags become what they mean."""
    if not text:
        return None
    text = text.replace(r"\p{L}\p{Z}\p{N}", r"\w\s").replace(r"\p{Alnum}", "A-Za-z0-9")
    return None if r"\p{" in text else re.compile(text, re.DOTALL)


def _number(shape: Any, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        yield _said(value, path, "be a number")
        return
    limits = shape.metadata
    if value > limits.get("max", value):
        yield _said(value, path, f"have value less than or equal to {limits['max']}")
    if value < limits.get("min", value):
        yield _said(value, path, f"have value greater than or equal to {limits['min']}")


def _boolean(shape: Any, value: Any, path: str) -> Iterator[str]:
    if not isinstance(value, bool):
        yield _said(value, path, "be true or false")
