"""A job's inputs and outputs as folders: mounted, copied, written back."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isthmus.emulators.azureml.blobs import Blobs, Place
from isthmus.emulators.azureml.guarded import Guarded
from isthmus.emulators.azureml.places import find_place
from isthmus.emulators.azureml.rules import refuse
from isthmus.emulators.azureml.world import Job, World
from isthmus.errors import StorageError

SYNC_S = 1.0
"""How often a written output goes to the store."""


class Mount:
    """A place of the store as a folder, read-only: rclone over FUSE, as Azure ML's own mount is FUSE.

    Raises:
        StorageError: it cannot be mounted here.
    """

    def __init__(self, blobs: Blobs, place: Place, folder: Path, log: Path) -> None:
        self.folder = folder
        if why := mounts_lack():
            raise StorageError(why)
        folder.mkdir(parents=True, exist_ok=True)
        remote = f":azureblob:{place.container}/{place.path}"
        command = [
            "rclone",
            "mount",
            remote,
            str(folder),
            "--read-only",
            "--vfs-cache-mode",
            "off",
            "--config",
            "",
        ]
        command += ["--attr-timeout", "10s", "--dir-cache-time", "10s", "--buffer-size", "4M"]
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder.parent),
            "RCLONE_AZUREBLOB_SAS_URL": blobs.sas_url(Place(place.container, ""), "rl"),
        }
        self._process = Guarded(command, environment=environment, log=log)
        deadline = time.monotonic() + 20
        while not os.path.ismount(folder):
            if self._process.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise StorageError(f"rclone could not mount {remote}: {self._process.said()}")
            time.sleep(0.03)

    def stop(self) -> None:
        """Unmounts it."""
        self._process.stop()
        if os.path.ismount(self.folder):
            subprocess.run(
                [_unmounter() or "umount", "-u", "-z", str(self.folder)], capture_output=True, check=False
            )


def mounts_lack() -> str | None:
    """What mounts need and this machine has not, or None."""
    if not shutil.which("rclone") or not _unmounter() or not Path("/dev/fuse").exists():
        return "mounts need rclone, fuse3 and /dev/fuse"
    return None


def _unmounter() -> str | None:
    return shutil.which("fusermount3") or shutil.which("fusermount")


class Output:
    """A folder that is written to the store while it is written to (`rw_mount`), or at the end only (`upload`)."""

    def __init__(self, blobs: Blobs, place: Place, folder: Path, *, live: bool) -> None:
        self.blobs, self.place, self.folder, self.live = blobs, place, folder, live
        self._sent: dict[str, tuple[int, int]] = {}
        self._ended = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._thread: threading.Thread | None = None
        if live:
            blobs.download(place, folder)
            self._sent = self._stats()
            self._thread = threading.Thread(target=self._follow, daemon=True, name="azureml-output")
            self._thread.start()

    def _stats(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in sorted(self.folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    status = path.stat()
                    found[path.relative_to(self.folder).as_posix()] = (status.st_size, status.st_mtime_ns)
        return found

    def send(self) -> None:
        """Writes what has changed to the store."""
        container = self.blobs.container(self.place.container)
        for name, stat in self._stats().items():
            if self._sent.get(name) != stat:
                with contextlib.suppress(FileNotFoundError), (self.folder / name).open("rb") as file:
                    container.upload_blob(
                        "/".join(filter(None, (self.place.path, name))), file, overwrite=True
                    )
                    self._sent[name] = stat

    def _follow(self) -> None:
        while not self._ended.wait(SYNC_S):
            self.send()

    def stop(self, *, send: bool) -> None:
        """No more; with `send` what is left is written first."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if send:
            self.send()


class JobData:
    """Inputs and outputs of one attempt of a job.

    Args:
        folder: the attempt's own.
        say: takes a line for the job's warnings.
    """

    def __init__(
        self, world: World, blobs: Blobs, job: Job, folder: Path, say: Callable[[str], None]
    ) -> None:
        self.world, self.blobs, self.job, self.folder, self.say = world, blobs, job, folder, say
        self.mounts: list[Mount] = []
        self.outputs: list[Output] = []

    def inputs(self) -> dict[str, str]:
        """Paths and values of the inputs: the same on every node, as they are in Azure.

        Raises:
            Refused: an input is not there or cannot be read.
        """
        ports: Mapping[str, Mapping[str, Any]] = self.job.properties.get("inputs") or {}
        return {name: self._input(name, port) for name, port in ports.items()}

    def _input(self, name: str, port: Mapping[str, Any]) -> str:
        if port["jobInputType"] == "literal":
            return str(port["value"])
        uri, mode = port["uri"], port.get("mode") or "ReadOnlyMount"
        if mode == "Direct":
            return str(uri)
        place = find_place(uri, self.world, endpoint=self.blobs.endpoint, rule="job-input")
        if place is None:
            raise refuse(
                "input-access",
                f"ScriptExecution.StreamAccess.Authentication: cannot access {uri} of input {name}: another account",
            )
        if next(self.blobs.names(place), None) is None:
            raise refuse(
                "input-missing", f"ScriptExecution.StreamAccess.NotFound: {uri} of input {name} was not found"
            )
        single = self.blobs.is_blob(place)
        # Once for all nodes: they cannot tell.
        parent = Place(place.container, place.path.rpartition("/")[0]) if single else place
        if "Download" in mode:
            folder = self.folder / "inputs" / name
            self.blobs.download(place, folder)
        else:
            folder = self._mount(name, parent)
        return str(folder / place.path.rpartition("/")[2]) if single else str(folder)

    def _mount(self, name: str, place: Place) -> Path:
        folder = self.folder / "inputs" / name
        try:
            self.mounts.append(Mount(self.blobs, place, folder, self.folder / f"mount-{name}.log"))
        except StorageError as error:
            self.say(f"input {name} is a read-only copy, not a mount: {error.message}")
            self.blobs.download(place, folder)
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
        return folder

    def output_paths(self, node: Path, inside: Path) -> dict[str, str]:
        """Paths of the outputs on a node, whose folder is called `inside` there."""
        paths = {}
        for name, port in (self.job.properties.get("outputs") or {}).items():
            uri = (
                port.get("uri")
                or f"azureml://datastores/workspaceblobstore/paths/azureml/{self.job.name}/{name}/"
            )
            place = find_place(uri, self.world, endpoint=self.blobs.endpoint, rule="job-output")
            if port.get("mode") == "Direct" or place is None:
                paths[name] = uri
                continue
            folder = node / "outputs" / name
            live = (port.get("mode") or "ReadWriteMount") == "ReadWriteMount"
            self.outputs.append(Output(self.blobs, place, folder, live=live))
            paths[name] = str(inside / "outputs" / name)
        return paths

    def stop(self, *, send: bool) -> None:
        """Unmounts and, with `send`, writes the outputs."""
        for output in self.outputs:
            output.stop(send=send)
        for mount in self.mounts:
            mount.stop()
        self.outputs, self.mounts = [], []
