"""The ModelTrainer that the bridge makes sends what we send: the real SDK, in an environment of its own, against the emulator."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sagemaker_recipes import make_job, sm
from servers import CACHE

from isthmus.backends import wheel
from isthmus.backends.sagemaker.render import render
from isthmus.emulators.image import Image
from isthmus.emulators.sagemaker.cloud import SageMakerEmulator

pytestmark = pytest.mark.long
"""The SDK is a gigabyte and takes seconds to import."""

SDK = "3.27.0"
ALONGSIDE = (
    "pluggy",
    "ruamel.yaml",
    "fsspec",
    "numpy",
    "pyarrow",
    "typer",
    "rich",
    "s3fs>=2026.1",
    "obstore",
)
"""What the launcher needs beside it."""
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p5-in-march"
SD3 = ("data.sources.0.uri=s3://example-bucket/quickstart", "run_directory=s3://example-bucket/runs")
CASES: dict[str, dict[str, Any]] = {
    "spot-mount": {"words": ["data.access=mount", *sm(tier="spot", max_pending="1 h", tags={"team": "größe"})]},
    "many-nodes": {
        "words": [
            *SD3,
            *sm(
                subnets=["subnet-1"], security_groups=["sg-1"], encrypt_traffic=True, output_kms_key="key-1",
                keep_alive="1 h", environment={"TEXT": "it's \"quoted\" $HOME"},
            ),
        ],
        "recipe": "sd3-medium",
    },
    "preferences": {
        "words": [*SD3, "compute.gpu=h200-141gb", *sm(instance_preferences=["ml.p5en.48xlarge", "ml.p5e.48xlarge"])],
        "recipe": "sd3-medium",
    },
    "plan": {"words": [*SD3, *sm(tier="reserved", training_plan=PLAN)], "recipe": "sd3-medium"},
    "isolated": {
        "words": ["data.access=download", *sm(network_isolation=True, checkpoint_mirror=True, volume_kms_key="key-1", retries=0)]
    },
}  # fmt: skip

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import boto3
from sagemaker_recipes import make_job
from sagemaker.core.helper.session_helper import Session
from isthmus.backends.bridge import to_model_trainer

case = json.loads(sys.argv[2])
sent = []
boto = boto3.Session()
boto.events.register("provide-client-params.sagemaker.CreateTrainingJob", lambda params, **_: sent.append(dict(params)))

class Seen(Exception):
    pass

def stop(**_):
    if case["send"]:
        return None
    raise Seen  # before it leaves: a made-up VPC or plan would be refused

boto.events.register("before-call.sagemaker.CreateTrainingJob", stop)
trainer = to_model_trainer(make_job(*case["words"], **case["rest"]), Session(boto_session=boto, default_bucket="example-bucket"))
try:
    trainer.train(wait=False, logs=False)
except Seen:
    pass
(request,) = sent
print("REQUEST " + json.dumps(request))
"""


@pytest.fixture(scope="session")
def sdk() -> Path:
    """The interpreter of an environment with the SDK; made once for this machine."""
    folder = CACHE / f"sagemaker-{SDK}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"sagemaker-{SDK}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = folder / "ready"
        wanted = " ".join(ALONGSIDE)
        if not ready.exists() or ready.read_text() != wanted:
            if not folder.exists():
                subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"]
            done = subprocess.run(
                [*install, f"sagemaker=={SDK}", *ALONGSIDE], check=False, capture_output=True
            )
            if done.returncode:
                pytest.skip(f"the SageMaker SDK {SDK} cannot be installed here")
            ready.write_text(wanted)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMakerEmulator]:
    """Whose containers end at once."""
    place = tmp_path_factory.mktemp("cloud")
    (place / "bin").mkdir()
    (place / "bin" / "python3").write_text("#!/bin/sh\nexit 0\n")
    (place / "bin" / "python3").chmod(0o755)
    image = Image(python=str(place / "bin" / "python3"))
    with SageMakerEmulator(place / "cloud", images={"*": image}, privileges="processes") as emulator:
        emulator.bucket("example-bucket")
        for name in ("quickstart/manifest.json", "heldout/manifest.json"):
            emulator.client("s3", "us-east-1").put_object(Bucket="example-bucket", Key=name, Body=b"{}")
        yield emulator


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """isthmus as it would be installed, unpacked."""
    folder = tmp_path_factory.mktemp("isthmus")
    built = wheel.build()
    (folder / built.name).write_bytes(built.data)
    with zipfile.ZipFile(folder / built.name) as archive:
        archive.extractall(folder)
    return folder


def plain(request: dict[str, Any]) -> dict[str, Any]:
    """Without what means nothing: absent and false, no hyperparameters, order of tags and channels."""
    kept = {name: value for name, value in request.items() if value not in (None, {}, False)}
    if "VpcConfig" in kept:
        kept["VpcConfig"] = {name: sorted(value) for name, value in kept["VpcConfig"].items()}
    kept["Tags"] = sorted(kept["Tags"], key=lambda tag: str(tag["Key"]))
    kept["InputDataConfig"] = sorted(kept["InputDataConfig"], key=lambda one: str(one["ChannelName"]))
    return kept


@pytest.mark.parametrize("name", CASES)
def test_it_sends_what_we_send(
    sdk: Path, cloud: SageMakerEmulator, ours: Path, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    words = [f"backends.sagemaker.role_arn={cloud.role}", *case["words"]]
    rest = {"recipe": case.get("recipe", "quickstart"), "run_id": f"bridge-{name}"}
    send = name == "spot-mount"
    helpers = str(Path(__file__).parents[1] / "helpers")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
        **cloud.environment(),
        "PYTHONPATH": str(ours),
        "SAGEMAKER_TELEMETRY_OPT_OUT": "1",
    }
    done = subprocess.run(
        [str(sdk), "-c", PROGRAM, helpers, json.dumps({"words": words, "rest": rest, "send": send})],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("REQUEST ")]
    theirs = json.loads(line.removeprefix("REQUEST "))
    job = make_job(*words, **rest)
    assert plain(theirs) == plain(dict(render(job).request))
    if send:
        assert f"bridge-{name}-01" in [job["TrainingJobName"] for job in cloud.jobs()]
