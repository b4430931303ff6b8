"""The command line as a whole: what it imports, how it fails, what help says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from isthmus import __version__
from isthmus.cli.app import MODULES, build, main
from isthmus.errors import UsageError


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a real process."""
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


def modules_after(*arguments: str) -> set[str]:
    """Top-level packages that a command has imported."""
    code = f"""
import sys, json, atexit
from isthmus.cli.app import main
atexit.register(lambda: print("\\n" + json.dumps(sorted({{m.partition(".")[0] for m in sys.modules}}))))
main({list(arguments)!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return set(found)


HEAVY = {
    "torch", "numpy", "pyarrow", "fsspec", "diffusers", "transformers", "accelerate", "obstore", "PIL", "rich",
    "boto3", "botocore", "azure", "sagemaker", "s3fs", "adlfs", "aiohttp", "requests",
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["recipes", "--help"],
        ["recipes", "check", "--help"],
        ["recipes", "check", "quickstart"],
        ["recipes", "check", "sdxl-progressive", "--json"],
        ["recipes", "list"],
        ["recipes", "show", "quickstart"],
        ["recipes", "schema"],
        *([command, "--help"] for commands in MODULES.values() for command in commands),
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    assert not HEAVY & modules_after(*arguments)


def test_a_plain_check_imports_no_typer_either() -> None:
    assert not {"typer", "click", "email"} & modules_after("recipes", "check", "quickstart")


def test_help_names_every_command() -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for commands in MODULES.values():
        for command in commands:
            assert f"\n  {command} " in out
    assert "Example: isthmus quickstart" in out
    assert run("-h") == (code, out, err)


def test_no_command_is_help() -> None:
    code, out, err = run()
    assert code == 2
    assert "Usage: isthmus" in out + err


def test_every_command_has_help_with_an_example() -> None:
    import typer.main

    def commands(command: object, path: str) -> list[tuple[str, object]]:
        inner = getattr(command, "commands", {})
        return [found for name, sub in inner.items() for found in commands(sub, f"{path} {name}")] or [
            (path, command)
        ]

    for path, command in commands(typer.main.get_command(build()), "isthmus"):
        text = str(getattr(command, "help", ""))
        assert "Example" in text, f"{path}: {text}"
        # The default of its group: what is typed is `isthmus cost RECIPE`.
        assert path.removesuffix(" recipe") in text, f"{path}: {text}"


@pytest.mark.parametrize("command", [command for commands in MODULES.values() for command in commands])
def test_one_command_is_registered_by_one_module(command: str) -> None:
    import typer.main

    alone = typer.main.get_command(build(command))
    assert command in alone.commands  # type: ignore[attr-defined]


def test_version() -> None:
    assert run("--version") == (0, f"isthmus {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lanch"], "No such command 'lanch'. Did you mean 'launch'?"),
        (["recipe"], "Did you mean 'recipes'"),
        (["recipes", "chek"], "Did you mean 'check'"),
        (["recipes", "check"], "Missing argument"),
        (["recipes", "check", "quickstart", "--bakend", "x"], "--backend"),
        (["recipes", "check", "quickstart", "--set"], "requires an argument"),
    ],
)
def test_usage_mistakes_exit_with_2_and_say_what_was_meant(arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert words in err
    assert out == ""
    assert "Traceback" not in err


def test_an_error_is_one_line_with_a_hint() -> None:
    assert run("recipes", "check", "quikstart") == (
        2, "", "error: no recipe quikstart\nhint: did you mean `quickstart`?\n",
    )  # fmt: skip


def test_all_recipe_problems_are_printed_one_a_line() -> None:
    code, out, err = run(
        "recipes", "check", "quickstart", "--set", "seed=-1", "--set", "compute.nodez=2", "--set", "name=A"
    )
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: --set ") for line in lines)


def test_the_debug_variable_gives_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_DEBUG", "1")
    with pytest.raises(UsageError, match="no recipe quikstart"):
        main(["recipes", "check", "quikstart"])


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m isthmus recipes schema | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "{\n"
    assert "Traceback" not in done.stderr
