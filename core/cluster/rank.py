"""What runs in each rank around the training module: `python -m isthmus.core.cluster.rank MODULE ARGUMENTS...`.

It ties the rank's life to torchrun's, notes the process for the worker, answers a SIGTERM that comes before the
trainer can, takes part in the agreement on whose attempt this is, and sees to it that no rank ends without a word: an
exception becomes the rank's outcome.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType

from isthmus.core.cluster.meeting import meet
from isthmus.core.outcome import EXIT_CODES, FOLDER_VARIABLE, Ending, write_outcome
from isthmus.errors import IsthmusError
from isthmus.storage.rundir.process import PARENT_VARIABLE, ProcessId, die_with_parent, to_the_end


def main(arguments: list[str]) -> int:
    """Runs the module as a program; returns the rank's exit code: 0 unless it failed.

    A preempted or stopped rank ends with 0 towards torchrun, which would kill its peers for anything else while
    they are still committing; the worker reads the outcome.
    """
    die_with_parent(int(os.environ.get(PARENT_VARIABLE) or os.getppid()))
    folder = Path(os.environ[FOLDER_VARIABLE])
    rank = int(os.environ["RANK"])
    (folder / f"rank{rank}.pid").write_text(json.dumps(ProcessId.current().to_json()))
    signal.signal(signal.SIGTERM, _evicted_early)
    # A crash in native code leaves no exception: where Python was is all that can be said of it.
    stacks = (folder / f"stack-rank{rank}.txt").open("a")
    faulthandler.enable(file=stacks)

    module, sys.argv = arguments[0], arguments
    try:
        meet(folder)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        write_outcome("finished")
    except SystemExit as error:
        _record_exit(error.code)
    except IsthmusError as error:
        write_outcome("failed", cause=str(error), exit_code=error.exit_code)
        _show(error)
    except KeyboardInterrupt:
        write_outcome("preempted")
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is this rank's last word
        write_outcome("failed", cause=_one_line(error))
        import traceback

        traceback.print_exc()
    return _exit_code(folder, rank)


def _evicted_early(signum: int, frame: FrameType | None) -> None:
    # The trainer puts its own handler in place of this one; until then there is nothing to save.
    write_outcome("preempted", cause="evicted before the first step")
    os._exit(0)


def _record_exit(code: object) -> None:
    if isinstance(code, str):
        print(code, file=sys.stderr)
        write_outcome("failed", cause=code.strip().splitlines()[-1] if code.strip() else "failed")
        return
    number = code if isinstance(code, int) else 0
    endings: dict[int, Ending] = {value: key for key, value in EXIT_CODES.items()}
    ending: Ending = endings.get(number, "failed")
    cause = f"the trainer exited with {number} and did not say why" if ending == "failed" else None
    write_outcome(ending, cause=cause, exit_code=number)


def _show(error: IsthmusError) -> None:
    if os.environ.get("ISTHMUS_DEBUG") == "1":
        import traceback

        traceback.print_exc()
    else:
        print(f"error: {error}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _exit_code(folder: Path, rank: int) -> int:
    try:
        outcome = json.loads((folder / f"outcome-rank{rank}.json").read_text())
    except (OSError, ValueError):
        return 1
    return 1 if outcome["status"] == "failed" else 0


if __name__ == "__main__":
    sys.exit(to_the_end(lambda: main(sys.argv[1:])))
