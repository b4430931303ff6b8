"""The part of `stream.py` that reads files from a page-cached disk: ours, the limit, and the peers."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.cases import CASES, DATA, Case
from peers.machine import Machine
from peers.rows import ROW_BYTES
from peers.venvs import python_of

Runs = list[dict[str, Any]]


@dataclass(slots=True)
class Disk:
    """Runs cases and keeps what they said."""

    machine: Machine
    folder: Path
    cache: Path
    rows: int
    repeats: int
    batch: int
    samples: int
    """Of a run of a case that does not end by itself."""
    runs: dict[tuple[str, int], Runs] = field(default_factory=dict)
    """By case and workers: the timed runs, and"""
    watched: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """the run whose rows were compared and whose memory was watched."""
    starts: dict[tuple[str, int], dict[str, list[float]]] = field(default_factory=dict)
    """`cold` and `resumed`: seconds to the first batch of a fresh process."""
    errors: dict[tuple[str, int], str] = field(default_factory=dict)
    round: int = 0
    """Runs of one round were made within the same minute."""

    def make(self, data: str) -> Path:
        """Writes the rows in one format, unless they are there."""
        folder = self.folder / data
        if not folder.exists():
            say(f"writing {self.rows} rows as {data}")
            made = DATA[data]
            python = python_of(
                next(c.environment for c in CASES.values() if c.module == made.module), self.cache
            )
            self.machine.make(python, [made.module, made.case, str(folder), "--make", str(self.rows)])
        return folder

    def drop(self, data: str) -> None:
        """Removes a format."""
        shutil.rmtree(self.folder / data, ignore_errors=True)

    def _run(self, name: str, workers: int, *more: str, watch: bool = False) -> dict[str, Any]:
        case = CASES[name]
        folder = self.folder / case.data
        arguments = [case.module, name, str(folder), "--workers", str(workers), "--batch", str(self.batch)]
        python = python_of(case.environment, self.cache)
        return self.machine.run(python, [*arguments, *more], warm=folder, watch=watch)

    def compare(self, name: str, workers: int) -> bool:
        """Reads an epoch, compares its rows with what was written and watches the memory; False when it failed."""
        found = self._run(name, workers, "--check", "--samples", str(self.rows), watch=True)
        key = name, workers
        self.watched[key] = found
        different = found.get("different_keys")
        if "error" in found:
            self.errors[key] = found["error"]
        elif CASES[name].counted and (
            different is None or different < self.rows - self.batch * max(1, workers)
        ):
            self.errors[key] = f"delivered {different} of {self.rows} rows"
        say(f"{label(name, workers)}: {self.errors.get(key, 'rows as written')}")
        return key not in self.errors

    def time(self, name: str, workers: int) -> None:
        """One timed run."""
        samples = [] if CASES[name].epochs else ["--samples", str(self.samples)]
        found = self._run(name, workers, *samples)
        if "error" in found:
            self.errors[name, workers] = found["error"]
        else:
            found["round"] = self.round
            self.runs.setdefault((name, workers), []).append(found)
            say(
                f"{label(name, workers)}: {found['samples_per_s']:,.0f} samples/s, "
                f"others used {found['foreign_cores']:.2f} cores"
            )

    def start(self, name: str, workers: int, repeats: int) -> None:
        """Cold starts and resumes at 90 % of an epoch, in turn."""
        with self.machine.turn():
            self._start(name, workers, repeats)

    def _start(self, name: str, workers: int, repeats: int) -> None:
        state = self.folder / f"{name}.state"
        at = int(0.9 * self.rows) // self.batch * self.batch
        saved = self._run(name, workers, "--samples", str(at), "--save", str(state))
        times: dict[str, list[float]] = {"cold": [], "resumed": []}
        problems: dict[str, str] = {}
        if "error" in saved:
            self.errors[name, workers] = f"state: {saved['error']}"
            return
        for turn in range(repeats):
            kinds: list[tuple[str, list[str]]] = [("cold", []), ("resumed", ["--load", str(state)])]
            for kind, more in kinds if turn % 2 == 0 else reversed(kinds):
                found = self._run(name, workers, "--samples", str(self.batch), *more)
                if "error" in found:
                    problems[kind] = found["error"]
                else:
                    times[kind].append(found["first_batch_s"])
        for kind in times:
            if not times[kind]:
                self.errors[name, workers] = f"{kind}: {problems[kind]}"
        self.starts[name, workers] = times
        found_times = [f"{kind} {median(values):.3f} s" for kind, values in times.items() if values]
        say(f"{label(name, workers)}: {', '.join(found_times) or self.errors[name, workers]}")

    def rounds(self, names: Iterable[tuple[str, int]]) -> None:
        """Timed runs of several cases in turn, so that what the machine does falls on all of them."""
        names = list(names)
        for turn in range(self.repeats):
            self.round += 1
            with self.machine.turn():
                for name, workers in names if turn % 2 == 0 else reversed(names):
                    if (name, workers) not in self.errors:
                        self.time(name, workers)

    def best(self, names: Sequence[str]) -> tuple[str, int] | None:
        """The fastest of some cases, at its best worker count."""
        rates = {key: self.rate(*key) for key in self.runs if key[0] in names}
        return max(rates, key=lambda key: rates[key], default=None)

    def rate(self, name: str, workers: int = 0) -> float:
        """Median samples a second, from the second batch on."""
        return median(run["samples_per_s"] for run in self.runs[name, workers])

    def ratio(self, one: tuple[str, int], other: tuple[str, int]) -> float:
        """Median over the rounds in which both ran of how much faster `one` was; 0 when there was no such round."""
        rates = [
            {run["round"]: run["samples_per_s"] for run in self.runs.get(key, [])} for key in (one, other)
        ]
        return median(rates[0][turn] / rates[1][turn] for turn in rates[0].keys() & rates[1].keys())

    def summary(self) -> dict[str, Any]:
        """Medians by case and workers."""
        found: dict[str, Any] = {}
        for name, case in CASES.items():
            for workers in case.workers:
                key = name, workers
                if key in self.runs or key in self.errors:
                    found.setdefault(
                        name, {"title": case.title, "shuffle": case.shuffle, "counted": case.counted}
                    )
                    found[name].setdefault("workers", {})[str(workers)] = self._medians(key)
        return found

    def _medians(self, key: tuple[str, int]) -> dict[str, Any]:
        runs, watched = self.runs.get(key, []), self.watched.get(key, {})
        found: dict[str, Any] = {"error": self.errors[key]} if key in self.errors else {}
        if runs:
            gigabytes = runs[0]["samples"] * ROW_BYTES / 1e9
            found |= {
                "samples_per_s": median(run["samples_per_s"] for run in runs),
                "samples_per_s_over_all": median(run["samples_per_s_over_all"] for run in runs),
                "samples_per_s_runs": [round(run["samples_per_s"]) for run in runs],
                "cpu_s_per_gb": median(run["cpu_s"] / gigabytes for run in runs),
                "first_batch_s": median(run["first_batch_s"] for run in runs),
                "foreign_cores": median(run["foreign_cores"] for run in runs),
            }
        for name in (
            "peak_pss_bytes",
            "peak_private_bytes",
            "imported_bytes",
            "different_keys",
            "repeated_keys",
        ):
            if name in watched:
                found[name] = watched[name]
        for kind, times in self.starts.get(key, {}).items():
            if times:
                found[f"{kind}_start_s"] = median(times)
        return found


def peers_of(data: str) -> list[tuple[str, Case]]:
    """The cases that read a format, ours apart."""
    return [(name, case) for name, case in CASES.items() if case.data == data and data != "ours"]


def median(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    found = list(values)
    return statistics.median(found) if found else 0.0


def label(name: str, workers: int) -> str:
    """A case and its workers in words."""
    return name + (f", {workers} workers" if workers else "")


def say(line: str) -> None:
    """Progress, beside the result on stdout."""
    print(line, file=sys.stderr, flush=True)
