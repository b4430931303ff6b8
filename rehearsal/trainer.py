"""The trainer as a rehearsal runs it: the real one, paced, which waits after chosen steps for what is to strike it.

The worker starts it in place of `isthmus.core.train` (ISTHMUS_TRAINER_MODULE). ISTHMUS_COURSE is JSON: `folder`, on the
machine of the rehearsal; `pace`, the least seconds of a step; `hold`, the steps after which every rank waits. Rank 0 puts
`at-<step>` into the folder when it waits; whoever struck puts `struck-<step>`, and no later attempt waits there again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "ISTHMUS_COURSE"
LONGEST_S = 60.0
"""That a rank waits; then it goes on, as if nothing had been planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a rehearsal has planned."""

    folder: Path
    pace: float = 0.0
    hold: tuple[int, ...] = ()

    def to_json(self) -> str:
        """For the environment."""
        return json.dumps({"folder": str(self.folder), "pace": self.pace, "hold": self.hold})

    @classmethod
    def of(cls, text: str) -> Course:
        """Reads what `to_json` wrote."""
        data = json.loads(text)
        return cls(folder=Path(data["folder"]), pace=float(data["pace"]), hold=tuple(data["hold"]))

    def at(self, step: int) -> Path:
        """The sign that training waits after a step."""
        return self.folder / f"at-{step}"

    def struck(self, step: int) -> Path:
        """The sign that what was planned for a step has been done."""
        return self.folder / f"struck-{step}"


def main() -> int:
    """Trains; returns the trainer's exit code."""
    from isthmus.core.train import loop
    from isthmus.core.train.__main__ import main as train

    course = Course.of(os.environ[VARIABLE])
    advance = loop.Loop.advance

    def paced(self: loop.Loop, batches: Any) -> list[bool]:
        began = time.monotonic()
        told = advance(self, batches)
        time.sleep(max(0.0, course.pace - (time.monotonic() - began)))
        step = self.state.step
        if step in course.hold and not any(told) and not course.struck(step).exists():
            if self.lead:
                course.at(step).touch()
            deadline = time.monotonic() + LONGEST_S
            while self.signals.received is None and time.monotonic() < deadline:
                if course.struck(step).exists() and not self.signals.received:
                    time.sleep(1.0)  # a signal may be on its way
                    break
                time.sleep(0.02)
        return told

    loop.Loop.advance = paced  # type: ignore[method-assign]
    return train()


if __name__ == "__main__":
    sys.exit(main())
