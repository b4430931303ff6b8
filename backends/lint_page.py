"""`docs/lint.md`, made from every rule: `python -m isthmus.backends.lint_page docs/lint.md`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from isthmus.backends.rules import Rule

_HEAD = """# Lint and preflight

What `isthmus launch` refuses or warns of, and `isthmus doctor RECIPE --backend NAME` lists. The lint works offline on the
request that would be sent; the preflight asks the cloud and the stores. An error refuses the launch before anything starts.

Each rule has an id that stays the same. This page is made from the rules themselves (`make docs`).
"""
_PARTS = (
    ("Every backend but this machine", "isthmus.backends.preflight"),
    ("Encode jobs", "isthmus.backends.encoding"),
    ("This machine", "isthmus.backends.local.rules"),
    ("Azure ML", "isthmus.backends.azure.rules"),
    ("SageMaker", "isthmus.backends.sagemaker.rules"),
)
_LEVELS = ("error", "warning", "note")


def rules() -> Iterator[tuple[str, list[Rule]]]:
    """The parts of the page, each with its rules: errors first, then by id."""
    for title, module in _PARTS:
        found: list[Rule] = list(importlib.import_module(module).RULES)
        yield title, sorted(found, key=lambda rule: (_LEVELS.index(rule.level), rule.id))


def page() -> str:
    """The whole page."""
    lines = [_HEAD]
    for title, found in rules():
        lines.append(f"## {title}\n")
        for rule in found:
            lines.append(f"### {rule.id}\n")
            lines.append(f"**{rule.level}**: {_sentence(rule.title)} {_sentence(rule.why)}\n")
            lines.append(f"Fix: {rule.fix}" + (f"  \nSource: {rule.source}" if rule.source else "") + "\n")
    return "\n".join(lines)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    # A field's name stays as it is written in a recipe.
    if text.split(" ")[0].rstrip(",").isalpha():
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else f"{text}."


def main(arguments: list[str]) -> int:
    """Prints the page, or writes it to the file that is named."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        print(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
