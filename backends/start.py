"""The first process of a cloud's container: brings this job's isthmus along, then becomes the worker.

    python3 <folder>/start.py --run URI --job ID --cluster NAME [--grace SECONDS] [--place NAME=PATH ...]

It lies beside recipe.yaml, the isthmus wheel and what else the user sends (:mod:`isthmus.backends.payload`). What the
image lacks is taken from there, never from a network. Standard library only, and no syntax newer than Python 3.8: an
image that is too old shall be told so.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_PREEMPTED = 75
_STORES = {"s3": ("s3fs",), "az": ("adlfs", "azure-identity")}
"""Scheme -> what opens it besides isthmus[train]. `az` stands for abfs and abfss too."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Lacking(Exception):
    """The image cannot run the job; one line that says what to do."""


class Requirement(NamedTuple):
    """A distribution that isthmus needs, with the oldest version that does."""

    name: str
    floor: str
    text: str


def main(arguments: list[str] | None = None) -> NoReturn:
    """Never returns: becomes the worker, or exits with 2 (the image lacks something) or 75 (evicted meanwhile)."""
    for number in _SIGNALS:
        signal.signal(number, _evicted)  # the kernel drops signals that a first process does not handle
    parser = argparse.ArgumentParser(prog="start.py", description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--grace")
    parser.add_argument("--place", action="append", default=[])
    options = parser.parse_args(arguments)
    folder = Path(os.path.abspath(__file__)).parent  # noqa: PTH100 - resolve() would leave a mount of links
    try:
        added = prepare(folder, options.run)
    except (Lacking, OSError, zipfile.BadZipFile) as error:
        _fail(" ".join(str(error).split()))
    environment = {"PYTHONUNBUFFERED": "1", **os.environ}
    environment["PYTHONSAFEPATH"] = "1"  # nothing in the working directory shall pass for one of our modules
    if added is not None:
        paths = [str(added), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "isthmus.core.worker", "--recipe", str(folder / "recipe.yaml")]
    command += ["--run", options.run, "--cluster", options.cluster, "--job", options.job]
    if options.grace is not None:
        command += ["--grace", options.grace]
    for place in options.place:
        command += ["--place", place]
    sys.stdout.flush()
    sys.stderr.flush()
    # A SIGTERM between here and the worker's own handler waits instead of getting lost; the worker lets it through.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.execve(sys.executable, command, environment)


def prepare(folder: Path, run: str) -> Path | None:
    """Sees to isthmus and what it needs; returns the folder that must come first on the path, if any.

    Raises:
        Lacking: the image cannot run it.
    """
    wheels = sorted(folder.glob("isthmus-*.whl"))
    if not wheels:
        raise Lacking(f"{folder} holds no isthmus wheel: the job's files are not whole")
    with zipfile.ZipFile(wheels[0]) as archive:
        metadata, record = _read(archive, "METADATA"), _read(archive, "RECORD")
        headers = Parser().parsestr(metadata)
        _check_python(headers["Requires-Python"] or "")
        has, same = _compare(record)
        added: Path | None = None
        if not same:
            added = Path(tempfile.mkdtemp(prefix="isthmus-"))
            archive.extractall(added)  # what pip would do for a pure wheel, in a hundredth of the time
            who = (
                "no isthmus"
                if has is None
                else f"isthmus {has}"
                if has != headers["Version"]
                else "another build"
            )
            _say(f"the image has {who}; the job brings {headers['Version']}")
    wanted = _requirements(headers.get_all("Requires-Dist") or [], _stores(run, folder / "recipe.yaml"))
    missing = _missing(wanted, added)
    if missing:
        added = added or Path(tempfile.mkdtemp(prefix="isthmus-"))
        _install(missing, folder, added)
    return added


def _read(archive: zipfile.ZipFile, name: str) -> str:
    for inside in archive.namelist():
        if inside.count("/") == 1 and inside.endswith(f".dist-info/{name}"):
            return archive.read(inside).decode("utf-8")
    raise Lacking(f"{archive.filename} is no wheel: it has no {name}")


def _check_python(requires: str) -> None:
    found = re.search(r">=\s*(\d+)\.(\d+)", requires)
    if found and sys.version_info[:2] < (int(found[1]), int(found[2])):
        has = ".".join(map(str, sys.version_info[:3]))
        raise Lacking(
            f"the image's python3 is {has}, isthmus needs {requires.strip()}: name an image with a newer one"
        )


def _compare(record: str) -> tuple[str | None, bool]:
    """The version that the image has, and whether it is the wheel's, file by file: a version can be built twice."""
    try:
        own = importlib.metadata.distribution("isthmus")
    except importlib.metadata.PackageNotFoundError:
        return None, False
    for name, digest, _ in csv.reader(io.StringIO(record)):
        if not name.startswith("isthmus/"):
            continue
        try:
            data = Path(str(own.locate_file(name))).read_bytes()
        except OSError:
            return own.version, False
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if digest != f"sha256={found}":
            return own.version, False
    return own.version, True


def _stores(run: str, recipe: Path) -> list[str]:
    """What the job's places need to be opened."""
    text = run + "\n" + recipe.read_text(encoding="utf-8")
    schemes = set(re.findall(r"(?:^|[\s'\"\[,])(s3|az|abfss?)://", text, re.MULTILINE))
    return [name for scheme in sorted(schemes) for name in _STORES["s3" if scheme == "s3" else "az"]]


def _requirements(lines: list[str], stores: list[str]) -> list[Requirement]:
    """What a worker needs of what the wheel's metadata names: the launcher's, [train], and the stores' clients."""
    found: dict[str, Requirement] = {}
    for line in lines:
        text, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        parts = re.match(r"\s*([A-Za-z0-9._-]+)[^>]*(?:>=\s*([0-9.]+))?", text)
        if parts is None or _plain(parts[1]) == "isthmus":
            continue
        if extra is None or extra[1] == "train" or _plain(parts[1]) in stores:
            found.setdefault(_plain(parts[1]), Requirement(parts[1], parts[2] or "0", text.strip()))
    return list(found.values())


def _missing(wanted: list[Requirement], added: Path | None) -> dict[Requirement, str | None]:
    """The requirements that the image does not meet, with the version that it has instead."""
    path = [str(added)] if added else []
    missing: dict[Requirement, str | None] = {}
    for requirement in wanted:
        found = next(
            iter(importlib.metadata.distributions(name=requirement.name, path=[*path, *sys.path])), None
        )
        if found is None or _numbers(found.version) < _numbers(requirement.floor):
            missing[requirement] = None if found is None else found.version
    return missing


def _numbers(version: str) -> tuple[int, ...]:
    # "2.13.0a0+abc" of a vendor's own build counts as 2.13.0; a nought at the end says nothing.
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in (release[0] if release else "0").split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _install(missing: dict[Requirement, str | None], folder: Path, added: Path) -> None:
    """Installs them from the folder's wheels beside this job's isthmus; the image itself stays as it is."""
    told = ", ".join(
        requirement.text + (f" (it has {version})" if version else "")
        for requirement, version in missing.items()
    )
    names = " ".join(f"'{requirement.text}'" for requirement in missing)
    hint = (
        "name an image that has it, or send wheels: `pip download --only-binary :all: --dest wheels "
        f"{names}` in that image, and `wheels: wheels` in the backend's section of the recipe"
    )
    lacks = f"the image lacks {told}"
    if all(path.name.startswith("isthmus-") for path in folder.glob("*.whl")):
        raise Lacking(f"{lacks}: {hint}")
    offline = [
        "--no-index",
        "--find-links",
        str(folder),
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
    ]
    wanted = [requirement.text for requirement in missing]
    # Asked first what is needed beside what the image has: with --target alone pip would want everything anew.
    report = _pip([*offline, "--dry-run", "--report", "-", *wanted], added, lacks, hint)
    plan: list[dict[str, Any]] = json.loads(report[report.index("{") :])["install"]
    exact = [f"{item['metadata']['name']}=={item['metadata']['version']}" for item in plan]
    _pip([*offline, "--no-deps", "--no-compile", "--target", str(added), *exact], added, lacks, hint)
    _say(f"{lacks}; the job brings {', '.join(exact)}")


def _pip(arguments: list[str], added: Path, lacks: str, hint: str) -> str:
    paths = [str(added), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PIP_ROOT_USER_ACTION": "ignore"},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        why = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise Lacking(f"{lacks}, and the job's wheels do not help ({why.strip()}): {hint}")
    return done.stdout


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _say(text: str) -> None:
    print(f"isthmus: {text}", file=sys.stderr, flush=True)


def _fail(text: str) -> NoReturn:
    _say(text)
    base = Path(os.environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    if base.is_dir():
        try:
            (base / "output").mkdir(exist_ok=True)
            (base / "output" / "failure").write_text(text[:1024], encoding="utf-8")
        except OSError:
            pass
    sys.exit(2)


def _evicted(signum: int, frame: Any) -> None:
    _say("preempted before it began")
    os._exit(_PREEMPTED)


if __name__ == "__main__":
    main()
