"""Many reads of local files in one system call, where Linux offers it.

`io_submit` of the kernel's asynchronous I/O carries out reads of ordinary (buffered) files at once, one after the
other, before it returns: a hundred `pread` calls for the price of one call from Python, during which other threads run.
Rows that lie apart in page-cached files can so be gathered at the speed of one large read. Containers allow it (io_uring
is what their filters forbid).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

_IOCB = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("descriptor", "<u4"),
        ("address", "<u8"),
        ("length", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event", "<u4"),
    ]
)
"""`struct iocb` of linux/aio_abi.h; opcode 0 is a read, flags 0 no eventfd."""
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents, io_submit."""


class ManyReads:
    """Room for `most` reads at once. Used by one thread at a time.

    Raises:
        OSError: the system offers no such thing, or has none left.
    """

    def __init__(self, most: int = 512) -> None:
        numbers = _CALLS.get(platform.machine())
        if sys.platform != "linux" or sys.byteorder != "little" or numbers is None:
            raise OSError("no asynchronous I/O is known for this system")
        self._setup, self._destroy, self._events, self._submit = numbers
        self._context: ctypes.c_ulong | None = None
        context = ctypes.c_ulong(0)
        _call(self._setup, ctypes.c_long(most), ctypes.byref(context))
        self._context, self.most = context, most
        self._iocbs = np.zeros(most, _IOCB)
        self._iocbs["data"] = np.arange(most)
        self._fields = tuple(self._iocbs[name] for name in ("descriptor", "address", "length", "offset"))
        places = self._iocbs.ctypes.data + _IOCB.itemsize * np.arange(most)
        self._places = np.ascontiguousarray(places, np.uint64)
        self._answers = np.zeros(most, _EVENT)
        self._places_at = self._places.ctypes.data
        self._answers_at = ctypes.c_void_p(self._answers.ctypes.data)

    def read(
        self, descriptors: Int64, addresses: Int64, lengths: Int64, offsets: Int64, *, wait: bool = True
    ) -> Int64:
        """Reads `lengths[i]` bytes of file `descriptors[i]` from `offsets[i]` on to the memory at `addresses[i]`.

        Args:
            wait: for the disk; else what is not in the page cache is refused with an error number.

        Returns what `pread` would have returned for each, minus the error number where it would have raised.
        """
        results = np.empty(len(lengths), np.int64)
        self._iocbs["rw_flags"] = 0 if wait else os.RWF_NOWAIT
        for start in range(0, len(lengths), self.most):
            piece = slice(start, start + self.most)
            count = len(lengths[piece])
            for field, values in zip(self._fields, (descriptors, addresses, lengths, offsets), strict=True):
                field[:count] = values[piece]
            self._run(count)
            results[start + self._answers["data"][:count].astype(np.int64)] = self._answers["result"][:count]
        return results

    def _run(self, count: int) -> None:
        assert self._context is not None
        done, failed = 0, dict[int, int]()
        while done < count:
            place = ctypes.c_void_p(self._places_at + 8 * done)
            try:
                done += _call(self._submit, self._context, ctypes.c_long(count - done), place)
            except OSError as error:
                if error.errno is None:
                    raise
                failed[done] = -error.errno  # the first of them was refused: a descriptor that is closed, say
                done += 1
        wanted = count - len(failed)
        # Nearly always all are there by now, and asking lets no other thread have the interpreter.
        room, left = self._answers_at, ctypes.c_long(wanted)
        got = _call(self._events, self._context, ctypes.c_long(0), left, room, None, at_once=True)
        while got < wanted:
            room = ctypes.c_void_p((self._answers_at.value or 0) + _EVENT.itemsize * got)
            left = ctypes.c_long(wanted - got)
            got += _call(self._events, self._context, left, left, room, None)
        for number, (at, error_number) in enumerate(failed.items(), wanted):
            self._answers[number] = (at, 0, error_number, 0)

    def close(self) -> None:
        """Gives the kernel's part back."""
        context, self._context = self._context, None
        if context is not None:
            with contextlib.suppress(OSError):  # in a forked child there is none
                _call(self._destroy, context)

    def __del__(self) -> None:
        if getattr(self, "_context", None) is not None:
            self.close()


_idle: list[ManyReads] = []
_idle_lock = threading.Lock()


def _after_fork() -> None:
    """The kernel's part is the parent's; and a child must not inherit a lock that another thread held."""
    global _idle_lock
    _idle_lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def many_reads() -> Iterator[ManyReads]:
    """One of those that this process keeps: the system has a limited number (fs.aio-max-nr), and is slow to free them.

    Raises:
        OSError: the system has none left, or offers no such thing.
    """
    with _idle_lock:
        many = _idle.pop() if _idle else None
    if many is None:
        many = ManyReads()
    try:
        yield many
    except BaseException:
        many.close()  # answers may be waiting in it that the next one would take for its own
        raise
    with _idle_lock:
        _idle.append(many)


@functools.cache
def available() -> bool:
    """Whether this process may make many reads at once."""
    try:
        with many_reads():
            return True
    except OSError:
        return False


@functools.cache
def _syscall(at_once: bool) -> ctypes._NamedFuncPointer:
    function = (ctypes.PyDLL if at_once else ctypes.CDLL)(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _call(number: int, *arguments: object, at_once: bool = False) -> int:
    """A system call. `at_once`: it does not block, and other threads do not run meanwhile."""
    while True:
        result = int(_syscall(at_once)(ctypes.c_long(number), *arguments))
        if result >= 0:
            return result
        error = ctypes.get_errno()
        if error != 4:  # EINTR
            raise OSError(error, os.strerror(error))
