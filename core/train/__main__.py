"""One rank of a training run: `python -m isthmus.core.train --recipe FILE --run URI`, under torchrun or alone."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit code: 0 finished, 4 stopped, 75 preempted; 1 or 2 failed, after one line."""
    parser = argparse.ArgumentParser(prog="python -m isthmus.core.train", description=__doc__)
    parser.add_argument("--recipe", required=True, help="the recipe, resolved for a backend")
    parser.add_argument("--run", required=True, help="URI of the run directory")
    options = parser.parse_args(arguments)
    from isthmus.storage.rundir.process import die_with_parent

    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    # FSDP2 warns of in-place changes to a model's output, of which there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    from isthmus.core.outcome import EXIT_CODES, write_outcome
    from isthmus.core.recipe import load_recipe, resolve
    from isthmus.core.train.agreement import is_shared, lost_peer, rank, shared
    from isthmus.core.train.control import Signals
    from isthmus.core.train.loop import train
    from isthmus.core.train.trackers import end_even_if_stuck
    from isthmus.errors import IsthmusError
    from isthmus.storage.rundir import RunDirectory

    debug = os.environ.get("ISTHMUS_DEBUG") == "1"
    try:
        with Signals() as signals:
            try:
                recipe = resolve(load_recipe(options.recipe).recipe, "local")
            except IsthmusError as error:
                raise shared(error) from None
            run = RunDirectory(options.run, patience=recipe.checkpoint.retry_budget)
            ending = train(recipe, run, signals=signals)
    except IsthmusError as error:
        culprit = vars(error).get("culprit")
        write_outcome("failed", cause=str(error), exit_code=error.exit_code, culprit=culprit)
        if debug:
            raise
        if rank() == 0 or not is_shared(error):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:
        cause = lost_peer(error)
        if cause is None or debug:
            raise
        # The rank that died, or whoever saw it die, says why; this is only the echo.
        write_outcome("failed", cause=cause, echo=True)
        if rank() == 0:
            print(f"error: {cause}", file=sys.stderr, flush=True)
        return 1
    write_outcome(ending)
    end_even_if_stuck(EXIT_CODES[ending])
    return EXIT_CODES[ending]


if __name__ == "__main__":
    from isthmus.storage.rundir.process import to_the_end

    sys.exit(to_the_end(main))
