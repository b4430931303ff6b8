"""`python -m isthmus.emulators.sagemaker --port P --folder F`: the emulator as a process of its own.

Prints one JSON line when ready: `endpoint`, `environment` (for clients), `role`, `privileges`, `note`. Ends with SIGTERM or Ctrl-C.
POST to `<endpoint>/emulator/<verb>` does what the class can: evict and state {job}, kill-node {job, node},
fail-next {operation, how, times}, quota and capacity {name, value}.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading

from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator
from isthmus.errors import IsthmusError


def main() -> int:
    """Runs it until it is told to end."""
    parser = argparse.ArgumentParser(
        prog="isthmus.emulators.sagemaker", description="A SageMaker on this machine"
    )
    parser.add_argument("--port", type=int, default=0, help="of the endpoint; 0: a free one")
    parser.add_argument("--folder", required=True, help="for the files of the hosts")
    parser.add_argument("--grace", type=float, default=120.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--privileges", choices=["auto", "namespaces", "processes"], default="auto")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of every image")
    options = parser.parse_args()
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        with SageMakerEmulator(
            options.folder,
            images={"*": Image(python=options.python)},
            privileges=options.privileges,
            region=options.region,
            grace=options.grace,
            port=options.port,
        ) as cloud:
            told = {name: getattr(cloud, name) for name in ("endpoint", "role", "privileges", "note")}
            print(json.dumps({**told, "environment": cloud.environment()}), flush=True)
            over.wait()
    except IsthmusError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
