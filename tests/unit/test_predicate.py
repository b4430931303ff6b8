"""Predicates: what they are true of, and that nothing else than a predicate is taken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.errors import UsageError
from isthmus.storage.shards.predicate import MAX_LENGTH, column_types, parse_predicate
from isthmus.storage.shards.synthetic import TINY

DOCS = Path(__file__).parents[2] / "docs" / "data.md"
TYPES = column_types(TINY)
ROWS: dict[str, Any] = {
    "key": ["a/1", "b/2", ""],
    "caption": ["a_b", "Watermark here\nand there", "it's 100% \\ safe"],
    "source": ["", "http://x", "http://y"],
    "bucket": ["1:1", "1:1", "2:1"],
    "original_width": np.array([10, 0, 30]),
    "original_height": np.array([5, 0, 20]),
    "clip_l_length": np.array([4, 1, 2]),
    "flipped": np.array([True, False, True]),
}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("width >= 10 and height<20", "100"),
        ("width = 10 OR width == 30", "101"),
        ("width != 10", "011"),
        ("width <> 10 and not width = 30", "010"),
        ("not not width > 3", "101"),
        ("width > 5 or true and false", "101"),
        ("(width > 5 or true) and false", "000"),
        ("width / height >= 1.5", "101"),
        ("width / height < 1.5", "000"),
        ("width / height != 2", "001"),
        ("-width = -10", "100"),
        ("width - 5 * 2 = 0", "100"),
        ("2e1 < width", "001"),
        ("width in (10, -3, 30)", "101"),
        ("width not in (10)", "011"),
        ("width between 1 and 10 or key = 'b/2'", "110"),
        ("width not between 1 and 10", "011"),
        ("flipped", "101"),
        ("not flipped", "010"),
        ("flipped = false", "010"),
        ("clip_l_length + 1 <= 3", "011"),
        ("key is null", "001"),
        ("key is not null", "110"),
        ("width is null and height is null", "010"),
        ("source is null", "100"),
        ("bucket = '1:1'", "110"),
        ('bucket = "2:1"', "001"),
        ("bucket in ('2:1', '4:3')", "001"),
        ("key < 'b'", "101"),
        ("'a/1' = key", "100"),
        ("key = caption", "000"),
        ("length(caption) = 3", "100"),
        ("length(lower('ABC')) = 3", "111"),
        ("lower(caption) like 'watermark%'", "010"),
        ("caption like 'watermark%'", "000"),
        ("caption like '%here%there'", "010"),
        ("caption like '%there%here%'", "000"),
        ("caption like 'a\\_b'", "100"),
        ("caption like 'a_b'", "100"),
        ("caption like '__'", "000"),
        ("caption like '%\\%%'", "001"),
        ("caption like '%\\\\%'", "001"),
        ("caption like 'it''s%'", "001"),
        ("caption not like '%a%'", "000"),
        ("caption like '%'", "111"),
        ("caption like ''", "000"),
        ("key like '%1' and caption like '.*'", "000"),
        ("true", "111"),
    ],
)
def test_what_a_predicate_is_true_of(text, rows):
    predicate = parse_predicate(text, TYPES)
    assert "".join("01"[int(found)] for found in predicate(ROWS, 3)) == rows


def test_a_predicate_reads_the_columns_that_it_names():
    assert parse_predicate("width > 3 and lower(caption) like 'x'", TYPES).columns == {
        "original_width",
        "caption",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it ends where a column or a value is expected, at character 1"),
        ("width", "it gives a number, not true or false"),
        ("widht > 3", "no column widht; did you mean width?, at character 1"),
        ("width > 'a'", "compares a number with a text"),
        ("flipped > true", "does not compare true and false"),
        ("width + key = 3", "is for numbers, this is a text"),
        ("- key = 3", "is for numbers, this is a text"),
        ("width and flipped", "joins comparisons, this is a number"),
        ("not width", "joins comparisons, this is a number"),
        ("width like 'a'", "compares text, this is a number"),
        ("caption like 3", "a text is expected in quotes, at character 14"),
        ("width in ('a')", "a number is expected"),
        ("width in ()", "a number is expected"),
        ("flipped in (true)", "compares text or numbers"),
        ("length(width) > 3", "is for text, this is a number"),
        ("size_class is null", "asks for text"),
        ("key not = 'a'", "stands before `in`, `like` or `between`"),
        ("width >", "it ends where"),
        ("(width > 3", "it ends where `)` is expected"),
        ("width > 3)", "`)` was not expected here"),
        ("width > 3 height > 4", "`height` was not expected here"),
        ("key = 'abc", "a text that is not closed cannot be read, at character 7"),
        ("width > 3; drop table x", "`;` cannot be read"),
        ("__import__('os').system('x')", "no function __import__()"),
        ("eval(key) = 'x'", "no function eval(); there are length() and lower()"),
        ("key.__class__ = 'x'", "`.` cannot be read"),
        ("(" * 100 + "true" + ")" * 100, "more than 64 brackets"),
        ("-" * 100 + "1 = 1", "more than 64 signs"),
        ("width in (" + "1," * 10001 + "1)", "more than 10000 values"),
        ("x" * (MAX_LENGTH + 1), "at most 100000 characters"),
    ],
)
def test_what_is_no_predicate(text, said):
    with pytest.raises(UsageError) as refused:
        parse_predicate(text, TYPES)
    assert said in str(refused.value)
    assert "\n" not in refused.value.message


def test_a_pattern_of_many_wildcards_takes_no_time():
    predicate = parse_predicate("caption like '" + "%a" * 1000 + "%b'", TYPES)
    assert not predicate({"caption": ["a" * 20_000]}, 1).any()


def test_the_hint_the_help_and_the_docs_name_the_same_columns() -> None:
    from isthmus.cli import data_repack

    with pytest.raises(UsageError) as raised:
        parse_predicate("no_such = 1", TYPES)
    hint = str(raised.value.hint).partition("columns: ")[2].split(", ")
    assert len(hint) == len(set(hint))
    own = {re.sub(r"^clip_\w+_length$|^t5\w*_length$", "ENCODER_length", name) for name in hint}
    own = {re.sub(r"^caption\d+$", "caption1", name) for name in own}
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith("| columns |"))
    docs = set(re.findall(r"`([a-zA-Z_0-9]+)`", row))
    help_text = str(data_repack._filter.__doc__).partition("Columns: ")[2].partition("Example")[0]
    told = set(re.findall(r"[a-zA-Z_0-9]{3,}", help_text)) - {"and", "each", "text", "encoder", "encoders"}
    assert docs - {"original_width", "original_height"} == own | {"caption1"}
    assert own - told == set()
