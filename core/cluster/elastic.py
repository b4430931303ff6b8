"""torchrun in a process of its own: `python -m isthmus.core.cluster.elastic PARENT REPORT TORCHRUN-ARGUMENTS...`.

It calls what `python -m torch.distributed.run` calls. Called from here, the ranks' deaths can be written down for
the worker (torchrun prints them in prose), and its tracebacks stay out of sight: they name torchrun's own lines,
never the cause.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from isthmus.files import replace_file
from isthmus.storage.rundir.process import PARENT_VARIABLE, die_with_parent


def main(arguments: list[str]) -> int:
    """Runs torchrun to its end; returns 0 or 1. REPORT gets {"deaths": [...], "error": ...}."""
    parent, report, *rest = arguments
    die_with_parent(int(parent))
    # A rank that is still starting when this process is killed finds itself with another parent: it must know whose it was.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    quiet = os.environ.get("ISTHMUS_DEBUG") != "1"
    if quiet:
        logging.disable(logging.ERROR)  # of torchrun alone: the ranks are processes of their own
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    deaths: list[dict[str, Any]] = []
    error: str | None = None
    try:
        torchrun.run(torchrun.parse_args(rest))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        deaths = [
            {"rank": rank, "exit_code": failure.exitcode, "time": float(failure.timestamp)}
            for rank, failure in failed.failures.items()
        ]
        if not quiet:
            print(failed, file=sys.stderr)
    except SignalException:
        pass  # the worker sent it
    except Exception as other:  # noqa: BLE001 - reported to the worker, which reports it once
        error = " ".join(f"torchrun: {type(other).__name__}: {other}".split())[:500]
    replace_file(Path(report), json.dumps({"deaths": deaths, "error": error}))
    return 1 if deaths or error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
