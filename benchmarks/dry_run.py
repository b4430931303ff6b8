"""How long `isthmus launch --dry-run` takes, as a ratio to ``python -c "import boto3"``.

    python benchmarks/dry_run.py [--rounds 15] [--json]

The recipe `sdxl-progressive` is rendered for both clouds, with findings, price and request. Rounds, bytecode and ratios as
in `cli_start.py`: a round runs every command once; a ratio is the median of the quotients within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile

from cli_start import seconds

LIMIT = 2.0
BASE = ["-c", "import boto3"]
DIGEST = f"registry.example.com/team/train@sha256:{'a' * 64}"
COMMANDS = {
    "sagemaker": ["role_arn=arn:aws:iam::123456789012:role/isthmus", "region=us-east-1"],
    "azure": [
        "subscription=11111111-2222-3333-4444-555555555555",
        "resource_group=team",
        "workspace=training",
        f"environment.image={DIGEST}",
        "client_id=22222222-3333-4444-5555-666666666666",
    ],
}
"""Backend -> settings that a request needs."""


def command(backend: str) -> list[str]:
    """A dry run for that backend."""
    words = [
        "-m",
        "isthmus",
        "launch",
        "sdxl-progressive",
        "--backend",
        backend,
        "--dry-run",
        "--format",
        "json",
    ]
    for setting in COMMANDS[backend]:
        words += ["--set", f"backends.{backend}.{setting}"]
    return words


def measure(rounds: int) -> dict[str, object]:
    """Medians in milliseconds, and ratios to the base."""
    base: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as bytecode:
        for arguments in (BASE, *(command(name) for name in COMMANDS)):
            seconds(arguments, bytecode)  # fills the page cache and writes bytecode
        for _ in range(rounds):
            base.append(seconds(BASE, bytecode))
            for name, found in times.items():
                found.append(seconds(command(name), bytecode))
    return {
        "rounds": rounds,
        "python": sys.version.split()[0],
        "import_boto3_ms": round(statistics.median(base) * 1000, 1),
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
