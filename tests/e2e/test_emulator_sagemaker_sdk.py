"""The real `sagemaker` SDK drives the emulator: its ModelTrainer uploads, submits, waits and tails; its own driver runs on two hosts.

Long: the SDK is a gigabyte in an environment of its own, which tests/e2e/test_sagemaker_bridge.py makes once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sagemaker_jobs import BUCKET, keys, lines
from servers import CACHE

from isthmus.emulators import namespaces
from isthmus.emulators.sagemaker import Image, SageMakerEmulator

pytestmark = [pytest.mark.long]
SDK = CACHE / "sagemaker-3.27.0"

TRAIN = """
import argparse, glob, os
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--note")
options, _ = parser.parse_known_args()
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
read = sum(len(open(name, "rb").read()) for name in glob.glob("/opt/ml/input/data/train/part-*"))
print(f"rank={dist.get_rank()} of {dist.get_world_size()} sum={total.item()} read={read} steps={options.steps}", flush=True)
if dist.get_rank() == 0:
    print("loss=0.125", flush=True)
    open(os.path.join(os.environ["SM_MODEL_DIR"], "weights"), "w").write("w")
dist.barrier()
dist.destroy_process_group()
"""

SUBMIT = """
import logging
import sys
logging.basicConfig(level=logging.INFO)
import boto3
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.training.configs import (
    Channel, Compute, DataSource, MetricDefinition, OutputDataConfig, S3DataSource, SourceCode, StoppingCondition,
)
from sagemaker.train import ModelTrainer
from sagemaker.train.distributed import Torchrun

role, bucket, source = sys.argv[1:]
data = DataSource(s3_data_source=S3DataSource(s3_data_type="S3Prefix", s3_uri=f"s3://{bucket}/data/"))
trainer = ModelTrainer(
    sagemaker_session=Session(boto_session=boto3.Session(), default_bucket=bucket),
    role=role,
    base_job_name="theirs",
    training_image="763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.9",
    source_code=SourceCode(source_dir=source, entry_script="train.py"),
    distributed=Torchrun(process_count_per_node=1),
    compute=Compute(instance_type="ml.p4de.24xlarge", instance_count=2),
    stopping_condition=StoppingCondition(max_runtime_in_seconds=300),
    output_data_config=OutputDataConfig(s3_output_path=f"s3://{bucket}/out"),
    hyperparameters={"steps": 3, "note": "plain"},
    environment={"OMP_NUM_THREADS": "1"},
    input_data_config=[Channel(channel_name="train", input_mode="FastFile", data_source=data)],
).with_metric_definitions([MetricDefinition(name="loss", regex="loss=([0-9.]+)")])
trainer.train(wait=True, logs=True)
job = trainer._latest_training_job
print("JOB", job.training_job_name, job.training_job_status, job.final_metric_data_list[0].value)
"""


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerEmulator]:
    """Whose containers have torch, and a GPU as far as the SDK's driver asks."""
    if not (SDK / "ready").exists():
        pytest.skip("the SageMaker SDK is not there: run tests/e2e/test_sagemaker_bridge.py first")
    if lacking := namespaces.missing() or namespaces.can_mount():
        pytest.skip(f"hosts cannot be namespaces here: {lacking}")
    images = {"*": Image(python=sys.executable)}
    with SageMakerEmulator(tmp_path / "cloud", images=images, grace=5) as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        cloud.bucket(BUCKET)
        cloud.client("s3", cloud.region).put_object(Bucket=BUCKET, Key="data/part-0", Body=b"0123456789")
        yield cloud


def test_a_model_trainer_runs_here(cloud: SageMakerEmulator, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text(TRAIN)
    environment = {**cloud.environment(), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    environment |= {"SAGEMAKER_TELEMETRY_OPT_OUT": "1"}
    done = subprocess.run(
        [str(SDK / "bin" / "python"), "-c", SUBMIT, cloud.role, BUCKET, str(source)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    _, name, status, loss = done.stdout.splitlines()[-1].split()
    assert (status, float(loss)) == ("Completed", 0.125)
    assert "rank=1 of 2 sum=3.0 read=10 steps=3" in list(lines(name, "algo-2"))
    assert any("rank=0 of 2" in line for line in lines(name, "algo-1"))
    assert keys("out/") == [f"out/{name}/output/model.tar.gz"]
    # What the SDK printed while it waited came from the log streams here.
    assert "rank=0 of 2" in done.stdout + done.stderr
