"""A request against the service's own model, offline: what the service refuses and botocore's client lets pass.

The client checks what is required, unknown names and types; the service checks lengths, counts, enumerations, patterns and
bounds, too. All of them are in the model that botocore ships, a JSON file, which is read here without importing botocore.
"""

from __future__ import annotations

import gzip
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from isthmus.errors import NotInstalled

_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\w",
    r"\p{Z}": r"\s",
    r"\p{Alnum}": "a-zA-Z0-9",
    r"\p{ASCII}": r"\x00-\x7f",
}
"""Java's character classes, as near as Python's `re` comes; the underscore that `\\w` adds is in the patterns anyway."""
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "boolean": bool, "integer": int, "long": int, "double": (int, float), "float": (int, float),
    "structure": Mapping, "map": Mapping, "list": list,
}  # fmt: skip
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the service would refuse."""

    path: str
    """Within the request, such as `StoppingCondition.MaxPendingTimeInSeconds`."""
    message: str


def _files(pattern: str) -> list[Path]:
    """Of botocore's data. Raises NotInstalled."""
    found = importlib.util.find_spec("botocore")
    places = list(found.submodule_search_locations or []) if found is not None else []
    files = [file for place in places for file in Path(place).glob(f"data/{pattern}")]
    if not files:
        raise NotInstalled("the check against SageMaker's own model", extra="sagemaker", module="botocore")
    return files


@cache
def regions() -> tuple[str, ...]:
    """Every region that botocore knows, of whichever partition. Raises NotInstalled."""
    partitions = from_json(_files("partitions.json")[0].read_bytes())["partitions"]
    return tuple(region for one in partitions for region in one["regions"] if not region.endswith("-global"))


@cache
def _model() -> Mapping[str, Any]:
    """Shapes by name. Raises NotInstalled."""
    data = max(_files("sagemaker/*/service-2.json*")).read_bytes()
    # Two and a half megabytes: pydantic's parser is twice as fast as json's, and every dry run waits for it.
    model = from_json(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    shapes: Mapping[str, Any] = model["shapes"]
    return shapes


def instance_types() -> frozenset[str]:
    """Every instance type that a training job may name. Raises NotInstalled."""
    return frozenset(_model()["TrainingInstanceType"]["enum"])


def refusals(request: Mapping[str, Any], shape: str = "CreateTrainingJobRequest") -> Iterator[Refusal]:
    """All that is wrong with a request, in its order. Raises NotInstalled."""
    yield from _check(_model(), shape, request, "")


def _check(model: Mapping[str, Any], name: str, value: Any, path: str) -> Iterator[Refusal]:
    shape = model[name]
    kind = shape["type"]
    wanted = _TYPES.get(kind)
    if wanted is not None and (
        not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean")
    ):
        yield Refusal(path, f"is {type(value).__name__}, not {kind}")
        return
    if kind == "structure":
        members = shape["members"]
        for key, inner in value.items():
            below = f"{path}.{key}" if path else key
            if key in members:
                yield from _check(model, members[key]["shape"], inner, below)
            else:
                yield Refusal(below, "is unknown to the service")
        for key in shape.get("required", ()):
            if key not in value:
                yield Refusal(f"{path}.{key}" if path else key, "is missing")
    elif kind == "list":
        yield from _size(shape, len(value), "entries", path)
        for index, inner in enumerate(value):
            yield from _check(model, shape["member"]["shape"], inner, f"{path}[{index}]")
    elif kind == "map":
        yield from _size(shape, len(value), "entries", path)
        for key, inner in value.items():
            yield from _check(model, shape["key"]["shape"], key, f"{path}.{_short(key)}")
            yield from _check(model, shape["value"]["shape"], inner, f"{path}.{_short(key)}")
    elif kind == "string":
        yield from _text(shape, value, path)
    elif kind in ("integer", "long", "double", "float"):
        yield from _bounds(shape, value, "", path)


def _text(shape: Mapping[str, Any], value: str, path: str) -> Iterator[Refusal]:
    if "enum" in shape and value not in shape["enum"]:
        yield Refusal(path, f"{_short(value)!r} is none of the {len(shape['enum'])} that the service knows")
        return
    yield from _size(shape, len(value), "characters", path)
    pattern = shape.get("pattern")
    if pattern and not _compiled(pattern).fullmatch(value):
        yield Refusal(path, f"{_short(value)!r} does not match {_short(pattern)}")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern, re.DOTALL)


def _size(shape: Mapping[str, Any], count: int, what: str, path: str) -> Iterator[Refusal]:
    yield from _bounds(shape, count, f" {what}", path)


def _bounds(shape: Mapping[str, Any], value: float, what: str, path: str) -> Iterator[Refusal]:
    low, high = shape.get("min"), shape.get("max")
    if low is not None and value < low:
        yield Refusal(path, f"{value}{what}, at least {low}")
    if high is not None and value > high:
        yield Refusal(path, f"{value}{what}, at most {high}")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
