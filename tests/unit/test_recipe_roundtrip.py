"""Properties: what is dumped is read back; nothing that is written ends in a traceback."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.core.recipe import LoadedRecipe, load_recipe, parse_recipe, resolve
from isthmus.core.recipe.document import parse
from isthmus.core.recipe.dump import _quoted, dump_recipe, recipe_data, recipe_hash
from isthmus.core.recipe.load import shipped_recipes
from isthmus.core.recipe.units import Interval, format_seconds, parse_duration, parse_interval
from isthmus.errors import RecipeError

TEXT = Path(__file__).with_name("small_recipe.yaml").read_text("utf-8")
DATA = parse(TEXT).data
LARGE = parse(shipped_recipes()["sdxl-progressive"].read_text("utf-8")).data


def load(text: str, *overrides: str) -> LoadedRecipe | None:
    """The recipe, or None when it is refused with problems of one line each."""
    try:
        return parse_recipe(text, filename="r.yaml", overrides=overrides)
    except RecipeError as error:
        problems = error.problems
    assert problems
    for line in problems:
        assert "\n" not in line
        assert line.startswith(("r.yaml:", "--set "))
        assert len(line) < 2000
    return None


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
@pytest.mark.parametrize("backend", [None, "local"])
def test_shipped_recipes_are_read_back_equal(name: str, backend: str | None) -> None:
    recipe = load_recipe(name).recipe
    if backend:
        recipe = resolve(recipe, backend)
    again = parse_recipe(dump_recipe(recipe), filename="r.yaml").recipe
    assert again == recipe
    assert recipe_data(again) == recipe_data(recipe)
    assert recipe_hash(again) == recipe_hash(recipe)


def test_the_hash_is_of_the_meaning() -> None:
    base = parse_recipe(TEXT, filename="r.yaml").recipe
    written_out = parse_recipe(
        TEXT, filename="r.yaml", overrides=["stages.0.max_grad_norm=1", "code="]
    ).recipe
    other = parse_recipe(TEXT, filename="r.yaml", overrides=["stages.0.max_grad_norm=2"]).recipe
    assert recipe_hash(base) == recipe_hash(written_out) != recipe_hash(other)
    reordered = json.dumps(dict(reversed(DATA.items())))
    assert recipe_hash(parse_recipe(reordered, filename="r.yaml").recipe) == recipe_hash(base)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(texts)
@example("\u0085 \u2028\ufeff\x07\x7f\\\"'#: -")
@example("1e-4")
@example("true")
@example("😀")
def test_any_text_survives(text: str) -> None:
    found = load(TEXT, f"validation.prompts=[{_quoted(text)}]")
    if found is not None:
        assert found.recipe.validation.prompts == [text]
        assert parse_recipe(dump_recipe(found.recipe), filename="r.yaml").recipe == found.recipe


@given(
    steps=st.integers(51, 10**9),
    rate=st.floats(1e-12, 1, exclude_min=True),
    decay=st.floats(0, 0.999999),
    seed=st.integers(0, 2**31 - 1),
    every=st.one_of(
        st.integers(1, 10**9).map(lambda steps: f"{steps} steps"),
        st.floats(0.01, 1e6).map(lambda seconds: format_seconds(round(seconds, 3))),
    ),
    repeat=st.fractions(min_value="1/100", max_value=100, max_denominator=100),
    memory=st.integers(10**9, 10**15),
    names=st.lists(texts.filter(bool), max_size=3, unique=True),
)
def test_any_valid_values_are_read_back_equal(
    steps: int, rate: float, decay: float, seed: int, every: str, repeat: Any, memory: int, names: list[str]
) -> None:
    data = copy.deepcopy(DATA)
    data["stages"][0] |= {"steps": steps, "learning_rate": rate}
    data["ema"] = {"decay": decay}
    data["seed"] = seed
    data["checkpoint"] = {"every": every}
    data["data"] |= {"memory_limit": memory}
    data["data"]["sources"][0]["repeat"] = str(repeat)
    data["run_directory"] = {f"x{number}": name for number, name in enumerate(names)} | {"local": "r"}
    found = load("\n".join(f"{key}: {_flow(value)}" for key, value in data.items()))
    if found is None:
        return  # a name that looks like a secret
    recipe = found.recipe
    assert recipe.stages[0].learning_rate == rate
    assert recipe.data.sources[0].repeat == repeat
    assert parse_recipe(dump_recipe(recipe), filename="r.yaml").recipe == recipe
    assert recipe_hash(parse_recipe(dump_recipe(recipe), filename="r.yaml").recipe) == recipe_hash(recipe)


@given(st.floats(0.001, 1e9))
def test_durations_are_read_back_exactly(seconds: float) -> None:
    seconds = parse_duration(seconds)
    assert parse_duration(format_seconds(seconds)) == seconds
    assert parse_interval(str(Interval(seconds=seconds))) == Interval(seconds=seconds)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(key))}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(found for key, value in inner for found in paths(value, (*path, key)))]


WORDS = sorted({str(part) for path in paths(LARGE) for part in path})
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.integers(-3, 300),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
        st.sampled_from(
            [*WORDS, "flow", "epsilon", "min_snr", "sdxl", "hsdp", "4 GB", "15 min", "1/3", "1e999999999"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=6,
)


def mutate(data: Any, path: tuple[Any, ...], how: str, value: Any, word: str) -> Any:
    """A copy with one place changed, removed, renamed or repeated."""
    if not path:
        return value if how == "set" else data
    data = copy.deepcopy(data)
    container = data
    for part in path[:-1]:
        container = container[part]
    if how == "set":
        container[path[-1]] = value
    elif how == "remove":
        del container[path[-1]]
    elif isinstance(container, dict):
        container[word] = container[path[-1]] if how == "repeat" else container.pop(path[-1])
    else:
        container.append(container[path[-1]])
    return data


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([DATA, LARGE]),
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.sampled_from(["set", "set", "remove", "rename", "repeat"]),
            values,
            st.sampled_from(WORDS),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_mutated_recipes_are_refused_or_valid(data: Any, mutations: list[tuple[int, str, Any, str]]) -> None:
    for number, how, value, word in mutations:
        places = paths(data)
        data = mutate(data, places[number % len(places)], how, value, word)
    found = load(_flow(data))
    if found is not None:
        assert parse_recipe(dump_recipe(found.recipe), filename="r.yaml").recipe == found.recipe
        recipe_hash(found.recipe)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.integers(0, 12), texts), min_size=1, max_size=4))
def test_damaged_text_is_refused_or_valid(edits: list[tuple[int, int, str]]) -> None:
    text = TEXT
    for start, length, replacement in edits:
        text = text[:start] + replacement + text[start + length :]
    load(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_refused_or_valid(text: str) -> None:
    load(text)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=40),
        st.tuples(
            st.lists(st.sampled_from([*WORDS, "0", "1", "-1", "[0]"]), min_size=1, max_size=5), values
        ).map(lambda pair: ".".join(pair[0]) + "=" + _flow(pair[1])),
    )
)
def test_any_override_is_refused_or_valid(override: str) -> None:
    load(TEXT, override)
