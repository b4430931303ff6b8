"""Work on the one event loop of this process, from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import fsspec.asyn

Result = TypeVar("Result")


def event_loop() -> asyncio.AbstractEventLoop:
    """fsspec's loop, in its own thread: made when it is first asked for, and anew in a child after a fork."""
    loop: asyncio.AbstractEventLoop = fsspec.asyn.get_loop()
    return loop


class Work(Generic[Result]):
    """A coroutine that runs on the loop.

    Unlike with `asyncio.run_coroutine_threadsafe`, `result` of cancelled work returns when the coroutine has ended, not
    when that was asked for: until then it may write into the memory it was given.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Result], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._task: asyncio.Task[Result] | None = None
        self._cancelled = False
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Asks the coroutine to end; from any thread."""
        self._cancelled = True
        self._loop.call_soon_threadsafe(self._cancel)

    def result(self, limit_s: float) -> Result:
        """Waits for the coroutine's result.

        Raises:
            concurrent.futures.CancelledError: it was cancelled, and has ended.
            concurrent.futures.TimeoutError: it has not ended within the limit.
        """
        return self._future.result(limit_s)

    @property
    def done(self) -> bool:
        """Whether the coroutine has ended."""
        return self._future.done()

    def _start(self) -> None:
        if self._cancelled:
            self._coroutine.close()
            self._future.cancel()
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[Result]) -> None:
        if task.cancelled():
            self._future.cancel()
            return
        error = task.exception()
        if error is not None:
            self._future.set_exception(error)
        else:
            self._future.set_result(task.result())


def wait(work: Work[Result], limit_s: float) -> Result:
    """The result of work that has a limit of its own; this one is for a loop that does not answer.

    Whatever interrupts the wait (a signal), the work has ended when this returns, or ten seconds have passed.
    """
    try:
        return work.result(limit_s)
    except BaseException:
        if not work.done:
            work.cancel()
            concurrent.futures.wait([work._future], 10)
        raise
