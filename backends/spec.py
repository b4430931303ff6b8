"""The backend surface: what a backend is, and the words that cross it.

A backend turns a :class:`Job` into its cloud's native request (`render`, pure), finds out what would go wrong
(`lint` offline, `preflight` online), submits and follows it. All that a backend knows of a submitted job is in
its :class:`Handle`, so any other process can follow or stop it later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel

from isthmus.core.recipe.schema import Offer as WantedOffer
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import IsthmusError


class Capability(StrEnum):
    """What a backend can do; the command line and the conformance suite ask."""

    ATTACHED = "attached"
    """A job can end with the launcher: Ctrl-C checkpoints and ends it (`interrupt`)."""
    DETACHED = "detached"
    """A job goes on when the launcher ends."""
    MULTI_NODE = "multi-node"
    SPOT = "spot"
    """Interruptible capacity."""
    RESTARTS = "restarts"
    """The backend itself restarts a preempted job; otherwise a supervisor resubmits it."""
    PRICES = "prices"
    """Offers carry a price."""


State = Literal["pending", "running", "restarting", "finished", "failed", "stopped", "preempted", "unknown"]
ENDED: frozenset[State] = frozenset({"finished", "failed", "stopped", "preempted"})
EXIT_CODES: dict[State, int] = {"finished": 0, "failed": 1, "stopped": 4, "preempted": 75}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A recipe resolved for one backend: what to run, where, on what, with which data and run directory."""

    recipe: Recipe
    """Resolved: every place is this backend's own."""
    source: Recipe
    """As written."""
    backend: str
    run_id: str
    run_uri: str
    settings: BaseModel
    """The recipe's section of this backend, validated by its `settings` model."""
    attempt: int = 1
    """Which submission of the run this is, from 1."""
    offer: WantedOffer | None = None
    """The one of `compute.offers` that it shall run on; what it leaves open the backend's settings say."""
    usd_per_hour: float | None = None
    """What an hour of all nodes costs on that offer, where somebody knows. A backend puts it into the job's environment as
    ISTHMUS_USD_PER_HOUR: with it rank 0 keeps `budget.max_usd` by itself."""
    detach: bool = True
    """Whether the job shall go on when the launcher ends; only for a backend that can do both."""

    @property
    def world_size(self) -> int:
        """Ranks: nodes times processes of a node."""
        return self.recipe.compute.nodes * self.recipe.compute.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A job as its backend's native request; JSON all through, the same bytes for the same job."""

    backend: str
    run_id: str
    run_uri: str
    job_id: str
    """The name that the cloud shall know the job by; ours to choose, so that it is recorded before it exists."""
    request: Mapping[str, Any]
    """The cloud's own form: an Azure ML command job, a CreateTrainingJob request, a command line."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files that the request refers to, by the name that it uses; at least `recipe.yaml`."""
    native: Mapping[str, Any] = field(default_factory=dict)
    """What a handle needs besides the job's name, such as a region or a workspace. Recorded before the job is submitted,
    so that a launcher that dies in between leaves a job that can be found."""

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, indented."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """A submitted job, for whoever follows it later.

    `native` is the backend's own: a region, a process id. Its `job_id` alone, as found in run.json on another
    machine, must do.
    """

    backend: str
    run_id: str
    run_uri: str
    native: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """For a run record."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Handle:
        """Reads what `to_json` wrote."""
        return cls(**{name: data[name] for name in ("backend", "run_id", "run_uri", "native")})


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a job is."""

    state: State
    exit_code: int | None = None
    """Of the whole job, once it has ended."""
    cause: str | None = None
    """The first cause in time over the ranks, when it did not finish."""
    attempt: int | None = None
    detail: str | None = None
    """The cloud's own word, such as a queue position."""
    missing: bool = False
    """The cloud answers, and has no job of that name; `state` is `unknown`."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen unless somebody resumes it."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a node's log; `time` in seconds since 1970 where the backend knows it."""

    node: int
    time: float | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Something a backend can run a job on."""

    backend: str
    sku: str
    region: str | None = None
    tier: Literal["on_demand", "spot", "reserved"] = "on_demand"
    nodes: int = 1
    usd_per_hour: float | None = None
    """Of all nodes together; None where nobody knows."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a lint or a preflight check found. An error refuses the launch."""

    id: str
    """Stable, such as `local.nodes`; documentation and tests refer to it."""
    level: Literal["error", "warning", "note"]
    message: str
    fix: str | None = None
    exit_code: int = 3
    """Of the error that this stands for. A launch that a finding refuses ends with 3 whatever this is; 3 here means that
    another destination may take the job, anything else that its user has something to put right (a missing dataset: 2)."""

    @classmethod
    def of(cls, id: str, error: IsthmusError) -> Finding:
        """The finding for an error that was met while checking."""
        message = f"{error.where}: {error.message}" if error.where else error.message
        return cls(id, "error", message, error.hint, error.exit_code)


@runtime_checkable
class Backend(Protocol):
    """A backend. `render`, `lint` and `offers` need no network; every method raises IsthmusError only."""

    name: str
    capabilities: frozenset[Capability]
    settings: type[BaseModel]
    """Validates the backend's section of the recipe; strict, all fields optional."""

    def render(self, job: Job) -> Rendered:
        """The native request. Pure and offline."""

    def document(self, rendered: Rendered, format: Literal["json", "yaml"]) -> str:
        """The request as the cloud's own tools take it: one JSON object, or the YAML file of its command line."""

    def lint(self, job: Job) -> list[Finding]:
        """What is wrong with the job, found offline: limits, traps, missing fields."""

    def preflight(self, job: Job) -> list[Finding]:
        """What would go wrong, found by asking: identity, quota, data, image, region. Starts nothing."""

    def submit(self, rendered: Rendered) -> Handle:
        """Starts it, unless a job of that name and of this run was submitted before: then that job is the answer.

        Raises:
            PreflightRefused: no quota, no capacity, no such machine here: another offer may take it.
            UsageError: refused for good, such as a name that another run's job has.
            IsthmusError: of any other kind: it is not known whether the job exists; the same call again tells.
        """

    def status(self, handle: Handle) -> Status:
        """How it is now."""

    def logs(self, handle: Handle, follow: bool) -> Iterator[LogLine]:
        """The log so far; with `follow` on until the job has ended."""

    def stop(self, handle: Handle) -> None:
        """Asks it to checkpoint and end, and sees that it ends within the grace. It is not restarted."""

    def offers(self, job: Job) -> list[Offer]:
        """What the job could run on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudJob:
    """A job of ours as its cloud lists it, found by the tags that it was submitted with."""

    handle: Handle
    state: State
    created: float | None = None
    """Seconds since 1970."""
    attempt: int | None = None


@runtime_checkable
class Discovers(Protocol):
    """Of a backend whose cloud can list the jobs that anybody submitted with isthmus."""

    def jobs(self, settings: BaseModel) -> Iterator[CloudJob]:
        """The jobs in the place that the settings (and the environment) name, the newest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    """How long a job's machines ran, by its cloud's own clock; seconds of wall-clock time, all nodes at once."""

    seconds: float
    billable_s: float | None = None
    """What of these the cloud bills, at the price of its on-demand machines whatever the tier; None where it does not say."""


@runtime_checkable
class Meters(Protocol):
    """Of a backend whose cloud tells how long a job has run, or what it bills."""

    def metered(self, handle: Handle) -> Metered | None:
        """Of a job so far; None: its machines have not run, or the cloud does not know it. Raises IsthmusError."""


@runtime_checkable
class Attachable(Protocol):
    """Of a backend with Capability.ATTACHED."""

    def interrupt(self, handle: Handle, *, kill: bool = False) -> None:
        """Ends the job as a preemption does, so that it can be resumed; with `kill` at once."""
