"""Newer prices from the clouds' own public lists: fetched whole, checked, and only then written.

They go to this machine's state (`snapshot_folder()`, or where ``isthmus prices refresh --to`` says) and are read in
place of the package's. A fetch that fails, half-way too, or whose answer cannot be right leaves the old files as they are.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from isthmus.cost.catalog import Price, Rate
from isthmus.cost.integrity import price_problems, rate_problems
from isthmus.errors import IsthmusError

TIMEOUT_S = 60
ATTEMPTS = 5
UNREACHABLE_ATTEMPTS = 3
LONGEST_WAIT_S = 90.0
THROTTLED = (429, 500, 502, 503, 504)
LARGEST_BYTES = 512 * 2**20


class RefreshFailed(IsthmusError):
    """A price list could not be read, or cannot be right; the old snapshot is untouched."""


@dataclass(frozen=True, slots=True)
class Http:
    """How lists are fetched: with patience where a service throttles or stumbles."""

    sleep: Callable[[float], None] = time.sleep
    attempts: int = ATTEMPTS

    def get(self, url: str) -> bytes:
        """The whole answer.

        Raises:
            RefreshFailed: unreachable, refused, cut short, or still throttled after the last attempt.
        """
        wait, what = 1.0, ""
        for attempt in range(self.attempts):
            if attempt:
                self.sleep(wait)
            try:
                return self._once(url)
            except HTTPError as error:
                if error.code not in THROTTLED:
                    raise RefreshFailed(f"answered {error.code} {error.reason}", where=_short(url)) from error
                what = f"answered {error.code} {error.reason}"
                wait = _advised(error) or 2 * wait
            except (URLError, OSError, ValueError) as error:
                what, wait = str(getattr(error, "reason", error)), 2 * wait
                if attempt + 1 >= UNREACHABLE_ATTEMPTS:
                    break
        raise RefreshFailed(f"{what}, {attempt + 1} times", where=_short(url))

    def _once(self, url: str) -> bytes:
        request = Request(url, headers={"User-Agent": "isthmus prices refresh", "Accept": "*/*"})
        with urlopen(request, timeout=TIMEOUT_S) as answer:  # URLs are ours, or next pages of the same host
            body: bytes = answer.read(LARGEST_BYTES + 1)
            length = answer.headers.get("Content-Length")
        if len(body) > LARGEST_BYTES:
            raise RefreshFailed("is larger than a price list can be", where=_short(url))
        if length is not None and int(length) != len(body):
            raise ValueError(f"{len(body)} of {length} bytes came")
        return body

    def json(self, url: str) -> Any:
        """The answer as JSON.

        Raises:
            RefreshFailed: as of `get`, or it is none.
        """
        try:
            return json.loads(self.get(url))
        except (ValueError, UnicodeDecodeError) as error:
            raise RefreshFailed("the answer is no JSON", where=_short(url)) from error


def _advised(error: HTTPError) -> float | None:
    """Seconds that the service asks to wait, within reason."""
    for header in ("Retry-After", "x-ms-ratelimit-retailprices-retry-after"):
        value = error.headers.get(header, "") if error.headers else ""
        if value.isdigit():
            return min(float(value), LONGEST_WAIT_S)
    return None


def _short(url: str) -> str:
    return url.split("?")[0]


def merge(
    old: tuple[Sequence[Price], Sequence[Rate]], new: tuple[Sequence[Price], Sequence[Rate]], today: date
) -> tuple[list[Price], list[Rate]]:
    """New rows in place of old ones of the same name; old ones that nobody lists any more stay, with their date.

    Raises:
        RefreshFailed: no new row at all, or rows that cannot be right.
    """
    if not new[0]:
        raise RefreshFailed("the answer has none of the machines that isthmus knows")
    wrong = price_problems(new[0], today) + rate_problems(new[1], today)
    if wrong:
        raise RefreshFailed(f"{len(wrong)} rows cannot be right, the first: {wrong[0]}")
    prices, rates = _over(old[0], new[0]), _over(old[1], new[1])
    clash = price_problems(prices, today)
    # An old spot price above a new on-demand price is the old row's end, not the answer's fault.
    stale = {line.split(":")[0] for line in clash}
    fresh = {row.key for row in new[0]}
    prices = [row for row in prices if row.key in fresh or " ".join(row.key) not in stale]
    return prices, rates


def _over(old: Iterable[Any], new: Iterable[Any]) -> list[Any]:
    replaced = {row.key: row for row in new}
    # A range of amounts is replaced as a whole: the new list may start its steps elsewhere.
    ranges = {row.key[:4] for row in replaced.values() if isinstance(row, Rate)}
    kept = [row for row in old if row.key not in replaced and row.key[:4] not in ranges]
    return sorted([*kept, *replaced.values()], key=lambda row: row.key)


def write(rows: Sequence[Price] | Sequence[Rate], kind: type[Price] | type[Rate], path: Path) -> None:
    """The rows as CSV, whole or not at all.

    Raises:
        RefreshFailed: the file cannot be written.
    """
    text = io.StringIO()
    names = [field.name for field in fields(kind)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in asdict(row).items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(path)
    except OSError as error:
        raise RefreshFailed(f"cannot be written: {error}", where=str(path)) from error
