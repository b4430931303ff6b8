"""A mount that goes away and returns, and a name that does not resolve for a while, in a mount namespace of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.faults,
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare, for mounts"
    ),
]


def in_namespace(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where mounts are private; skips where the machine does not allow that."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no mount namespace")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


MOUNT = """
import subprocess, sys, threading, time
from pathlib import Path
from isthmus.errors import StorageError
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import open_ranges
from isthmus.storage.ranges.retry import RetryPolicy

def run(*command):
    subprocess.run(command, check=True)

kept, root = Path(sys.argv[1]) / "kept", Path(sys.argv[1]) / "root"
kept.mkdir(), root.mkdir()
run("mount", "-t", "tmpfs", "none", str(kept))
for name in "abc":
    (kept / name).write_bytes(name.encode() * 1000)
run("mount", "--bind", str(kept), str(root))
counters = Counters()
ranges = open_ranges(str(root), policy=RetryPolicy(budget_s=20, first_delay_s=0.02), counters=counters)
assert bytes(ranges.read("a", 0, 1000)) == b"a" * 1000
run("umount", "--lazy", str(root))
assert not (root / "b").exists() and root.is_dir()
threading.Timer(0.5, run, ["mount", "--bind", str(kept), str(root)]).start()
assert bytes(ranges.read("b", 0, 1000, file_bytes=1000)) == b"b" * 1000
assert counters.count("retries") > 0
assert bytes(ranges.read("a", 0, 1000, file_bytes=1000)) == b"a" * 1000
try:
    ranges.read("d", 0, 1)
except FileNotFoundError:
    pass
quick = open_ranges(str(root), policy=RetryPolicy(budget_s=0.2, first_delay_s=0.02))
run("umount", "--lazy", str(root))
try:
    quick.read("c", 0, 1)
except StorageError as error:
    print(error)
"""


def test_a_mount_that_goes_away_is_waited_for_and_told_from_a_missing_file(tmp_path: Path) -> None:
    done = in_namespace(MOUNT, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "root/c: cannot read: the mount went away, tried" in done.stdout


NAME = """
import sys, threading, time
from pathlib import Path
import subprocess
from isthmus.storage.ranges.counters import Counters
from isthmus.storage.ranges.open import open_fsspec, open_ranges
from isthmus.storage.ranges.retry import RetryPolicy

hosts, port, data = Path(sys.argv[1]), sys.argv[2], b"x" * 1000
usual = Path("/etc/hosts").read_text()
hosts.write_text(usual)
subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
for opener in (open_ranges, open_fsspec):
    hosts.write_text(usual)
    counters = Counters()
    ranges = opener(f"http://a-store.invalid:{port}", policy=RetryPolicy(budget_s=20, first_delay_s=0.05, max_delay_s=0.2), counters=counters)
    threading.Timer(0.6, hosts.write_text, [usual + "127.0.0.1 a-store.invalid\\n"]).start()
    assert bytes(ranges.read("a", 0, 1000)) == data
    print(int(counters.count("retries")))
"""


def test_a_name_that_does_not_resolve_for_a_while_is_waited_for(tmp_path: Path) -> None:
    from faulty import FaultyServer

    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a").write_bytes(b"x" * 1000)
    with FaultyServer(tmp_path / "served") as server:
        done = in_namespace(NAME, str(tmp_path / "hosts"), str(server.port))
    assert (done.returncode, done.stderr) == (0, "")
    assert all(int(line) > 1 for line in done.stdout.split())
