"""pyarrow's own threads hold nothing of Python's.

What they read from Python's memory or files they let go of when they get to it: after the interpreter's end that aborts the
process ("terminate called without an active exception", exit -6, one `data index` in ten on two busy cores), although
all of its work was done. So nothing is read through pyarrow's pool.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import foreign
import pytest

import isthmus
from isthmus.storage.shards.synthetic import TINY, write_synthetic

ROOT = Path(isthmus.__file__).resolve().parent
PARTS = ("backends", "cli", "core", "cost", "emulators", "storage")
READS = {"read_row_group", "read_row_groups", "iter_batches", "read_pandas"}


def sources() -> list[Path]:
    folders = (
        [ROOT / part for part in PARTS]
        if (ROOT / "storage").is_dir()
        else [ROOT.parent / part for part in PARTS]
    )
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def calls(path: Path) -> list[tuple[int, str]]:
    """Line and why of each call that would start pyarrow's threads."""
    text = path.read_text()
    if "pyarrow" not in text:
        return []
    wrong = []
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        name, keys = call.func.attr, {word.arg: word.value for word in call.keywords}
        threads = keys.get("use_threads")
        serial = isinstance(threads, ast.Constant) and threads.value is False
        if name == "read_table":  # of pyarrow's datasets: reads ahead in threads whatever it is told
            wrong.append((call.lineno, "read_table"))
        elif (name in READS or (name == "read" and "columns" in keys)) and not serial:
            wrong.append((call.lineno, f"{name} without use_threads=False"))
        elif name in ("open_file", "open_stream") and "ipc" in ast.dump(call.func) and "options" not in keys:
            wrong.append((call.lineno, f"{name} without options"))
    return wrong


def test_every_read_says_that_it_wants_no_threads():
    files = sources()
    assert len(files) > 200
    assert [f"{path}:{line}: {why}" for path in files for line, why in calls(path)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pq.read_table(data)", True),
        ("file.read(columns=names)", True),
        ("file.read(columns=names, use_threads=True)", True),
        ("file.read_row_group(0)", True),
        ("pa.ipc.open_file(data).read_all()", True),
        ("file.read(columns=names, use_threads=False)", False),
        ("opened.read(10)", False),
        ("pa.ipc.open_stream(data, options=options)", False),
    ],
)
def test_the_rule_finds_them(tmp_path, line, found):
    (tmp_path / "some.py").write_text(f"import pyarrow as pa\n{line}\n")
    assert bool(calls(tmp_path / "some.py")) == found


COUNT = """
import json, os, sys, threading, time
import numpy, pyarrow, pyarrow.parquet
from isthmus.cli.app import main

def tasks():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

numpy.ones((512, 512)) @ numpy.ones((512, 512))  # its threads are no business of this
before = tasks()
sys.argv = ["isthmus", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
deadline = time.monotonic() + 5  # a thread of Python's that has ended stays listed for a moment; a pool stays for good
while tasks() > before and time.monotonic() < deadline:
    time.sleep(0.01)
print(json.dumps({"started": tasks() - before}))
"""


@pytest.mark.parametrize("command", ["index", "repack", "stats", "verify"])
def test_commands_leave_none_of_its_threads(tmp_path, command):
    foreign.write(tmp_path / "files" / "x.parquet", foreign.table(foreign.samples(20)))
    (tmp_path / "map.yaml").write_text(json.dumps(foreign.MAP))
    write_synthetic(str(tmp_path / "ours"), 64, TINY)
    arguments = {
        "index": [
            "index",
            str(tmp_path / "files"),
            "--columns",
            str(tmp_path / "map.yaml"),
            "--dest",
            str(tmp_path / "d"),
        ],
        "repack": ["repack", str(tmp_path / "ours"), str(tmp_path / "d")],
        "stats": ["stats", str(tmp_path / "ours")],
        "verify": ["verify", str(tmp_path / "ours")],
    }[command]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, "data", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"started": 0}
