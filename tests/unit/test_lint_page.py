"""docs/lint.md is what the rules say, and each rule says what a reader needs."""

from __future__ import annotations

from pathlib import Path

from isthmus.backends.lint_page import page, rules

PAGE = Path(__file__).parents[2] / "docs" / "lint.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python -m isthmus.backends.lint_page docs/lint.md makes it anew"
    )


def test_ids_are_unique_and_each_rule_is_whole() -> None:
    found = [rule for _, part in rules() for rule in part]
    ids = [rule.id for rule in found]
    assert len(ids) == len(set(ids))
    for rule in found:
        assert rule.id == rule.id.lower()
        assert rule.id.partition(".")[2].replace("-", "").isalnum(), rule.id
        assert rule.title, rule.id
        assert rule.why, rule.id
        assert rule.fix, rule.id
        assert "\n" not in rule.title + rule.fix, rule.id
