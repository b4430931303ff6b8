"""A checkpoint written under any strategy and world size loads under any other, every tensor bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import saving_matrix
from training import environment

HELPERS = Path(saving_matrix.__file__).parent


def launch(world_size: int, folder: Path, *actions: str) -> list[str]:
    """The lines of a launch of so many processes."""
    script = [str(HELPERS / "saving_matrix.py"), str(folder), *actions]
    command = [sys.executable, *script]
    if world_size > 1:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", *script,
        ]  # fmt: skip
    path = os.pathsep.join([str(HELPERS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if " read " in line]


@pytest.mark.long
def test_the_full_matrix(tmp_path: Path) -> None:
    """Slow: five launches of 1, 2 and 4 processes; 7 writers times 7 readers."""
    launch(1, tmp_path, "write")
    launch(2, tmp_path, "write")
    lines = launch(4, tmp_path, "write", "read")
    lines += launch(2, tmp_path, "read")
    lines += launch(1, tmp_path, "read")
    assert sorted(lines) == sorted(
        f"{strategy} on {world_size} read 7" for strategy, world_size in saving_matrix.WRITERS
    )
