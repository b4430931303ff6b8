"""`python -m isthmus.emulators.azureml --port P --folder F`: serves until it is interrupted.

Prints one JSON line when ready: `environment` (for clients), `address`, `privileges`, `note`.
POST to `<address>/emulator/<verb>` does what the class can: state and evict {job}, kill-node {job, node},
fail-next {operation, how, times}, quota and capacity {name, value}, expire-tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from isthmus.emulators.azureml import AzureMLEmulator
from isthmus.emulators.azureml.rules import as_json
from isthmus.emulators.image import Image
from isthmus.errors import IsthmusError


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves; returns the exit code. The first line on standard output is JSON: the environment for clients."""
    parser = argparse.ArgumentParser(
        prog="python -m isthmus.emulators.azureml", description="An Azure ML on this machine."
    )
    parser.add_argument("--folder", type=Path, help="for its storage and jobs")
    parser.add_argument("--port", type=int, default=0, help="of the HTTPS server; default: a free one")
    parser.add_argument("--region", default="eastus")
    parser.add_argument("--python", default=sys.executable, help="what python3 means in containers")
    parser.add_argument("--privileges", choices=("auto", "namespaces", "processes"), default="auto")
    parser.add_argument(
        "--grace", type=float, default=30.0, help="seconds from a preemption's SIGTERM to SIGKILL"
    )
    parser.add_argument("--start-delay", type=float, default=0.0, help="seconds until nodes are there")
    parser.add_argument("--on-preemption", choices=("fail", "requeue"), default="fail")
    parser.add_argument(
        "--rules", action="store_true", help="print what is refused and by which rule, as JSON, and end"
    )
    options = parser.parse_args(arguments)
    if options.rules:
        print(as_json())
        return 0
    if options.folder is None:
        parser.error("--folder is required")
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        with AzureMLEmulator(
            options.folder,
            images={"*": Image(python=options.python)},
            port=options.port,
            region=options.region,
            privileges=options.privileges,
            grace=options.grace,
            start_delay=options.start_delay,
            on_preemption=options.on_preemption,
        ) as cloud:
            ready = {"environment": cloud.environment(), "address": cloud.address}
            ready |= {"privileges": cloud.privileges, "note": cloud.note}
            print(json.dumps(ready), flush=True)
            ended.wait()
    except IsthmusError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
