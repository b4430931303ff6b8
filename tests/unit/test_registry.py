"""Backends by name: known, unknown, later, broken. Plugins are real distributions in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.backends.registry import get_backend
from isthmus.backends.spec import Backend
from isthmus.errors import UsageError

Install = Callable[..., None]

ASK = "from isthmus.backends.registry import get_backend, backend_names\n"
SHOW = (
    "from isthmus.errors import IsthmusError\n"
    "import sys\n"
    "try: print(get_backend(sys.argv[1]).name)\n"
    "except IsthmusError as error: print(type(error).__name__, error.exit_code, error)\n"
)


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Installs a plugin: its entry point's name and module, and the source of its files."""

    def install(point: str, **files: str) -> None:
        for module, source in files.items():
            (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{point}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {point}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[isthmus]\n{point} = {next(iter(files))}\n")

    return install


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Stdout and stderr of a program that sees the installed plugins."""

    def ask(program: str, *arguments: str) -> tuple[str, str]:
        result = subprocess.run(
            [sys.executable, "-c", ASK + program, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return result.stdout.strip(), result.stderr.strip()

    return ask


def plugin(name: str, target: str, extra: str | None = None) -> str:
    """The source of a plugin module that announces one backend."""
    return (
        "from isthmus.backends.hooks import hookimpl\n"
        "@hookimpl\n"
        f"def isthmus_backends(): return [({name!r}, {target!r}, {extra!r})]\n"
    )


def test_local_is_built_in() -> None:
    assert isinstance(get_backend("local"), Backend)


@pytest.mark.parametrize("name", ["azure", "sagemaker"])
def test_the_clouds_are_built_in(name: str) -> None:
    assert isinstance(get_backend(name), Backend)


@pytest.mark.parametrize(
    ("word", "meant"), [("locl", "local"), ("azur", "azure"), ("sagemeker", "sagemaker")]
)
def test_a_misspelt_name_gets_a_suggestion(word: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        get_backend(word)
    assert caught.value.hint == f"did you mean {meant}?"


def test_a_broken_plugin_is_reported_once_and_skipped(
    install: Install, ask: Callable[..., tuple[str, str]]
) -> None:
    install("oops", oops_plugin="import no_such_module_at_all\n")
    out, err = ask("get_backend('local'); print(get_backend('local').name, backend_names())")
    assert out.startswith("local ['")
    (line,) = err.splitlines()
    assert line.startswith("warning: plugin oops is broken and was skipped: ModuleNotFoundError")


def test_a_broken_plugin_that_was_asked_for_is_an_error(
    install: Install, ask: Callable[..., tuple[str, str]]
) -> None:
    install("oops", oops_plugin="raise RuntimeError('two\\nlines')\n")
    out, err = ask(SHOW, "oops")
    assert out.startswith("PluginError 2 backend oops cannot be loaded: RuntimeError: two lines")
    assert err == ""


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import no_such_module_at_all\n", "No module named 'no_such_module_at_all'"),
        ("class Backend:\n    def __init__(self): raise OSError('no key')\n", "OSError: no key"),
        ("class Other: pass\n", "has no attribute 'Backend'"),
        ("class Backend: name = 'acme'\n", "lacks capabilities, settings, render, lint"),
    ],
)
def test_a_backend_that_cannot_be_loaded_names_its_plugin(
    install: Install, ask: Callable[..., tuple[str, str]], source: str, cause: str
) -> None:
    install("acme_plugin", acme_hooks=plugin("acme", "acme_backend:Backend"), acme_backend=source)
    out, _ = ask(SHOW, "acme")
    assert out.startswith("PluginError 2 backend acme of plugin acme_plugin cannot be loaded")
    assert cause in out
    assert ask(SHOW, "local") == ("local", ""), "it is not even imported for another backend"


def test_a_missing_extra_is_named(install: Install, ask: Callable[..., tuple[str, str]]) -> None:
    backend = "import acme_cloud_sdk\n"
    install("acme_plugin", acme_hooks=plugin("acme", "acme_backend:Backend", "acme"), acme_backend=backend)
    out, _ = ask(SHOW, "acme")
    assert out.startswith("NotInstalled 2 the acme backend needs acme_cloud_sdk")
    assert "pip install 'isthmus[acme]'" in out


def test_nobody_takes_the_place_of_a_built_in_backend(
    install: Install, ask: Callable[..., tuple[str, str]]
) -> None:
    install("aaa", aaa_hooks=plugin("local", "aaa_backend:Backend"), aaa_backend="raise SystemError\n")
    assert ask(SHOW, "local")[0] == "local"


def test_an_unknown_hook_breaks_only_its_plugin(
    install: Install, ask: Callable[..., tuple[str, str]]
) -> None:
    wrong = "from isthmus.backends.hooks import hookimpl\n@hookimpl\ndef isthmus_backend(): return []\n"
    install("aaa", aaa_hooks=wrong)
    install("zzz", zzz_hooks=plugin("zzz", "nowhere:Backend"))
    out, err = ask("print(backend_names())")
    assert "'local'" in out
    assert "'zzz'" in out
    assert "plugin aaa is broken" in err
    assert "zzz" not in err


def test_looking_for_backends_loads_none(ask: Callable[..., tuple[str, str]]) -> None:
    out, _ = ask("import sys; backend_names(); print('isthmus.backends.local.backend' in sys.modules)")
    assert out == "False"
