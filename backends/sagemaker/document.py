"""The request as AWS's own command line takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from isthmus.backends.spec import Rendered

HEADER = "# aws sagemaker create-training-job --cli-input-yaml file://THIS_FILE\n"


def document(rendered: Rendered, format: Literal["json", "yaml"]) -> str:
    """One JSON object, or YAML that reads as the same object; ASCII, so that no terminal or editor changes it."""
    if format == "json":
        return json.dumps(rendered.request, indent=2) + "\n"
    return HEADER + to_yaml(rendered.request)


def to_yaml(data: Mapping[str, Any]) -> str:
    """Block style; every text is quoted, so that no YAML reader takes one for a number, a date or a truth value."""
    return "\n".join(_mapping(data, "")) + "\n"


def _mapping(data: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for key, value in data.items():
        name = key if key.isascii() and key.replace("_", "").isalnum() and key[0].isalpha() else _scalar(key)
        lines += _entry(f"{indent}{name}:", value, indent + "  ")
    return lines


def _entry(head: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [head, *_mapping(value, indent)]
    if isinstance(value, list) and value:
        lines = [head]
        for item in value:
            inner = _mapping(item, indent + "  ") if isinstance(item, Mapping) and item else [_scalar(item)]
            first, *rest = inner
            lines += [f"{indent}- {first.strip()}", *rest]
        return lines
    return [f"{head} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    text = json.dumps(value)
    if not isinstance(value, str) or "\\ud" not in text:
        return text
    # JSON writes what is beyond 16 bits as a pair of surrogates, which YAML does not know.
    parts = (f"\\U{ord(char):08x}" if ord(char) > 0xFFFF else json.dumps(char)[1:-1] for char in value)
    return '"' + "".join(parts) + '"'
