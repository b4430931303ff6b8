"""The CreateTrainingJob request: stable, accepted by the service's own model, and equal to the reviewed golden files.

`python tests/unit/test_sagemaker_render.py` writes the golden files again; look at the difference before you commit it.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from sagemaker_recipes import SHIPPED, make_job, sm

import isthmus
from isthmus.backends.places import with_absolute_paths
from isthmus.backends.preflight import check_init_from
from isthmus.backends.sagemaker.backend import SageMakerBackend
from isthmus.backends.sagemaker.metrics import METRICS, definitions
from isthmus.backends.sagemaker.render import render
from isthmus.backends.sagemaker.shapes import refusals
from isthmus.core.recipe import parse_recipe
from isthmus.core.recipe.schema import Offer
from isthmus.core.train.progress import Progress
from isthmus.core.train.throughput import shares

GOLDEN = Path(__file__).parents[1] / "golden" / "sagemaker"
CASES = [
    (recipe, tier, access)
    for recipe in SHIPPED
    for tier in ("on_demand", "spot")
    for access in ("mount", "stream", "download")
]


def golden_text(recipe: str, tier: str, access: str) -> str:
    """The request, and what of the recipe in the job differs by access."""
    rendered = render(make_job(f"data.access={access}", *sm(tier=tier), recipe=recipe))
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    places = {
        "access": inside.data.access,
        "data": [source.uri for source in inside.data.sources],
        "validation": [source.uri for source in inside.validation.sources],
    }
    return json.dumps({"request": rendered.request, "recipe in the job": places}, indent=1) + "\n"


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that no release changes."""
    monkeypatch.setattr(isthmus, "__version__", "0.0.0")


@pytest.mark.parametrize(("recipe", "tier", "access"), CASES)
def test_it_is_the_reviewed_request(recipe: str, tier: str, access: str) -> None:
    assert golden_text(recipe, tier, access) == (GOLDEN / f"{recipe}.{tier}.{access}.json").read_text()


@pytest.mark.parametrize(("recipe", "tier", "access"), CASES)
def test_the_services_model_accepts_it(recipe: str, tier: str, access: str) -> None:
    job = make_job(f"data.access={access}", *sm(tier=tier), recipe=recipe)
    rendered = render(job)
    assert list(refusals(rendered.request)) == []
    assert [f for f in SageMakerBackend().lint(job) if f.level == "error"] == []
    assert rendered.to_json() == render(job).to_json()
    from botocore.session import get_session
    from botocore.validate import validate_parameters

    shape = get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    validate_parameters(rendered.request, shape)


def test_rendering_imports_no_sdk() -> None:
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r})\n"
        "from sagemaker_recipes import make_job\n"
        "from isthmus.backends.registry import get_backend\n"
        "backend = get_backend('sagemaker')\n"
        "job = make_job()\n"
        "backend.lint(job), backend.document(backend.render(job), 'yaml')\n"
        "print(*{'boto3', 'botocore', 'sagemaker', 'torch', 's3fs'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_weights_of_the_hub_are_fetched_by_the_job_itself() -> None:
    place = f"hf://team/model@{'0' * 40}"
    job = make_job("data.access=mount", "data.sources.0.uri=s3://b/one", f"model.init_from={place}")
    rendered = render(job)
    assert "init" not in {channel["ChannelName"] for channel in rendered.request["InputDataConfig"]}
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.model.init_from == place
    assert with_absolute_paths(job.recipe).model.init_from == place
    check_init_from(job.recipe)
    assert not [finding for finding in SageMakerBackend().lint(job) if place in finding.message]
    isolated = make_job(
        "data.access=mount",
        f"model.init_from={place}",
        "backends.sagemaker.network_isolation=true",
        "backends.sagemaker.checkpoint_mirror=true",
    )
    assert any(place in finding.message for finding in SageMakerBackend().lint(isolated))


def test_inputs_by_access() -> None:
    roots = "data.sources.0.uri=[s3://b/one, s3://b/two/]"
    weights = "model.init_from=s3://b/weights"
    channels: dict[str, dict[str, tuple[str, str]]] = {}
    for access in ("mount", "download", "stream"):
        rendered = render(make_job(f"data.access={access}", roots, weights))
        channels[access] = {
            channel["ChannelName"]: (channel["InputMode"], channel["DataSource"]["S3DataSource"]["S3Uri"])
            for channel in rendered.request["InputDataConfig"]
        }
        inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
        if access == "stream":
            assert inside.data.sources[0].uri == ["s3://b/one", "s3://b/two/"]
        else:
            assert inside.data.access == "mount"
            assert inside.data.sources[0].uri == ["/opt/ml/input/data/data0", "/opt/ml/input/data/data1"]
            assert inside.validation.sources[0].uri == ["/opt/ml/input/data/val0"]
            assert inside.model.init_from == "/opt/ml/input/data/init"
    own = channels["stream"].pop("isthmus")
    assert own[0] == "File"
    assert own[1].endswith("/jobs/quickstart-20261130-4f2a-01/")
    assert channels["stream"] == {}
    assert channels["mount"] == {
        "isthmus": own,
        "data0": ("FastFile", "s3://b/one/"),
        "data1": ("FastFile", "s3://b/two/"),
        "val0": ("FastFile", "s3://example-bucket/heldout/"),
        "init": ("FastFile", "s3://b/weights/"),
    }
    assert {mode for mode, _ in channels["download"].values()} == {"File"}


def test_a_downloads_cache_settings_stay_outside() -> None:
    rendered = render(make_job("data.access=download", "data.cache_limit=4 GB"))
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert (inside.data.access, inside.data.cache_limit) == ("mount", None)


def test_machines_and_capacity() -> None:
    sdxl = render(make_job(recipe="sdxl-progressive")).request["ResourceConfig"]
    assert sdxl == {"InstanceCount": 16, "InstanceType": "ml.p4de.24xlarge"}
    types = ["ml.p5en.48xlarge", "ml.p5e.48xlarge"]
    preferred = make_job(
        "compute.gpu=h200-141gb", *sm(instance_preferences=types, keep_alive="1 h"), recipe="sd3-medium"
    )
    assert render(preferred).request["ResourceConfig"] == {
        "InstanceCount": 8,
        "InstancePreferences": [{"InstanceType": name} for name in types],
        "KeepAlivePeriodInSeconds": 3600,
    }
    plan = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/p5-in-march"
    reserved = make_job(
        *sm(training_plan=plan),
        recipe="sd3-medium",
        offer=Offer(backend="sagemaker", region="us-west-2", tier="reserved"),
    )
    rendered = render(reserved)
    assert rendered.request["ResourceConfig"]["TrainingPlanArn"] == plan
    assert rendered.native["region"] == "us-west-2"
    assert render(make_job()).request["ResourceConfig"] == {
        "InstanceCount": 1,
        "InstanceType": "ml.m5.xlarge",
        "VolumeSizeInGB": 100,
    }


@pytest.mark.parametrize(
    ("words", "stopping"),
    [
        (("budget={}",), {"MaxRuntimeInSeconds": 432_000}),
        (("budget={max_hours: 10}",), {"MaxRuntimeInSeconds": 37_800}),
        (("budget={max_hours: 2000}", *sm(max_runtime="28 d")), {"MaxRuntimeInSeconds": 2_419_200}),
        (
            ("budget={}", *sm(tier="spot", max_runtime="1 h")),
            {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 90_000},
        ),
        (
            ("budget={}", *sm(tier="spot", max_runtime="1 h", max_wait="2 h", max_pending="1 h")),
            {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200, "MaxPendingTimeInSeconds": 3600},
        ),
    ],
)
def test_how_long_it_may_run(words: tuple[str, ...], stopping: dict[str, int]) -> None:
    assert render(make_job(*words)).request["StoppingCondition"] == stopping


def test_network_and_keys() -> None:
    settings = sm(
        subnets=["subnet-1"],
        security_groups=["sg-1"],
        encrypt_traffic=True,
        network_isolation=True,
        checkpoint_mirror=True,
        output_kms_key="key-1",
        retries=0,
    )
    vae = "encoders.autoencoder={kind: patch_pca, source: s3://b/vae, latent_channels: 24, factor: 4}"
    rendered = render(make_job("data.access=mount", vae, *settings))
    request = rendered.request
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["EnableNetworkIsolation"] is True
    assert request["EnableInterContainerTrafficEncryption"] is True
    assert request["OutputDataConfig"]["KmsKeyId"] == "key-1"
    assert "RetryStrategy" not in request
    # The run directory is a mirror, and nothing in the job needs S3.
    assert request["CheckpointConfig"] == {
        "S3Uri": f"{rendered.run_uri}/",
        "LocalPath": "/opt/ml/checkpoints",
    }
    arguments = request["AlgorithmSpecification"]["ContainerArguments"]
    assert arguments[arguments.index("--run") + 1] == "/opt/ml/checkpoints"
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.encoders.autoencoder.source == "/opt/ml/input/data/autoencoder"
    assert request["Environment"]["HF_HUB_OFFLINE"] == "1"


def test_the_fabrics_environment_follows_the_family() -> None:
    many = render(make_job(recipe="sdxl-progressive")).request
    assert many["Environment"]["FI_EFA_USE_HUGE_PAGE"] == "0"
    assert not {"RDMAV_FORK_SAFE", "FI_EFA_USE_DEVICE_RDMA", "NCCL_PROTO"} & many["Environment"].keys()
    names = [one["Name"] for one in many["AlgorithmSpecification"]["MetricDefinitions"]]
    assert "fabric:efa_nics" in names
    one = render(make_job("compute.nodes=1", recipe="sd3-medium")).request
    assert "FI_EFA_USE_HUGE_PAGE" not in one["Environment"]
    newest = make_job("compute.gpu=b200-180gb", recipe="sdxl-progressive")
    assert render(newest).request["Environment"]["FI_EFA_USE_HUGE_PAGE"] == "0"
    slow = make_job("compute.gpu=a10g-24gb", recipe="sdxl-progressive")
    assert "FI_EFA_USE_HUGE_PAGE" not in render(slow).request["Environment"]


def test_the_price_goes_with_the_job() -> None:
    assert "ISTHMUS_USD_PER_HOUR" not in render(make_job()).request["Environment"]
    assert render(make_job(usd_per_hour=404.25)).request["Environment"]["ISTHMUS_USD_PER_HOUR"] == "404.25"
    own = make_job(*sm(usd_per_hour=300.5), usd_per_hour=404.25)
    assert render(own).request["Environment"]["ISTHMUS_USD_PER_HOUR"] == "300.5"
    assert SageMakerBackend().offers(own)[0].usd_per_hour == 300.5


@pytest.mark.parametrize(
    "text", ['it\'s "quoted"', "größe 木 🚀", "a: b # c", "$(rm -rf)\\n", "true", "1e3", " "]
)
def test_any_text_survives(text: str) -> None:
    job = make_job(
        f"validation.prompts={json.dumps([text], ensure_ascii=False)}", *sm(environment={"TEAM_TEXT": text})
    )
    rendered = render(job)
    assert rendered.request["Environment"]["TEAM_TEXT"] == text
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.validation.prompts == [text]
    backend = SageMakerBackend()
    assert json.loads(backend.document(rendered, "json")) == rendered.request
    from ruamel.yaml import YAML

    for version in ((1, 1), (1, 2)):
        reader = YAML(typ="safe", pure=True)
        reader.version = version  # type: ignore[assignment]
        assert reader.load(io.StringIO(backend.document(rendered, "yaml"))) == rendered.request


def test_long_run_ids_make_valid_and_distinct_names() -> None:
    long = "a-very-long-name-of-a-recipe-that-goes-on-and-on-20261130-120000-abcdef"
    first, second = render(make_job(run_id=long)), render(make_job(run_id=long, attempt=2))
    other = render(make_job(run_id=long + "x"))
    assert len({first.job_id, second.job_id, other.job_id}) == 3
    for rendered in (first, second, other):
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", rendered.job_id)


def printed(loss: float, rate: float, row: dict[str, float]) -> str:
    """The line that the trainer prints where there is no terminal."""
    stream = io.StringIO()
    progress = Progress(1500, quiet=False, stream=stream)
    progress.step(
        1200, stage="256px-late.2", loss=loss, samples_per_s=rate, seconds=0.25, shares=lambda: shares(row)
    )
    return stream.getvalue()


def test_metric_expressions_match_the_trainers_lines() -> None:
    row = {"mfu": 0.412, "step_s": 1.0, "data_wait_s": 0.034, "exposed_communication_s": 0.11}
    line = printed(0.0412, 123_456.0, row)
    wanted = {
        "train:step": 1200,
        "train:loss": 0.0412,
        "train:samples_per_s": 123_500,
        "train:mfu_percent": 41.2,
        "train:data_wait_percent": 3,
        "train:exchange_percent": 11,
    }
    for name, value in wanted.items():
        found = re.search(METRICS[name], line)
        assert found is not None, (name, line)
        assert float(found[1]) == pytest.approx(value, rel=1e-3), name
    bare = printed(12.5, 99.0, {"step_s": 1.0})
    assert re.search(METRICS["train:mfu_percent"], bare) is None
    assert float(re.search(METRICS["train:samples_per_s"], bare)[1]) == 99  # type: ignore[index]
    assert re.search(METRICS["train:loss"], printed(float("nan"), 1.0, {"step_s": 1.0})) is None
    said = "validation at step 500: loss 0.1234 over held-out samples"
    assert float(re.search(METRICS["validation:loss"], said)[1]) == 0.1234  # type: ignore[index]
    assert float(re.search(METRICS["validation:step"], said)[1]) == 500  # type: ignore[index]
    assert all(len(one["Regex"]) <= 500 for one in definitions(efa=True))


def test_the_line_about_validation_is_still_the_loops() -> None:
    loop = (Path(__file__).parents[2] / "core" / "train" / "loop.py").read_text()
    assert "validation at step {step}: loss {row['loss']:.4f} over" in loop


if __name__ == "__main__":
    isthmus.__version__ = "0.0.0"
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        (GOLDEN / "{}.{}.{}.json".format(*case)).write_text(golden_text(*case))
