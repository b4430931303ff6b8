"""The example of a third-party backend, installed as its users would, passes the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example installed, offline."""
    place = tmp_path_factory.mktemp("acme")
    # A copy, so that building leaves nothing in the repository.
    source = shutil.copytree(EXAMPLE, place / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = place / "site"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)], check=True
    )
    return target


def run(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that sees the installed example."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_it_passes_the_suite(installed: Path) -> None:
    """Slow: it runs real jobs, each of which starts torchrun."""
    suite = installed.parent / "source" / "tests"
    result = run(
        installed, "-m", "pytest", "-q", "--rootdir", str(suite), "-p", "no:cacheprovider", str(suite)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


def test_the_command_line_finds_it(installed: Path) -> None:
    words = ("-m", "isthmus", "launch", "quickstart", "--backend", "acme", "--dry-run")
    result = run(installed, *words, "--set", "backends.acme.queue=night")
    assert result.returncode == 0, result.stderr
    assert "#ACME --name" in result.stdout
    assert "--queue night" in result.stdout
    misspelt = run(installed, *words, "--set", "backends.acme.que=night")
    assert misspelt.returncode == 2
    assert "did you mean `queue`?" in misspelt.stderr
