"""The recipe's JSON schema, with the docstring under each field as its description.

The docstrings are read from the source when the schema is asked for: pydantic would read them at every import.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from isthmus.core.recipe import alive, encoding, patch_mixer, pictures, schema, stages
from isthmus.core.recipe.schema import Recipe


def recipe_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a recipe file."""
    found: dict[str, Any] = Recipe.model_json_schema(by_alias=True)
    documented = descriptions()
    for name, definition in [("Recipe", found), *found["$defs"].items()]:
        summary, fields = documented[name]
        definition["description"] = summary
        for field, text in fields.items():
            # `for` is a word of Python: the attribute is `for_`.
            definition["properties"][field.rstrip("_")]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Isthmus recipe"}


def descriptions() -> dict[str, tuple[str, dict[str, str]]]:
    """Of each section's class: its docstring, and the docstring under each of its fields."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for module in (stages, alive, encoding, pictures, patch_mixer, schema):
        tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = (_first(ast.get_docstring(node) or ""), _fields(node))
    return found


def _fields(node: ast.ClassDef) -> dict[str, str]:
    fields = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            fields[statement.target.id] = _first(following.value.value)
    return fields


def _first(text: str) -> str:
    return " ".join(text.split())
