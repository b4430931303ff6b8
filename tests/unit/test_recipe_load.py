"""Loading: places of fields, overrides, and errors that a reader can act on."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.core.recipe import Recipe, load_recipe, parse_recipe, resolve
from isthmus.core.recipe.load import shipped_recipes
from isthmus.errors import RecipeError, UsageError

TEXT = Path(__file__).with_name("small_recipe.yaml").read_text("utf-8")


def problems(text: str = TEXT, *overrides: str) -> list[str]:
    """The lines of the error; empty when the recipe is valid."""
    try:
        parse_recipe(text, filename="r.yaml", overrides=overrides)
    except RecipeError as error:
        return error.problems
    return []


def line_of(text: str, words: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


def test_shipped_recipes_are_valid_and_found_by_name() -> None:
    assert {"quickstart", "sdxl-progressive", "sd3-medium", "pixart-512"} <= set(shipped_recipes())
    for name in shipped_recipes():
        loaded = load_recipe(name)
        assert loaded.recipe.name == name
        assert loaded.filename == f"{name}.yaml"


def test_a_file_of_the_same_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("quickstart").write_text(TEXT.replace("name: quickstart", "name: mine"))
    assert load_recipe("quickstart").recipe.name == "mine"


def test_where_names_file_and_line() -> None:
    loaded = parse_recipe(TEXT, filename="dir/r.yaml", overrides=["stages.0.steps=700", "budget.max_usd=3"])
    assert loaded.where("stages.0.learning_rate") == f"dir/r.yaml:{line_of(TEXT, 'learning_rate:')}"
    assert loaded.where("stages[0].learning_rate") == loaded.where("stages.0.learning_rate")
    assert loaded.where("stages.0.steps") == "--set stages.0.steps"
    assert loaded.where("budget.max_usd") == "--set budget.max_usd"
    # What was not written is placed at its section, or at the start.
    assert loaded.where("stages.0.max_grad_norm") == f"dir/r.yaml:{line_of(TEXT, '- name: ')}"
    assert loaded.where("monitor.data_wait") == "dir/r.yaml:1"
    assert loaded.where("..") == "dir/r.yaml:1"


@pytest.mark.parametrize(
    ("override", "attribute", "value"),
    [
        ("stages.0.learning_rate=1e-4", lambda r: r.stages[0].learning_rate, 1e-4),
        ("stages.0.learning_rate=1", lambda r: r.stages[0].learning_rate, 1.0),
        ("stages[0].name=first", lambda r: r.stages[0].name, "first"),
        ("parallel.compile=true", lambda r: r.parallel.compile, True),
        ("parallel.compile=aot_eager", lambda r: r.parallel.compile, "aot_eager"),
        ("validation.guidance_scale=4", lambda r: r.validation.guidance_scale, 4.0),
        ("optimizer.betas=[0.8, 0.9]", lambda r: r.optimizer.betas, (0.8, 0.9)),
        ("optimizer.betas.1=0.9", lambda r: r.optimizer.betas[1], 0.9),
        ("data.sources.0.uri=a=b", lambda r: r.data.sources[0].uri, "a=b"),
        ("data.sources.0.repeat=3/2", lambda r: str(r.data.sources[0].repeat), "3/2"),
        (
            "data.sources.1={uri: s3://example-bucket/x}",
            lambda r: r.data.sources[1].uri,
            "s3://example-bucket/x",
        ),
        ("monitor.data_wait.max=2", lambda r: r.monitor.data_wait.max, 2.0),
        ("monitor.data_wait={max: 2, for: 5 min}", lambda r: r.monitor.data_wait.for_, 300.0),
        ("run_directory={local: ./r, azure: az://r@a/x}", lambda r: r.run_directory["azure"], "az://r@a/x"),
        ("data.memory_limit=512 MiB", lambda r: r.data.memory_limit, 512 * 2**20),
        ("checkpoint.every=15 min", lambda r: r.checkpoint.every.seconds, 900.0),
        ("budget=", lambda r: r.budget.max_hours, None),
    ],
)
def test_overrides_are_typed_as_yaml(override: str, attribute: object, value: object) -> None:
    if override == "budget=":
        override = "budget={}"
    recipe = parse_recipe(TEXT, filename="r.yaml", overrides=[override]).recipe
    assert attribute(recipe) == value  # type: ignore[operator]


def test_later_overrides_win_and_can_replace_a_section() -> None:
    loaded = parse_recipe(
        TEXT, filename="r.yaml", overrides=["ema.decay=0.5", "ema={decay: 0.6, start: 3}", "ema.start=4"]
    )
    assert (loaded.recipe.ema.decay, loaded.recipe.ema.start) == (0.6, 4)
    assert loaded.where("ema.decay") == "--set ema"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.3.steps=5", "--set stages.3.steps: stages has 1 item; 3 is out of range"),
        ("stages.first.steps=5", "stages is a list; give an index from 0 to 0"),
        ("name.first=5", "name is a single value and has no field `first`"),
        ("stages.0.steps", "an override is `path.to.field=value`"),
        ("=5", "is not a field path"),
        ("stages..steps=5", "is not a field path"),
        ("stages.0.=5", "is not a field path"),
        ("stages[x].steps=5", "is not a field path"),
        ("stages.0.steps=[1", "the value is not valid YAML"),
        ("stages.0.steps=*a", "the value is aliases (*a) are not supported"),
        (
            "stage.0.steps=5",
            "--set stage.0.steps: stage: is not a field of a recipe (did you mean `stages`?)",
        ),
        ("stages.0.lr=5", "--set stages.0.lr: stages[0].lr: is not a field of a recipe"),
        ("stages.0.learning_rat=5", "did you mean `learning_rate`?"),
        (
            "monitor.data_wait.fro=5",
            "monitor.data_wait.fro: is not a field of a recipe (did you mean `for`?)",
        ),
        ("stages.0.steps=many", "--set stages.0.steps: stages[0].steps: must be a whole number, not `many`"),
        ("stages.0.steps='5'", "must be a whole number, not `5` (write it without quotes)"),
        ("stages.0.steps=2000.0", "must be a whole number, not 2000.0 (write 2000)"),
        ("stages.0.steps=0", "must be above 0, not 0"),
        ("stages.0.steps=true", "must be a whole number, not true"),
        ("stages.0.learning_rate=.inf", "must be a number, not `.inf`"),
        ("stages.0.learning_rate=", "must be a number, not empty"),
        ("stages={}", "must be a list, not a section"),
        ("stages=[]", "must be at least 1 item long"),
        ("model=quickstart", "must be a section, not `quickstart`"),
        ("parallel.strategy=FSDP", "must be one of `ddp`, `fsdp`, `hsdp`, not `FSDP` (did you mean `fsdp`?)"),
        ("parallel.compile=yes", "parallel.compile: must be true or false or one of `inductor`, `aot_eager`"),
        ("name=Quick Start", "name: must be a text that matches"),
        ("version=2", "version: must be one of 1, not 2"),
        ("data.sources.0.uri=", "must be a URI or path, a list of roots, or one of these for each backend"),
        ("data.sources.0.uri=[a, 3]", "must be a URI or path, a list of roots"),
        ("run_directory=[a]", "run_directory: must be a URI or path, or one for each backend, not a list"),
        ("data.memory_limit=4 GBit", "must be a size such as `4 GB` or `512 MiB`, not `4 GBit`"),
        ("data.sources.0.repeat=0", "must be a number above zero"),
        ("data.sources.0.repeat=1e-300", "must be a number above zero"),
        ("data.sources.0.repeat=0.0001", "denominator up to 1000"),
        ("checkpoint.every=often", "must be an interval such as `1000 steps` or `15 min`, not `often`"),
        ("checkpoint.every=0 steps", "must be an interval"),
        ("optimizer.betas=[0.9]", "betas"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas[1]: must be below 1, not 1.5"),
        ("optimizer.betas=0.9", "optimizer.betas: must be a list, not 0.9"),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(override: str, words: str) -> None:
    (line,) = problems(TEXT, override)
    assert words in line
    assert line.startswith(f"--set {override.partition('=')[0]}")
    assert "\n" not in line


def test_all_problems_are_listed_in_the_order_of_the_file() -> None:
    text = TEXT.replace("strategy: fsdp", "strategy: fdsp").replace("  lanes: 4", "  lane: 4")
    text = text.replace("seed: 0", "seed: -1").replace("gpu: none", "gpu: none\n  nodez: 3")
    found = problems(text)
    assert [line.split(": ")[1] for line in found] == [
        "seed",
        "data.lanes",
        "data.lane",
        "parallel.strategy",
        "compute.nodez",
    ]
    assert found[0] == f"r.yaml:{line_of(text, 'seed:')}: seed: must be at least 0, not -1"
    # A missing field has no line of its own: its section's is given.
    assert found[1].startswith(f"r.yaml:{line_of(text, 'data:')}: data.lanes: is missing")
    assert found[2].startswith(f"r.yaml:{line_of(text, '  lane: 4')}: data.lane: is not a field of a recipe")
    assert "did you mean `lanes`?" in found[2]


def test_a_missing_section_says_what_it_holds() -> None:
    text = TEXT.replace("compute:", "computer:")
    assert any(
        "compute: is missing (a section with nodes, gpus_per_node, gpu" in line for line in problems(text)
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "r.yaml:1: a recipe is empty"),
        ("- a", "r.yaml:1: a recipe must be a section"),
        ("just words", "r.yaml:1: a recipe must be a section"),
        ("a: 1\na: 2", "r.yaml:2: the key `a` is repeated"),
        ("a: [", "r.yaml:1: not valid YAML"),
    ],
)
def test_what_is_not_a_recipe_at_all(text: str, words: str) -> None:
    (line,) = problems(text)
    assert words in line


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recipe quikstart") as caught:
        load_recipe("quikstart")
    assert caught.value.hint == "did you mean `quickstart`?"
    with pytest.raises(UsageError, match="no recipe"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot read recipe"):
        load_recipe(tmp_path)
    with pytest.raises(UsageError, match="cannot read recipe"):
        load_recipe("a\0b")
    (tmp_path / "latin.yaml").write_bytes(b"version: 1\nname: caf\xe9\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(tmp_path / "latin.yaml")
    assert refused.value.problems == [f"{tmp_path}/latin.yaml:2: not UTF-8 text"]


def test_resolve_takes_one_backends_places() -> None:
    loaded = load_recipe("sdxl-progressive").recipe
    azure = resolve(loaded, "azure")
    assert azure.data.sources[0].uri == ["az://latents@exampleaccount.blob.core.windows.net/photos-v3"]
    assert azure.run_directory == "az://runs@exampleaccount.blob.core.windows.net/sdxl"
    assert resolve(azure, "azure") == azure
    assert resolve(azure, "local") == azure
    assert isinstance(loaded.run_directory, dict)
    with pytest.raises(RecipeError) as caught:
        resolve(loaded, "lokal")
    assert (
        "run_directory.lokal: no place for backend lokal (did you mean `local`?)" in caught.value.problems[-1]
    )
    assert len(caught.value.problems) == 3


def test_a_recipe_is_immutable_and_its_copies_know_what_was_written() -> None:
    recipe = load_recipe("quickstart").recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.seed = 3
    assert isinstance(recipe, Recipe)
    assert "optimizer" in recipe.model_fields_set
    assert "monitor" not in recipe.model_fields_set


def test_threads_load_at_once_and_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYDANTIC_DISABLE_PLUGINS"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            loaded = [
                future.result()
                for future in [pool.submit(parse_recipe, TEXT, filename="r.yaml") for _ in range(64)]
            ]
    finally:
        sys.setswitchinterval(interval)
    assert {one.recipe.name for one in loaded} == {"quickstart"}
    assert name not in os.environ
