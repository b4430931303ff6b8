"""A recipe as YAML text and as a hash."""

from __future__ import annotations

from typing import Any

from isthmus.core.recipe.schema import Recipe


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """What was written, as plain JSON-able data that validates back to an equal recipe."""
    return recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)


def dump_recipe(recipe: Recipe) -> str:
    """YAML that ``load_recipe`` reads back to an equal recipe. Defaults that were not written stay unwritten."""
    return yaml_text(recipe_data(recipe))


def yaml_text(data: dict[str, Any]) -> str:
    """Plain data as YAML in block style, every text that could be misread quoted; it reads back equal."""
    lines: list[str] = []
    _write(data, 0, lines)
    return "\n".join(lines) + "\n"


def recipe_hash(recipe: Recipe) -> str:
    """sha256, in hex, of what the recipe means: writing a default out, or the order of fields, changes nothing."""
    from hashlib import sha256
    from json import dumps

    data = recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return sha256(dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write(value: dict[str, Any], depth: int, lines: list[str]) -> None:
    """Block style; every text is quoted as JSON, which YAML reads the same way whatever it holds."""
    indent = "  " * depth
    for key, inner in value.items():
        name = key if key.isascii() and key.isidentifier() and key.lower() not in _WORDS else _flow(key)
        if isinstance(inner, dict) and inner:
            lines.append(f"{indent}{name}:")
            _write(inner, depth + 1, lines)
        elif isinstance(inner, list) and any(isinstance(item, (dict, list)) for item in inner):
            lines.append(f"{indent}{name}:")
            lines.extend(f"{indent}  - {_flow(item)}" for item in inner)
        else:
            lines.append(f"{indent}{name}: {_flow(inner)}")


_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def _flow(value: Any) -> str:
    from json import dumps

    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if not isinstance(value, str):
        return dumps(value)
    plain = value.isascii() and value.replace("_", "").replace("-", "").isalnum() and value[0].isalpha()
    return value if plain and value.lower() not in _WORDS else _quoted(value)


def _quoted(text: str) -> str:
    """Double-quoted with YAML's escapes, which unlike JSON's know no surrogate pairs."""
    out = ""
    for char in text:
        code = ord(char)
        if char in '"\\':
            out += "\\" + char
        elif char.isprintable() and code != 0xFEFF:
            out += char
        else:
            out += (
                f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
            )
    return f'"{out}"'
