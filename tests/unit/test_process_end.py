"""How a rank's process ends, while threads that are not Python's are still at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = """
import sys, threading, time, types
import torch

# A thread within native code, which wants Python back while the interpreter is being taken down.
future, begun = torch.futures.Future(), threading.Event()
future.then(lambda _: begun.set() or time.sleep(1.5))
threading.Thread(target=lambda: future.set_result(1), daemon=True).start()
begun.wait()

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4.0)

sys.modules["slow"] = types.ModuleType("slow")  # not this one, which lives on with the thread
sys.modules["slow"].slow = Slow()
del Slow
"""
ENDS = """
from isthmus.storage.rundir.process import to_the_end

def main():
    import atexit
    atexit.register(lambda: print("a library's last words"))
    threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread's"))).start()
    print("done", end=" ")
    return 75
"""


def run(*parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "".join(parts)], capture_output=True, text=True, timeout=120, check=False
    )


def test_it_ends_with_its_code_and_all_last_words_whatever_native_threads_do() -> None:
    done = run(LIBRARY, ENDS, "sys.exit(to_the_end(main))")
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout == "done a thread's\na library's last words\n"


def test_a_program_within_a_program_leaves_the_last_word_to_the_outer_one(tmp_path: Path) -> None:
    """As the trainer does within the process that the worker's torchrun starts."""
    (tmp_path / "inner.py").write_text(ENDS + "import sys, threading, time\nsys.exit(to_the_end(main))\n")
    outer = f"""
import runpy, sys
from isthmus.storage.rundir.process import to_the_end

def outer():
    sys.path.insert(0, {str(tmp_path)!r})
    try:
        runpy.run_module("inner", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print(end.code, end=" ")
    return 0

sys.exit(to_the_end(outer))
"""
    done = run(outer)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "done 75 a thread's\na library's last words\n"


@pytest.mark.parametrize(
    ("end", "code", "told"), [("raise ValueError('no')", 1, "ValueError: no"), ("sys.exit(2)", 2, "")]
)
def test_without_a_code_it_ends_as_any_program(end: str, code: int, told: str) -> None:
    program = f"import sys\nfrom isthmus.storage.rundir.process import to_the_end\ndef main():\n    {end}\n"
    done = run(program, "sys.exit(to_the_end(main))")
    assert done.returncode == code
    assert told in done.stderr
