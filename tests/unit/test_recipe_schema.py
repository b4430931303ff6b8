"""The JSON schema, and the docstrings that it and the reference page are made of."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from isthmus.core.recipe import alive, pictures, schema, stages
from isthmus.core.recipe.document import parse
from isthmus.core.recipe.json_schema import descriptions, recipe_schema
from isthmus.core.recipe.load import shipped_recipes

SECTIONS = [
    value
    for module in (stages, alive, pictures, schema)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, stages.Section) and value.__module__ == module.__name__
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_has_a_docstring(section: type[stages.Section]) -> None:
    summary, fields = descriptions()[section.__name__]
    assert summary
    assert set(fields) == set(section.model_fields)
    assert all(text.endswith(".") or text.endswith("`") for text in fields.values()), fields


def test_the_schema_describes_every_field_and_is_plain_json() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = recipe_schema()
    json.dumps(found, allow_nan=False)
    for name, definition in [("Recipe", found), *found["$defs"].items()]:
        assert definition["additionalProperties"] is False, name
        for field, content in definition["properties"].items():
            assert content["description"], f"{name}.{field}"
    assert "for" in found["$defs"]["Threshold"]["properties"]
    assert found["properties"]["version"]["const"] == 1


def conforms(value: Any, rule: dict[str, Any], root: dict[str, Any]) -> bool:
    """As much of JSON Schema as recipes use."""
    import re

    if "$ref" in rule:
        return conforms(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)
    if "anyOf" in rule:
        return any(conforms(value, option, root) for option in rule["anyOf"])
    if "const" in rule and value != rule["const"]:
        return False
    if "enum" in rule and value not in rule["enum"]:
        return False
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }  # fmt: skip
    kind = rule.get("type")
    if kind and (
        not isinstance(value, kinds[kind])
        or (isinstance(value, bool) and kind in ("integer", "number"))
        or ("pattern" in rule and not re.search(rule["pattern"], value))
    ):
        return False
    if kind == "object":
        known, more = rule.get("properties", {}), rule.get("additionalProperties", True)
        return all(required in value for required in rule.get("required", ())) and all(
            conforms(inner, known[key], root)
            if key in known
            else more is True or (more is not False and conforms(inner, more, root))
            for key, inner in value.items()
        )
    if kind == "array" and "items" in rule:
        return all(conforms(item, rule["items"], root) for item in value)
    return True


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_conform_and_mistakes_do_not(name: str) -> None:
    root = recipe_schema()
    data = parse(shipped_recipes()[name].read_text("utf-8")).data
    assert conforms(data, root, root)
    assert not conforms({**data, "extra": 1}, root, root)
    assert not conforms({**data, "seed": "zero"}, root, root)
    assert not conforms({key: value for key, value in data.items() if key != "model"}, root, root)
    assert not conforms({**data, "checkpoint": {"every": "often"}}, root, root)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_teach_and_name_nobody(name: str) -> None:
    text = shipped_recipes()[name].read_text("utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert sum("#" in line for line in lines) >= 12, "a recipe is read before it is run: say why"
    assert all(len(line) <= 120 for line in lines)
    for account in ("az://", "s3://"):
        for line in lines:
            if account in line:
                assert "exampleaccount" in line or "example-bucket" in line
