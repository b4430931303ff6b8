"""Makes an environment for each peer, because their requirements exclude each other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from peers.cases import ENVIRONMENTS

WITHOUT = ("torchvision",)
"""Required by some, used by none here; its wheels must match torch's build."""


def cache_folder() -> Path:
    """Where environments are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus-benchmarks"


def python_of(name: str | None, cache: Path) -> str:
    """The interpreter of an environment, which is made when it is not there or not what is asked for now.

    Raises:
        RuntimeError: pip failed; the message is the end of what it said.
    """
    if name is None:
        return sys.executable
    # The same torch as ours everywhere, so that its speed does not tell the readers apart.
    torch = f"torch=={version('torch').partition('+')[0]}"
    wanted = [*ENVIRONMENTS[name], *([] if name == "chart" else [torch])]
    folder = cache / name
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if stamp.exists() and stamp.read_text().split() == wanted:
        return str(python)
    print(f"making an environment for {name}: {', '.join(wanted)}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text(torch + "\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", "-c", str(constraints), *wanted])
    _run([*pip, "uninstall", "--yes", *WITHOUT])
    stamp.write_text("\n".join(wanted))
    return str(python)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[-4:])} failed: {done.stderr.strip()[-500:]}")
