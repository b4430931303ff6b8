"""What a job carries along: its files, and isthmus as a wheel that pip takes for one that pip made."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from images import image, wheel_of

import isthmus
from isthmus.backends import payload, wheel
from isthmus.backends.spec import Rendered
from isthmus.errors import UsageError
from isthmus.storage.filesystems import filesystem
from isthmus.storage.rundir import RunDirectory

ROOT = Path(isthmus.__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def rendered(run: str, **fields: Any) -> Rendered:
    """A rendered job."""
    files = {"recipe.yaml": "name: ünï 'quoted'\n", "start.py": payload.START}
    return Rendered(
        backend="sagemaker", run_id="r", run_uri=run, job_id="r-01", request={}, files=files, **fields
    )


def content(data: bytes) -> dict[str, bytes]:
    """Name -> bytes of a wheel's files."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_holds_what_pip_would_put_in_and_is_the_same_each_time(tmp_path: Path) -> None:
    ours = wheel.build(ROOT)
    assert ours.name == f"isthmus-{isthmus.__version__}-py3-none-any.whl"
    assert wheel.build(ROOT).data == ours.data
    files = content(ours.data)
    for package in SETTINGS["packages"]:
        assert f"{package.replace('.', '/')}/__init__.py" in files
    for name in ("isthmus/core/worker.py", "isthmus/backends/start.py", "isthmus/core/models/profiles.json"):
        assert name in files
    assert files["isthmus/backends/start.py"].decode() == payload.START
    assert not [name for name in files if "__pycache__" in name or name.startswith("tests")]
    entry_points = files[f"isthmus-{isthmus.__version__}.dist-info/entry_points.txt"].decode()
    assert "[isthmus]\nbuiltin = isthmus.backends.builtin" in entry_points


def test_it_is_the_wheel_that_pip_makes(tmp_path: Path) -> None:
    """File by file, and requirement by requirement."""
    source = tmp_path / "source"
    source.mkdir()
    for top in SETTINGS["package-dir"].values():
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    theirs, ours = content(made.read_bytes()), content(wheel.build(source).data)
    info = f"isthmus-{isthmus.__version__}.dist-info"
    skip = {f"{info}/{name}" for name in ("RECORD", "WHEEL", "METADATA", "top_level.txt", "entry_points.txt")}
    assert {n: d for n, d in ours.items() if n not in skip} == {
        n: d for n, d in theirs.items() if n not in skip
    }

    def needs(files: dict[str, bytes]) -> set[str]:
        headers = Parser().parsestr(files[f"{info}/METADATA"].decode())
        found = {headers["Version"], headers["Requires-Python"]}
        for line in headers.get_all("Requires-Dist") or []:
            name, _, rest = line.replace("'", '"').partition("[")
            extras, _, rest = rest.partition("]")
            found.add(f"{name}{sorted(extras.split(','))}{rest}")
        return found | set(headers.get_all("Provides-Extra") or [])

    assert needs(ours) == needs(theirs)


def test_a_wheel_of_a_wheel_is_the_same_wheel(tmp_path: Path) -> None:
    """pip installs it, with its commands and plugins; and from there it can be sent on."""
    ours = wheel.build(ROOT)
    python = image(tmp_path / "image", isthmus=ours)
    code = (
        "import sys, isthmus, hashlib; from isthmus.backends import wheel; from importlib.metadata import *;"
        "w = wheel.build(); print(isthmus.__file__); print(w.name, hashlib.sha256(w.data).hexdigest());"
        "print([p.value for p in entry_points(group='isthmus')])"
    )
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    where, which, plugins = done.stdout.splitlines()
    assert where.startswith(str(tmp_path))
    assert which == f"{ours.name} {sha256(ours.data).hexdigest()}"
    assert plugins == "['isthmus.backends.builtin']"


def test_no_installation_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither an installed package nor a source folder"):
        wheel.build(tmp_path)


def test_put_writes_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(tmp_path / "run")
    wheel_of("pluggy", tmp_path / "wheels")
    job = rendered(run, native={"wheels": str(tmp_path / "wheels")})
    folder = Path(payload.put(job))
    assert str(folder) == payload.folder_uri(run, "r-01") == f"{run}/jobs/r-01"
    names = {path.name for path in folder.iterdir()}
    ours = wheel.build().name
    assert ours in names
    assert {"recipe.yaml", "start.py", "files.json"} < names
    assert any(name.startswith("pluggy-") for name in names)
    assert (folder / "recipe.yaml").read_text() == "name: ünï 'quoted'\n"

    written: list[str] = []
    write = RunDirectory.write_file
    monkeypatch.setattr(RunDirectory, "write_file", lambda run, name, data: written.append(name) or write(run, name, data))  # fmt: skip # type: ignore[func-returns-value]
    payload.put(job)
    assert written == [], "a submission that is repeated sends nothing twice"
    (folder / ours).unlink()
    payload.put(job)
    assert written == [f"jobs/r-01/{ours}"]
    written.clear()
    other = Rendered(**{**vars_of(job), "files": {**job.files, "recipe.yaml": "name: other\n"}})
    payload.put(other)
    assert written == ["jobs/r-01/recipe.yaml", "jobs/r-01/files.json"]
    (folder / "files.json").write_text("{broken")
    payload.put(other)
    assert len(json.loads((folder / "files.json").read_text())) == 4


@pytest.mark.parametrize("store", ["s3", "blob"])
def test_what_is_put_into_a_store_is_what_the_container_finds(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Put into S3 and into Blob, downloaded as a cloud would, and still the files that were sent."""
    place = request.getfixturevalue(store)
    job = rendered(f"{place.root}/runs/r")
    uri = payload.put(job)
    assert uri == payload.folder_uri(job.run_uri, "r-01")
    files, path = filesystem(uri)
    files.get(path, str(tmp_path / "mounted"), recursive=True)
    (there,) = tmp_path.rglob("start.py")
    assert there.read_text() == payload.START
    assert (there.parent / wheel.build().name).read_bytes() == wheel.build().data
    before = (
        files.info(f"{path}/start.py").get("LastModified") or files.info(f"{path}/start.py")["last_modified"]
    )
    assert payload.put(job) == uri
    files.invalidate_cache()
    after = (
        files.info(f"{path}/start.py").get("LastModified") or files.info(f"{path}/start.py")["last_modified"]
    )
    assert before == after


def vars_of(job: Rendered) -> dict[str, Any]:
    """Its fields."""
    return {name: getattr(job, name) for name in Rendered.__dataclass_fields__}


def test_a_folder_without_wheels_is_one_line(tmp_path: Path) -> None:
    job = rendered(str(tmp_path / "run"))
    with pytest.raises(UsageError, match="no such folder"):
        payload.put(job, tmp_path / "absent")
    with pytest.raises(UsageError, match="holds no wheel"):
        payload.put(job, tmp_path)


def test_the_command_keeps_each_argument_whole() -> None:
    command = payload.start_command(
        "/opt/ml/input/data/isthmus/",
        run_uri='s3://bücket/it\'s "quoted"/run',
        job_id="r-01",
        cluster="azureml",
        grace=25,
        places={"data0": "/mnt/a b"},
    )
    assert command == [
        *("python3", "/opt/ml/input/data/isthmus/start.py", "--run", 's3://bücket/it\'s "quoted"/run'),
        *("--job", "r-01", "--cluster", "azureml", "--grace", "25", "--place", "data0=/mnt/a b"),
    ]
