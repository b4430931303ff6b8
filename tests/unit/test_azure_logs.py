"""The logs of all nodes: each byte once, in order, over outages; and what is asked over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.ai.ml", reason="pip install 'isthmus[azure]'")
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from azure_wire import Answer, Request, Wire, client_on

from isthmus.backends.azure.errors import Unreachable
from isthmus.backends.azure.logs import Tailer, follow, time_of

BASE = "https://northern.example.com"


class FakeHistory:
    """Files that grow; reads are counted by their bytes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.bytes = 0
        self.away = 0

    def details(self, job: str) -> dict[str, Any]:
        if self.away:
            self.away -= 1
            raise Unreachable("nobody answers")
        return {"logFiles": {name: f"https://logs/{name}" for name in self.files}}

    def read(self, url: str, offset: int, name: str) -> tuple[bytes, int | None]:
        data = self.files[name][offset:]
        self.bytes += len(data)
        return data, len(self.files[name])


NODE = "user_logs/std_log_process_{}.txt"


def test_all_nodes_are_tailed_and_no_byte_twice() -> None:
    history = FakeHistory()
    tailer = Tailer(history, "j")  # type: ignore[arg-type]
    history.files = {
        NODE.format("00"): b"a\nb",
        NODE.format("01"): "ü\n".encode(),
        "system_logs/x.txt": b"no\n",
    }
    assert [(line.node, line.text) for line in tailer.poll()] == [(0, "a"), (1, "ü")]
    history.files[NODE.format("00")] += b"c\nd"
    assert [(line.node, line.text) for line in tailer.poll()] == [(0, "bc")]
    assert [line.text for line in tailer.poll(last=True)] == ["d"]
    assert tailer.poll(last=True) == []
    assert history.bytes == len(b"a\nbc\nd") + len("ü\n".encode())


def test_lines_that_tell_their_time_are_in_its_order() -> None:
    history = FakeHistory()
    history.files = {
        NODE.format("0"): b"2026-11-30T10:00:01Z one\n  more of one\n2026-11-30T10:00:03Z three\n",
        NODE.format("1"): b"2026-11-30T10:00:02Z two\n",
    }
    lines = Tailer(history, "j").poll()  # type: ignore[arg-type]
    assert [line.text.split()[-1] for line in lines] == ["one", "one", "two", "three"]
    assert lines[2].time == time_of(b"2026-11-30 10:00:02")


def test_a_file_that_begins_anew_is_read_anew() -> None:
    history = FakeHistory()
    tailer = Tailer(history, "j")  # type: ignore[arg-type]
    history.files = {NODE.format("0"): b"first attempt\n"}
    assert len(tailer.poll()) == 1
    history.files = {NODE.format("0"): b"2nd\n"}
    assert [line.text for line in tailer.poll()] == ["2nd"]


def test_following_goes_on_over_an_outage_and_ends_with_the_job() -> None:
    history = FakeHistory()
    history.files = {NODE.format("0"): b"one\n"}
    history.away = 3
    polls = iter([False, False, False, False, True])

    def ended() -> bool:
        over = next(polls)
        if over:
            history.files[NODE.format("0")] += b"last"
        return over

    found = follow(Tailer(history, "j"), ended, sleep=lambda _: None)  # type: ignore[arg-type]
    assert [line.text for line in found] == ["one", "last"]


def test_following_gives_up_when_nobody_answers_for_long() -> None:
    history = FakeHistory()
    history.away = 10**6
    ticks = iter(range(0, 10**6, 60))
    with pytest.raises(Unreachable):
        list(
            follow(
                Tailer(history, "j"), lambda: False, sleep=lambda _: None, clock=lambda: float(next(ticks))
            )
        )  # type: ignore[arg-type]


def test_logs_over_http_ask_for_what_is_new(tmp_path: Path) -> None:
    log = [b"hello\n"]

    def answers(request: Request) -> Answer | None:
        if request.path.endswith("/workspaces/images"):
            return Answer(
                200,
                {
                    "id": "/w",
                    "name": "images",
                    "location": "italynorth",
                    "properties": {"discoveryUrl": f"{BASE}/discovery"},
                },
            )
        if request.path == "/discovery":
            return Answer(200, {"history": BASE})
        if request.path.endswith("/details"):
            assert request.headers["authorization"] == "Bearer not-a-token"
            return Answer(200, {"logFiles": {NODE.format("0"): f"{BASE}/log?sig=x"}})
        if request.path == "/log":
            assert "authorization" not in request.headers, "a SAS signs itself"
            start = int(request.headers["range"].removeprefix("bytes=").rstrip("-"))
            whole = b"".join(log)
            if start >= len(whole):
                return Answer(416, b"", {"Content-Range": f"bytes */{len(whole)}"})
            return Answer(
                206, whole[start:], {"Content-Range": f"bytes {start}-{len(whole) - 1}/{len(whole)}"}
            )
        return None

    tailer = Tailer(client_on(Wire(answers)).history(), "j")
    assert [line.text for line in tailer.poll()] == ["hello"]
    assert tailer.poll() == []
    log.append(b"again\n")
    assert [line.text for line in tailer.poll()] == ["again"]
