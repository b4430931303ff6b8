"""start.py in images that have less, other or the same, run as a container runs it: real environments, no network."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import pytest
from images import image, wheel_of
from nodes import small_recipe

import isthmus
from isthmus.backends import payload, wheel
from isthmus.backends.spec import Rendered
from isthmus.backends.wheel import Wheel
from isthmus.storage.rundir import RunDirectory

ROOT = Path(isthmus.__file__).parents[1]


class Container:
    """A job's files as its container sees them, and how to start it."""

    def __init__(self, place: Path, *, wheels: Path | None = None) -> None:
        self.place = place
        # Every string of a recipe may hold these.
        self.run_uri = str(place / "rün 'of' \"mine\" $HOME")
        recipe = small_recipe(place, nodes=1).read_text()
        files = {"recipe.yaml": recipe, "start.py": payload.START}
        job = Rendered(
            backend="sagemaker", run_id="r", run_uri=self.run_uri, job_id="r-01", request={}, files=files
        )
        self.folder = Path(shutil.copytree(payload.put(job, wheels), place / "mounted"))
        self.ml = place / "ml"
        (self.ml / "input" / "config").mkdir(parents=True)
        (self.ml / "output").mkdir()
        config = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
        (self.ml / "input" / "config" / "resourceconfig.json").write_text(json.dumps(config))

    def start(
        self, python: Path, told: str = "finish", run: str | None = None, **env: str
    ) -> subprocess.Popen[str]:
        """Starts the container's command."""
        command = payload.start_command(
            str(self.folder),
            run_uri=run or self.run_uri,
            job_id="r-01",
            cluster="sagemaker",
            python=str(python),
        )
        environment = {
            "PATH": os.environ["PATH"],
            "SAGEMAKER_BASE_DIR": str(self.ml),
            "ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal",
            "ISTHMUS_REHEARSAL": json.dumps({"*": told}),
            "ISTHMUS_REHEARSAL_READY": str(self.place),
            **env,
        }
        # As in a container that somebody built with a folder of their own as the working directory.
        work = self.place / "work"
        work.mkdir(exist_ok=True)
        (work / "isthmus.py").write_text("raise SystemExit(98)\n")
        return subprocess.Popen(
            command, env=environment, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ran(self, python: Path, **options: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(python, **options)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    @property
    def failure(self) -> str:
        """What the cloud would show."""
        return (self.ml / "output" / "failure").read_text()


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """The files of a job."""
    return Container(tmp_path)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an image with all but isthmus."""
    return image(tmp_path_factory.mktemp("bare") / "image")


def other(place: Path, version: str | None = None, exits: int = 99) -> Wheel:
    """Another isthmus, whose worker only exits."""
    source = place / "other"
    settings = wheel._project(ROOT)
    assert settings is not None
    for top in settings["tool"]["setuptools"]["package-dir"].values():
        shutil.copytree(ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", source)
    (source / "core" / "worker.py").write_text(f'"""Another."""\nraise SystemExit({exits})\n')
    if version:
        (source / "isthmus" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    return wheel.build(source)


def edited(folder: Path, old: bytes, new: bytes) -> None:
    """Changes the metadata of the wheel in a job's folder."""
    (path,) = folder.glob("isthmus-*.whl")
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data.replace(old, new) if name.endswith("METADATA") else data)
    path.write_bytes(buffer.getvalue())


def test_an_old_python_can_read_it() -> None:
    ast.parse(payload.START, feature_version=(3, 8))


def test_an_image_without_isthmus_runs_the_jobs_and_is_named_so(container: Container, bare: Path) -> None:
    code, output = container.ran(bare)
    assert code == 0, output
    assert f"isthmus: the image has no isthmus; the job brings {isthmus.__version__}\n" in output
    (started,) = RunDirectory(container.run_uri).events("started")
    assert started["job"] == "r-01"
    assert RunDirectory(container.run_uri).events("finished")


@pytest.mark.parametrize("version", ["0.0.1", None])
def test_another_isthmus_in_the_image_does_not_run(
    container: Container, tmp_path: Path, version: str | None
) -> None:
    """Not even one of the same version with other files. The recipe is broken, to see whose worker says so."""
    python = image(tmp_path / "image", isthmus=other(tmp_path, version))
    (container.folder / "recipe.yaml").write_text("version: 1\nnom: x\n")
    code, output = container.ran(python)
    assert code == 2, output
    assert "the image has " + (f"isthmus {version}" if version else "another build") in output
    assert "recipe.yaml:1: name: is missing" in output
    assert "name: is missing" in container.failure
    assert "Traceback" not in output


def test_the_very_same_isthmus_is_used_where_it_is(container: Container, tmp_path: Path) -> None:
    same = other(tmp_path)
    python = image(tmp_path / "image", isthmus=same)
    for path in container.folder.glob("isthmus-*.whl"):
        path.unlink()
    (container.folder / same.name).write_bytes(same.data)
    code, output = container.ran(python, TMPDIR=str(tmp_path / "nowhere"))
    assert (code, output) == (99, "")


def test_what_the_image_lacks_is_one_line_and_the_clouds_reason(container: Container, tmp_path: Path) -> None:
    python = image(tmp_path / "image", without=["pluggy", "diffusers"])
    code, output = container.ran(python)
    assert code == 2
    *_, line = output.splitlines()
    assert line.startswith(
        "isthmus: the image lacks pluggy>=1.5, diffusers>=0.42: name an image that has it, or"
    )
    assert "pip download --only-binary :all: --dest wheels 'pluggy>=1.5' 'diffusers>=0.42'" in line
    assert f"isthmus: {container.failure}" == line
    assert "Traceback" not in output
    assert not RunDirectory(container.run_uri).events()


def test_a_store_that_the_image_cannot_open_is_named(container: Container, tmp_path: Path) -> None:
    python = image(tmp_path / "image", without=["s3fs", "adlfs", "azure-identity"])
    code, output = container.ran(python, run="s3://bucket/run")
    assert code == 2
    assert "the image lacks s3fs>=2026.1: " in output
    code, output = container.ran(python, run="az://runs@account.blob.core.windows.net/run")
    assert code == 2
    assert "the image lacks azure-identity>=1.25, adlfs>=2026.2: " in output


def test_what_the_image_lacks_comes_from_the_jobs_wheels(tmp_path: Path) -> None:
    wheel_of("pluggy", tmp_path / "wheels")
    container = Container(tmp_path, wheels=tmp_path / "wheels")
    python = image(tmp_path / "image", without=["pluggy"], pip=True)
    code, output = container.ran(python)
    assert code == 0, output
    assert "the image lacks pluggy>=1.5; the job brings pluggy==" in output
    done = subprocess.run([str(python), "-c", "import pluggy"], capture_output=True, text=True, check=False)
    assert "No module named 'pluggy'" in done.stderr, "the image stays as it is"


def test_wheels_that_do_not_help_are_told_with_pips_reason(tmp_path: Path) -> None:
    wheel_of("pluggy", tmp_path / "wheels")
    container = Container(tmp_path, wheels=tmp_path / "wheels")
    python = image(tmp_path / "image", without=["pluggy", "typer"], pip=True)
    code, output = container.ran(python)
    assert code == 2
    assert "the job's wheels do not help (ERROR: " in output.splitlines()[-1]
    assert "typer" in output.splitlines()[-1]


def test_a_python_that_is_too_old_is_told(container: Container, bare: Path) -> None:
    edited(container.folder, b"Requires-Python: >=3.11", b"Requires-Python: >=3.99")
    code, output = container.ran(bare)
    assert code == 2
    assert "isthmus needs >=3.99: name an image with a newer one" in output
    assert len(output.splitlines()) == 1


def test_files_that_are_not_whole_are_told(container: Container, bare: Path) -> None:
    (path,) = container.folder.glob("isthmus-*.whl")
    path.write_bytes(path.read_bytes()[:100_000])
    code, output = container.ran(bare)
    assert code == 2
    assert len(output.splitlines()) == 1
    path.unlink()
    code, output = container.ran(bare)
    assert code == 2
    assert "holds no isthmus wheel" in output


@pytest.mark.faults
@pytest.mark.slow
def test_sigterm_at_any_moment_is_75(tmp_path: Path, bare: Path) -> None:
    """While start.py works, on the way from it to the worker, and after. Slow: a dozen starts."""
    for number in range(12):
        place = tmp_path / str(number)
        place.mkdir()
        container = Container(place)
        process = container.start(bare, told="wait")
        while not handles_sigterm(process.pid):
            time.sleep(
                0.001
            )  # until then the kernel ends it, or where it is the first process drops the signal
        time.sleep(0.12 * number)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, f"after {0.12 * number:.2f} s: {output}"


def handles_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = [line.split()[1] for line in lines if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.faults
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_as_the_first_process_of_a_namespace_it_hears_sigterm(container: Container, bare: Path) -> None:
    """PID 1 gets no signal that it does not handle, and shells in between pass none on."""
    command = payload.start_command(
        str(container.folder), run_uri=container.run_uri, job_id="r-01", cluster="sagemaker", python=str(bare)
    )
    environment = {
        "PATH": os.environ["PATH"],
        "SAGEMAKER_BASE_DIR": str(container.ml),
        "ISTHMUS_TRAINER_MODULE": "isthmus.core.rehearsal",
        "ISTHMUS_REHEARSAL": '{"*": "wait"}',
        "ISTHMUS_REHEARSAL_READY": str(container.place),
    }
    process = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    ready = container.place / "rank0-attempt1"
    while not ready.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    status = Path(f"/proc/{child}/status").read_text()
    assert "NSpid:\t" in status
    assert status.split("NSpid:\t")[1].splitlines()[0].split()[-1] == "1"
    assert "isthmus.core.worker" in Path(f"/proc/{child}/cmdline").read_text()
    os.kill(int(child), signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    run = RunDirectory(container.run_uri)
    assert run.checkpoints() == [1]
    assert run.events()[-1]["type"] == "preempted"
