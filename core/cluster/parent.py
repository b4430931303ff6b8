"""A child must not outlive its parent: orphan ranks would train on, unseen, beside the next attempt."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, *, how: signal.Signals = signal.SIGKILL) -> None:
    """Has this process killed when its parent ends, however that ends. Call it first thing.

    Linux does it at once (PR_SET_PDEATHSIG); elsewhere a thread looks every second.

    Args:
        parent: the parent's id, when known: closes the gap before this call.
        how: the signal.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(expected, how), name="parent", daemon=True).start()
    if os.getppid() != expected:
        os.kill(os.getpid(), how)


def _watch(parent: int, how: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), how)
