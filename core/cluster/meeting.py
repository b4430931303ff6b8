"""Where the ranks of several nodes agree whose attempt this is: rank 0's, told through torchrun's own store.

A node other than the first reads attempt and lease token from the run directory, and may read those of an attempt that
is dead, as when the cloud starts the same job again. Rank 0 was started by the holder of the lease: its word counts.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from isthmus.core.cluster.joining import Attempt
from isthmus.errors import TrainingFailed
from isthmus.files import replace_file

FILE = "attempt.json"
"""In the folder of outcomes: what the ranks of this node agreed on, for the worker."""
PATIENCE_S = 600.0


def meet(folder: Path, *, patience: float = PATIENCE_S) -> None:
    """Puts rank 0's attempt and token in this rank's environment; on one node there is nothing to agree on.

    Raises:
        TrainingFailed: rank 0 said nothing for `patience` seconds.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) <= 1:
        return
    # The ranks of several nodes import torch in any case.
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore("isthmus", TCPStore(address, port, is_master=False, wait_for_workers=False))
    # torchrun starts ranks anew only in a run of its own; ours never does, so the key is written once.
    if os.environ["RANK"] == "0":
        store.set("attempt", Attempt.of(os.environ).to_json())
    deadline = time.monotonic() + patience
    while not store.check(["attempt"]):  # in short steps: a signal's handler waits for the end of a call
        if time.monotonic() >= deadline:
            raise TrainingFailed(f"rank 0 did not begin within {patience:.0f} s")
        time.sleep(0.1)
    agreed = Attempt.from_json(store.get("attempt").decode())
    os.environ.update(agreed.environment())
    if os.environ.get("LOCAL_RANK") == "0":
        replace_file(folder / FILE, agreed.to_json())


def agreed(folder: Path) -> Attempt | None:
    """What the ranks of this node agreed on, if they have."""
    try:
        return Attempt.from_json((folder / FILE).read_text())
    except (OSError, ValueError, KeyError, json.JSONDecodeError):
        return None
