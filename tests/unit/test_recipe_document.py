"""YAML 1.2 as recipes use it: values, lines, and everything that is refused in one line."""

from __future__ import annotations

import pytest

from isthmus.core.recipe.document import MAX_BYTES, MAX_DEPTH, DocumentError, parse


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E+2", 300.0),
        (".5", 0.5),
        ("-0.0", 0.0),
        ("100_000", 100_000),
        ("0x10", 16),
        ("0o17", 15),
        ("007", 7.0),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("12:30", "12:30"),
        ("2026-11-30", "2026-11-30"),
        (".inf", ".inf"),
        ("az://a@b.c/d", "az://a@b.c/d"),
        ("{a: [1, {b: c}]}", {"a": [1, {"b": "c"}]}),
        ("|\n  two\n  lines", "two\nlines"),
    ],
)
def test_values_follow_yaml_1_2(text: str, value: object) -> None:
    found = parse(f"key: {text}").data["key"]
    assert found == value
    assert type(found) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    document = parse("# comment\na: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    assert document.data == {"a": 1, "b": ["x", {"c": 2, "d": 3}]}
    assert document.lines == {
        ("a",): 2,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 1): 5,
        ("b", 1, "c"): 5,
        ("b", 1, "d"): 6,
    }


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\na: 2", 2, "repeated (first on line 1)"),
        ("a: {b: 1, b: 2}", 1, "`b` is repeated"),
        ("a: &x 1\nb: *x", 1, "anchors (&x)"),
        ("b: *x", 1, "aliases (*x)"),
        ("a:\n  <<: {b: 1}", 2, "merge keys"),
        ("a: !!python/object:os.system x", 1, "tags"),
        ("a: !!int '3'", 1, "tags"),
        ("[a]: 1", 1, "a key must be a plain word"),
        ("? {a: b}\n: 1", 1, "a key must be a plain word"),
        ("a: 1\n---\nb: 2", 2, "a second document"),
        ("a: 1\n b: 2", 2, "not valid YAML"),
        ("a: [1, 2", 1, "not valid YAML"),
        ('a: "open', 1, "not valid YAML"),
        ("a:\n\t- b", 2, "not valid YAML"),
        ("a: \x00", 1, "not valid YAML"),
        ("a: 1\nb: \x07", 2, "not valid YAML"),
        ("a: " + "9" * 101, 1, "more than 100 digits"),
        ("a: 1e999", 1, "too large"),
        ("a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 1, "levels deep"),
        ("a: " + "[" * 50_000, 1, "levels deep"),
        ("a: '" + "x" * MAX_BYTES + "'", 1, "characters"),
        ('a: "\\', 1, "not valid YAML"),
        ('a: "\\q"', 1, "not valid YAML"),
        ("%YAML 3.0\n---\na: 1", 1, "not valid YAML"),
    ],
)
def test_what_is_refused_says_where_and_why(text: str, line: int, words: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse(text)
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    if "not valid YAML" not in words:
        assert caught.value.line == line
    assert 1 <= caught.value.line <= text.count("\n") + 2


def test_an_alias_bomb_costs_nothing() -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
    )
    with pytest.raises(DocumentError, match="anchors"):
        parse(bomb)


def test_an_empty_document_is_none() -> None:
    assert parse("").data is None
    assert parse("# only a comment\n").data is None
