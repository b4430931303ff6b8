"""Who keeps the others waiting: a judgement over what every rank says of itself, and the report of it. No torch.

A rank that waits in a collective has begun it, and the rank that it waits for has not: the one that has begun the
fewest is late. That tells a slow rank from its peers even where both are in a backward pass. A rank that does not
answer at all is stopped, blocked within native code that holds Python's lock, or gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STARTING, DATA, COMPUTE, REDUCE = "starting", "data", "compute", "reduce"
CHECKPOINT, VALIDATION, ENDING = "checkpoint", "validation", "ending"
WORDS = {
    STARTING: "starting",
    DATA: "waiting for data",
    COMPUTE: "computing",
    REDUCE: "exchanging results with the others",
    CHECKPOINT: "checkpointing",
    VALIDATION: "validating",
    ENDING: "ending",
}
"""Phase -> what a rank does in it."""
PATIENCE = {STARTING: 3.0, VALIDATION: 3.0, CHECKPOINT: 6.0, ENDING: 6.0}
"""Phase -> how many times the limit it may take: compiling, stores and decoders are slow at times, and the last checkpoint
may take an hour. Others: once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank is, in its own words."""

    rank: int
    host: str
    phase: str
    step: int
    age: float
    """Seconds without progress."""
    limit: float
    """Seconds that it may be in this phase without progress."""
    collectives: int
    """Begun since the start, over the groups of training."""
    doing: str | None = None
    """What it waits for, where the phase can tell."""
    stack: str = ""
    """Of the training thread, innermost call last."""

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        """What `to_json` described."""
        return cls(**data)

    @property
    def over(self) -> bool:
        """Whether it has been without progress for longer than it may."""
        return self.age > self.limit

    def place(self) -> str:
        """The innermost call, such as `prepare (step.py:112)`; empty when unknown."""
        lines = [line.strip() for line in self.stack.splitlines() if line.strip().startswith("File ")]
        if not lines:
            return ""
        file, line, function = (part.strip() for part in lines[-1].split(",", 2))
        name = file.removeprefix("File ").strip('"').rsplit("/", 1)[-1]
        return f"{function.removeprefix('in ')} ({name}:{line.removeprefix('line ')})"


@dataclass(frozen=True, slots=True)
class Stall:
    """That training hangs, and why."""

    kind: str
    """`silent`, `network`, `alone` (no other rank can be reached), or the phase of the ranks to blame."""
    ranks: tuple[int, ...]
    """To blame; empty when all wait for each other."""
    cause: str
    """One line."""


def judge(positions: Sequence[Position | None]) -> Stall | None:
    """Who is to blame for a hang; None while somebody that the others wait for may still take its time.

    Args:
        positions: of each rank; None for one that did not answer.
    """
    size = len(positions)
    silent = [rank for rank, position in enumerate(positions) if position is None]
    known = [position for position in positions if position is not None]
    if not any(position.over for position in known):
        return None
    step = max(position.step for position in known)
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        cause = (
            f"{ranks_text(silent)} of {size} {verb} not answer at step {step}: stopped, blocked in native code, "
            "or gone with the machine"
        )
        return Stall("silent", tuple(silent), cause)
    fewest = min(position.collectives for position in known)
    late = [position for position in known if position.collectives == fewest]
    if len(late) == size and size > 1 and not any(position.phase == DATA for position in late):
        if not all(position.over for position in late):
            return None
        longest = max(late, key=lambda position: position.age)
        cause = (
            f"all {size} ranks wait in the same exchange at step {step} for {longest.age:.0f} s "
            f"({longest.place() or WORDS[longest.phase]}): the network, or a GPU that hangs"
        )
        return Stall("network", (), cause)
    # Of those that began as few exchanges, a rank that waits for data has yet to reach the next one.
    to_blame = [position for position in late if position.phase == DATA] or late
    to_blame = [position for position in to_blame if position.over]
    if not to_blame:
        return None
    first = max(to_blame, key=lambda position: position.age)
    same = [position.rank for position in to_blame if position.phase == first.phase]
    what = WORDS[first.phase]
    if first.phase == DATA and first.doing:
        what += f", {first.doing}"
    elif first.phase != DATA and first.place():
        what += f", in {first.place()}"
    others = (
        f"; {size - len(same)} wait{'s' if size - len(same) == 1 else ''} for it" if size > len(same) else ""
    )
    cause = f"{ranks_text(same)} of {size} made no progress for {first.age:.0f} s at step {first.step}: {what}{others}"
    return Stall(first.phase, tuple(same), cause)


def report(stall: Stall, positions: Sequence[Position | None]) -> str:
    """The whole picture as text: the cause, a line for each rank, and every stack once."""
    lines = [stall.cause, ""]
    known = [position for position in positions if position is not None]
    most = max((position.collectives for position in known), default=0)
    for rank, position in enumerate(positions):
        mark = "*" if rank in stall.ranks else " "
        if position is None:
            lines.append(f"{mark} rank {rank}: no answer")
            continue
        doing = f" ({position.doing})" if position.doing else ""
        waits = "" if rank in stall.ranks or position.collectives < most else ", waits for others"
        if not stall.ranks:
            waits = ""
        lines.append(
            f"{mark} rank {rank} on {position.host}: step {position.step}, {WORDS[position.phase]}{doing}{waits}; "
            f"no progress for {position.age:.1f} s, {position.collectives} exchanges begun"
        )
    stacks: dict[str, list[int]] = {}
    for position in known:
        stacks.setdefault(position.stack, []).append(position.rank)
    blamed = {rank: number for number, rank in enumerate(stall.ranks)}
    for stack, ranks in sorted(stacks.items(), key=lambda item: blamed.get(item[1][0], len(blamed))):
        if stack:
            lines += ["", f"The training thread of {ranks_text(ranks)}, innermost call last:", stack.rstrip()]
    return "\n".join(lines) + "\n"


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'' if len(ranks) == 1 else 's'} {text}"
