"""The submissions of a run: what was sent to a backend, put down before it was sent.

`submissions/0001.json` is made by conditional create, so that of several launchers or supervisors at once one makes an
attempt; `submissions/0001-answer.json` is what came of it. One without an answer may or may not have reached the cloud:
whoever finds it sends the very same request again, under the same name.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.errors import StorageError
from isthmus.storage.rundir.store import Store

_NAME = re.compile(r"(\d{4,})\.json")


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt to have the run run somewhere."""

    number: int
    """From 1, without gaps."""
    data: Mapping[str, Any]
    """What was put down before it was sent."""
    answer: Mapping[str, Any] | None
    """What came of it; None: nobody knows."""


class Submissions:
    """Reads and writes them; any number of processes may at once. Every method raises StorageError."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def numbers(self) -> list[int]:
        """The numbers there are, ascending."""
        found = (_NAME.fullmatch(name) for name in self._store.names("submissions"))
        return sorted(int(match[1]) for match in found if match)

    def all(self) -> list[Submission]:
        """All of them, in order."""
        return [self.read(number) for number in self.numbers()]

    def newest(self) -> Submission | None:
        """The one with the highest number."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else None

    def read(self, number: int) -> Submission:
        """That one. Raises StorageError when there is none."""
        data = self._load(_name(number))
        if data is None:
            raise StorageError("no such submission", where=f"{self._store.uri}/{_name(number)}")
        return Submission(number, data, self._load(_answer(number)))

    def claim(self, number: int, data: Mapping[str, Any]) -> bool:
        """Puts the submission down; False when another process has made the one of that number."""
        return self._create(_name(number), data)

    def answer(self, number: int, data: Mapping[str, Any]) -> bool:
        """Puts down what came of it; the first answer stays."""
        return self._create(_answer(number), data)

    def _create(self, name: str, data: Mapping[str, Any]) -> bool:
        token = secrets.token_hex(8)
        if self._store.create(name, (json.dumps({**data, "token": token}, indent=1) + "\n").encode()):
            return True
        # A store's client may repeat a create whose answer was lost: then the object that is there is ours.
        return (self._load(name) or {}).get("token") == token

    def _load(self, name: str) -> dict[str, Any] | None:
        data = self._store.read(name)
        if data is None:
            return None
        try:
            loaded = json.loads(data)
        except ValueError as error:
            raise StorageError(f"not valid JSON: {error}", where=f"{self._store.uri}/{name}") from error
        if not isinstance(loaded, dict):
            raise StorageError("not a JSON object", where=f"{self._store.uri}/{name}")
        return loaded


def _name(number: int) -> str:
    return f"submissions/{number:04d}.json"


def _answer(number: int) -> str:
    return f"submissions/{number:04d}-answer.json"
