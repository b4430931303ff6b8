"""How long the command line takes to start, as a ratio to ``python -c "import pydantic"``.

    python benchmarks/cli_start.py [--rounds 15] [--json]

Bytecode is cached in a folder of this run, for all commands alike: an installed package has it, a checkout may not.
Each round runs every command once, one after the other, so that a slow spell of the machine meets all of them;
a ratio is the median over rounds of the quotients within a round. Run it on an installed wheel for what users
get, and on an editable install for what contributors get; the output says which it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT = 3.0
BASE = ["-c", "import pydantic"]
COMMANDS = {
    "help": ["-m", "isthmus", "--help"],
    "recipes_check": ["-m", "isthmus", "recipes", "check", "quickstart"],
}


def seconds(arguments: list[str], bytecode: str) -> float:
    """Wall time of one fresh interpreter, away from the checkout: ``-m`` would find its folders first."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        env=environment,
        cwd=bytecode,
    )
    return time.perf_counter() - start


def _editable() -> bool:
    import isthmus

    return "site-packages" not in str(isthmus.__file__)


def measure(rounds: int) -> dict[str, object]:
    """Medians in milliseconds, and ratios to the base."""
    base: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as bytecode:
        for arguments in (BASE, *COMMANDS.values()):
            seconds(arguments, bytecode)  # fills the page cache and writes bytecode
        for _ in range(rounds):
            base.append(seconds(BASE, bytecode))
            for name, arguments in COMMANDS.items():
                times[name].append(seconds(arguments, bytecode))
    return {
        "rounds": rounds,
        "python": sys.version.split()[0],
        "editable": _editable(),
        "import_pydantic_ms": round(statistics.median(base) * 1000, 1),
        **{f"{name}_ms": round(statistics.median(found) * 1000, 1) for name, found in times.items()},
        **{
            f"{name}_ratio": round(statistics.median(a / b for a, b in zip(found, base, strict=True)), 3)
            for name, found in times.items()
        },
        "limit": LIMIT,
    }


def main() -> int:
    """Print the figures; exit code 1 when a ratio is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:22} {value}" for name, value in found.items()))
    return 0 if all(float(str(found[f"{name}_ratio"])) <= LIMIT for name in COMMANDS) else 1


if __name__ == "__main__":
    sys.exit(main())
