"""`isthmus data copy` as a user types it."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from servers import Store
from transfers import contents, make_tree

from isthmus.cli.app import main

pytestmark = pytest.mark.usefixtures("no_credentials")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A source with files, and a target that is not there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return make_tree(tmp_path / "source", {"a": 100, "b/c": 2000}), tmp_path / "target"


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of `isthmus data copy`."""
    with pytest.raises(SystemExit) as ended:
        main(["data", "copy", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What it prints as JSON."""
    code, out, err = said(capsys, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_dry_run_copies_nothing(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = places
    found = printed(capsys, source, target, "--dry-run", "--bandwidth", "1MB/s")
    assert (found["files"], found["bytes"], found["usd"]) == (2, 2100, 0.0)
    assert found["hours"] == pytest.approx(2100 / 1e6 / 3600)
    assert not target.exists()
    code, out, _ = said(capsys, source, target, "--dry-run")
    assert code == 0
    assert "2.1 kB in 2 files (2 missing)" in out
    assert "say --bandwidth to know" in out


def test_then_it_copies_once(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = places
    code, out, _ = said(capsys, source, target)
    assert (code, out.split(";")[0]) == (0, "copied 2.1 kB in 2 files")
    assert contents(target) == contents(source)
    found = printed(capsys, source, target)
    assert (found["files"], found["same"], found["copied"]["parts_sent"]) == (0, {"copied": 2}, 0)


def test_deleting_is_asked_for(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = places
    make_tree(target, {"mine": 5})
    code, _, err = said(capsys, source, target, "--delete")
    assert code == 2
    assert "1 file would be removed" in err
    assert list(contents(target)) == ["mine"]
    assert printed(capsys, source, target, "--delete", "--dry-run")["to_delete"] == 1
    assert printed(capsys, source, target, "--delete", "--yes")["copied"]["deleted"] == 1
    assert contents(target) == contents(source)


def test_dollars_of_what_leaves_a_cloud(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], s3: Store
) -> None:
    source, target = places
    for name, data in contents(source).items():
        s3.put(name, data)
    found = printed(capsys, s3.root, target, "--dry-run", "--source-region", "us-east-2")
    assert [(line["name"], line["amount"]) for line in found["lines"]] == [("traffic", 2.1e-6), ("reads", 2)]
    assert found["lines"][0]["usd"] == 0.0  # within the month's free gigabyte
    assert (found["lines"][1]["usd"], found["usd"]) == (None, None)
    found = printed(capsys, source, s3.root + "2", "--dry-run", "--target-region", "us-east-1")
    assert found["usd"] == pytest.approx(4 * 0.05 / 10_000)  # two files, two lists
    code, out, _ = said(capsys, s3.root, target, "--dry-run", "--source-region", "us-east-2")
    assert code == 0
    assert "unknown: a part of it has no price" in out


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is not a size"),
        (["--memory", "0"], "--memory"),
        (["--memory", "1 KB"], "does not hold one part"),
        (["--source-region", "us-east-1"], "for the prices of --dry-run"),
        (["--command", "gsutil"], "no tool 'gsutil'"),
    ],
)
def test_a_wrong_option_is_one_line(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    source, target = places
    code, _, err = said(capsys, source, target, *more)
    assert code == 2
    assert err.startswith("error: ")
    assert says in err


def test_the_command_of_another_tool(
    places: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    source, _ = places
    assert printed(capsys, source, "s3://bucket/x", "--command", "s5cmd") == {
        "tool": "s5cmd",
        "command": f"s5cmd --numworkers=16 sync {source}/ s3://bucket/x/",
    }
    (source / "manifest.json").write_text("{}")
    _, out, _ = said(capsys, source, "s3://bucket/x", "--command", "rclone")
    assert out.count("&&") == 1


@pytest.mark.parametrize("at_once", [False, True], ids=["", "over-before-anybody-looks"])
def test_whoever_saw_a_progress_line_sees_the_last_one(
    places: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    at_once: bool,
) -> None:
    source, target = places
    _, out, err = said(capsys, source, target)
    assert (err, out.count("\n")) == ("", 1)  # too short to be told of
    # As on a terminal, and as if the copy took long.
    monkeypatch.setattr("isthmus.cli.data_copy.EVERY_S", 0.0)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)
    if at_once:
        start = threading.Thread.start

        def run_whole(thread: threading.Thread) -> None:
            start(thread)
            if thread.name.startswith("copy-"):
                thread.join()

        monkeypatch.setattr(threading.Thread, "start", run_whole)
    (source / "b" / "d").write_bytes(b"x" * 500)
    code, out, err = said(capsys, source, target)
    assert code == 0
    lines = err.split("\r")
    assert "500 bytes of 500 bytes, 1 file, " in lines[-1]
    assert lines[-1].rstrip(" \n").split(", ")[-1].startswith("in ")
    assert lines[-1].endswith("\n")  # what follows is on a line of its own
    assert err.count("\n") == 1
