"""``isthmus recipes``: what each command prints, and that the two ways into ``check`` are one."""

from __future__ import annotations

import gc
import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from isthmus.cli.app import build, main
from isthmus.cli.checking import plain_request
from isthmus.core.recipe import load_recipe, parse_recipe
from isthmus.core.recipe.load import shipped_recipes

SMALL = str(Path(__file__).with_name("small_recipe.yaml"))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that succeeds prints."""
    with suppress(SystemExit):
        main(arguments)
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "recipes", "list")
    assert [line.split()[0] for line in out.splitlines()] == list(shipped_recipes())
    rows = json.loads(printed(capsys, "recipes", "list", "--json"))
    assert [row["name"] for row in rows] == list(shipped_recipes())
    assert all(row["title"] and row["family"] and row["resolutions"] for row in rows)


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_show_prints_the_recipe_as_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shipped_recipes()[name].read_text("utf-8")
    assert printed(capsys, "recipes", "show", name) == text
    data = json.loads(printed(capsys, "recipes", "show", name, "--json"))
    assert parse_recipe(json.dumps(data), filename="r").recipe == load_recipe(name).recipe


def test_show_applies_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "recipes", "show", SMALL, "--set", "stages.0.steps=777", "--set", "seed=5")
    assert (
        parse_recipe(out, filename="r").recipe == load_recipe(SMALL, ["stages.0.steps=777", "seed=5"]).recipe
    )


def test_check_says_what_a_recipe_amounts_to(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "recipes", "check", "sdxl-progressive", "--backend", "azure")
    assert out.startswith("sdxl-progressive.yaml: ok\n")
    assert "2.567 G parameters" in out
    assert "128; lanes and batch sizes admit 1, 2, 4, 8, 16, 32, 64, 128" in out
    assert "1024px: 100,000 steps x 2,048 = 204.8 M samples, 4 x micro batch 4, 20.2 TFLOP an image" in out
    found = json.loads(printed(capsys, "recipes", "check", "sdxl-progressive", "--json"))
    assert found["world_size"] == 128
    assert found["stages"][2]["gradient_accumulation_steps"] == 4
    assert found["stages"][2]["train_flops"] == found["stages"][2]["train_flops_per_image"] * 204_800_000


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "recipes", "schema"))["title"] == "Isthmus recipe"


@pytest.mark.parametrize(
    "arguments",
    [
        ["quickstart"],
        [SMALL],
        ["quickstart", "--json"],
        ["--json", "quickstart"],
        ["quickstart", "--set", "seed=3"],
        ["quickstart", "--set=seed=3", "--json"],
        ["--set", "seed=3", "--set", "checkpoint.keep=2", "quickstart"],
        ["sdxl-progressive", "--backend", "azure"],
        ["sdxl-progressive", "--backend=sagemaker", "--json"],
        ["sdxl-progressive", "--backend", "azur"],
        ["quickstart", "--set", "sead=3"],
        ["quickstart", "--set", "seed"],
        ["quikstart"],
        ["quickstart", "--set", "backends.local.grace=0"],
        ["quickstart", "--set", "backends.local.grace=10 s"],
        ["quickstart", "--set", "backends.none={}"],
        ["quickstart", "--set", "backends.azure.anything=1"],
    ],
    ids=" ".join,
)
def test_the_quick_way_is_the_same_as_typers(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["recipes", "check", *arguments]
    assert plain_request(line) is not None
    results = []
    for run in (main, lambda line: build("recipes")(line, prog_name="isthmus", standalone_mode=False)):
        try:
            run(line)
            outcome = "ok"
        except SystemExit as end:
            outcome = f"exit {end.code}"
        except Exception as error:  # noqa: BLE001 - main turns it into an exit code, typer lets it through
            outcome = f"exit {getattr(error, 'exit_code', error)}"
        results.append((outcome, capsys.readouterr().out))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["recipes", "check"],
        ["recipes", "check", "--help"],
        ["recipes", "check", "a", "b"],
        ["recipes", "check", "a", "--set"],
        ["recipes", "check", "a", "--set", "--json"],
        ["recipes", "check", "a", "--backend"],
        ["recipes", "check", "a", "--jsn"],
        ["recipes", "check", "-h", "a"],
        ["recipes", "check", "--", "a"],
        ["recipes", "show", "a"],
        ["launch", "check"],
        [],
    ],
    ids=" ".join,
)
def test_whatever_is_not_plain_goes_through_typer(arguments: list[str]) -> None:
    assert plain_request(arguments) is None


def test_the_quick_way_leaves_the_process_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    import importlib.metadata as before

    assert gc.isenabled()
    printed(capsys, "recipes", "check", SMALL)
    assert gc.isenabled()
    assert sys.modules["importlib.metadata"] is before


def test_the_stand_in_gives_way_to_the_real_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.cli.checking import _StandIn

    monkeypatch.delitem(sys.modules, "importlib.metadata", raising=False)
    stand_in = _StandIn("importlib.metadata")
    monkeypatch.setitem(sys.modules, "importlib.metadata", stand_in)
    from importlib.metadata import entry_points

    assert sys.modules["importlib.metadata"] is stand_in
    assert list(entry_points(group="isthmus"))
    assert sys.modules["importlib.metadata"] is not stand_in
    assert stand_in.version("pydantic")
    with pytest.raises(AttributeError):
        _ = stand_in.__nothing__
