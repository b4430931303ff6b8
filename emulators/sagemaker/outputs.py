"""What a job leaves in S3: /opt/ml/model and /opt/ml/output/data of all hosts together, packed or plain."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.emulators.sagemaker.bucket import files
from isthmus.emulators.sagemaker.requests import split_uri
from isthmus.emulators.sagemaker.tree import Place


def upload(client: Any, request: dict[str, Any], places: Sequence[Place], work: Path, *, model: bool) -> None:
    """Uploads to S3OutputPath/<job>/output/: `model` and `output`, each a .tar.gz or, with NONE, a folder.

    Args:
        model: whether the model goes, too; not of a job that failed.
    """
    output = request["OutputDataConfig"]
    bucket, prefix = split_uri(output["S3OutputPath"])
    base = f"{prefix.rstrip('/')}/{request['TrainingJobName']}/output".lstrip("/")
    for what, inside in (("model", "model"), ("output", "output/data")):
        folders = [place.ml / inside for place in places]
        found = [(folder, path) for folder in folders for path in files(folder)]
        if not found or (what == "model" and not model):
            continue
        if output.get("CompressionType") == "NONE":
            for folder, path in found:
                client.upload_file(str(path), bucket, f"{base}/{what}/{path.relative_to(folder).as_posix()}")
            continue
        packed = work / f"{what}.tar.gz"
        with tarfile.open(packed, "w:gz") as archive:
            for folder, path in found:
                archive.add(path, path.relative_to(folder).as_posix())
        client.upload_file(str(packed), bucket, f"{base}/{what}.tar.gz")
        packed.unlink()
