"""The streamer's benchmark: its cases of ours run, and its result is judged and printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers.harness
    import peers.ours
    import peers.plain  # noqa: F401

    yield sys.modules["peers"]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("peers", "stream")]:
        del sys.modules[name]


@pytest.fixture
def folder(peers: Any, tmp_path: Path) -> Path:
    peers.ours.make("ours", tmp_path / "ours", 128)
    return tmp_path / "ours"


@pytest.mark.parametrize("case", ["ours", "ours_checked"])
def test_our_case_delivers_the_rows_that_were_written(peers: Any, folder: Path, case: str) -> None:
    request = peers.harness.Request(case, str(folder), 0, 16)
    found = peers.harness.measure(peers.ours.open_reader, request, 128, check=True)
    assert (found["different_keys"], found["repeated_keys"]) == (128, 0)
    assert found["samples_per_s"] > 0
    assert found["stats"]["requests"] > 0


@pytest.mark.parametrize("case", ["readinto", "readinto_window", "by_hand"])
def test_plain_cases_read_the_same_files(peers: Any, folder: Path, case: str) -> None:
    request = peers.harness.Request(case, str(folder), 0, 16)
    found = peers.harness.measure(peers.plain.open_reader, request, 128, check=True)
    assert found["samples"] == 128
    assert found.get("different_keys", 128) == 128


def test_a_missed_target_shows(peers: Any) -> None:
    from stream import judge
    from stream_table import table

    judged = judge({"ratio_to_read": 0.69, "resume_ratio": 0.9})
    assert not judged["ratio_to_read"]["holds"]
    assert judged["resume_ratio"]["holds"]
    lines = table({"cases": {}, "targets": judged}).splitlines()
    assert [line.split()[-1] for line in lines if "target" in line] == ["MISSED", "holds"]
