"""Encode jobs before they start: the recipe's section, what is refused and why, the plan, and the estimate's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.backends import encoding
from isthmus.backends.prepare import Launch, prepare
from isthmus.backends.spec import Capability, Finding
from isthmus.cli.app import build
from isthmus.cli.budgeting import FILE, keep_estimate, with_budget
from isthmus.cli.encode_job import encode_estimate_of, job_recipe
from isthmus.core.recipe import Recipe, parse_recipe, resolve
from isthmus.core.recipe.dump import dump_recipe, recipe_hash
from isthmus.core.recipe.mounted import with_places
from isthmus.cost.encoding import encode_estimate, flops_per_image
from isthmus.errors import IsthmusError, RecipeError, UsageError

IMAGE = "exampleregistry.azurecr.io/train@sha256:" + "0123456789abcdef" * 4
ROLE = "arn:aws:iam::123456789012:role/train"
PLACES = {
    "azure": ("az://pics@acct.blob.core.windows.net/tars", "az://pics@acct.blob.core.windows.net/latents"),
    "sagemaker": ("s3://bucket/tars", "s3://bucket/latents"),
}
OVERRIDES = [
    'run_directory={azure: "az://pics@acct.blob.core.windows.net/runs", sagemaker: "s3://bucket/runs", local: ./runs}',
    "compute={gpu: a100-80gb, nodes: 3, gpus_per_node: 8}",
    "backends={azure: {subscription: 00000000-0000-0000-0000-000000000000, resource_group: g, workspace: w, "
    f"region: italynorth, compute: gpu, environment: {{image: '{IMAGE}'}}}}, "
    f"sagemaker: {{role_arn: '{ROLE}', region: us-east-1}}}}",
    "encoders.autoencoder={kind: diffusers, source: owner/vae, latent_channels: 4, factor: 8}",
    "encoders.text=[{name: clip_l, kind: clip, source: owner/clip, max_tokens: 77, width: 768}]",
]


def job(backend: str, *more: str, source: str = "", dest: str = "", **section: Any) -> Launch:
    places = PLACES[backend]
    data = {"source": source or places[0], "dest": dest or places[1], **section}
    loaded = job_recipe("quickstart", [*OVERRIDES, *more], data, nodes=None, here=None)
    return prepare(loaded, backends=[backend], run_id="enc", offline=True)


def errors(launch: Launch) -> dict[str, Finding]:
    return {one.id: one for one in launch.findings if one.level == "error"}


@pytest.mark.parametrize("backend", ["azure", "sagemaker"])
def test_a_job_is_the_recipe_without_what_only_training_needs(backend: str) -> None:
    launch = job(
        backend, "trackers=[tensorboard]", "monitor.gpu_memory={min: 70}", "data.access=mount",
        captions=2, precision="bf16", unit=10**9,
    )  # fmt: skip
    assert errors(launch) == {}
    inside = parse_recipe(launch.rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.name == "quickstart-encode"
    assert inside.encode is not None
    assert (inside.encode.source, inside.encode.dest) == PLACES[backend]
    assert (inside.encode.captions, inside.encode.precision, inside.encode.unit) == (2, "bf16", 10**9)
    assert (inside.trackers, inside.validation.sources, inside.data.access) == ([], [], "stream")
    assert not inside.monitor.model_fields_set
    # Three machines do not divide the training's lanes; to an encoding that is nothing.
    assert (launch.job.world_size, inside.data.lanes) == (24, 4)
    request = json.dumps(dict(launch.rendered.request))
    assert "data0" not in request  # nothing is mounted
    again = resolve(inside, backend)
    assert dump_recipe(again) == dump_recipe(inside)


@pytest.mark.parametrize("access", ["mount", "download"])
@pytest.mark.parametrize("backend", ["azure", "sagemaker"])
def test_a_source_may_be_an_input_of_the_job(backend: str, access: str) -> None:
    launch = job(backend, access=access)
    assert errors(launch) == {}
    inside = parse_recipe(launch.rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.encode is not None
    assert (inside.encode.origin, inside.encode.dest) == PLACES[backend]
    request = json.loads(json.dumps(dict(launch.rendered.request)))
    if backend == "sagemaker":
        own, source = request["InputDataConfig"]
        assert (own["ChannelName"], source["ChannelName"]) == ("isthmus", "source")
        assert source["InputMode"] == {"mount": "FastFile", "download": "File"}[access]
        assert source["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/tars/"
        assert inside.encode.source == "/opt/ml/input/data/source"
    else:
        inputs = request["properties"]["inputs"]
        assert inputs["source"]["mode"] == {"mount": "ReadOnlyMount", "download": "Download"}[access]
        assert inputs["source"]["uri"] == "https://acct.blob.core.windows.net/pics/tars/"
        assert "--place source=" in request["properties"]["command"].replace("'", "").replace('"', "")
        assert inside.encode.source == "place:source"
        there = with_places(inside, {"source": "/mnt/wd/INPUT_source"})
        assert there.encode is not None
        assert there.encode.source == "/mnt/wd/INPUT_source"
    copied = [one for one in launch.findings if "copie" in one.message]
    assert bool(copied) == (access == "download"), launch.findings
    # The run's own word is the URI: a resume, the preflight and `status` look there.
    assert launch.job.recipe.encode is not None
    assert launch.job.recipe.encode.source == PLACES[backend][0]


@pytest.mark.parametrize(
    ("backend", "source", "told"),
    [
        ("azure", "s3://bucket/tars", "is not in azure's own store"),
        ("sagemaker", "az://pics@acct.blob.core.windows.net/tars", "is not in sagemaker's own store"),
        ("sagemaker", "https://host/tars/0.tar", "is not in sagemaker's own store"),
        ("sagemaker", "s3://bucket/tars/{000..199}.tar", "names numbered files"),
        ("azure", "az://pics@acct.blob.core.windows.net/all.parquet", "is one file"),
    ],
)
def test_what_cannot_be_an_input_is_refused_offline(backend: str, source: str, told: str) -> None:
    found = errors(job(backend, source=source, access="mount"))
    assert told in found["encode.channel"].message, found
    assert errors(job(backend, source=source)) == {}


def test_this_machine_reads_a_path_as_a_mount_and_mounts_no_store(tmp_path: Path) -> None:
    def found(source: str) -> list[str]:
        section = {"source": source, "dest": str(tmp_path / "new"), "access": "mount"}
        loaded = job_recipe("quickstart", [f"run_directory={tmp_path}/runs"], section, nodes=None, here=1)
        launch = prepare(loaded, backends=["local"], run_id="enc")
        return [one.message for one in launch.findings if one.level == "error"]

    assert found(str(tmp_path)) == []
    assert found("s3://bucket/tars") == [
        "encode.access is mount, and local mounts and copies nothing: s3://bucket/tars"
    ]


def test_another_source_is_another_run_and_no_encode_is_the_hash_of_before() -> None:
    plain = parse_recipe(Path("recipes/quickstart.yaml").read_text(), filename="q.yaml").recipe
    assert plain.encode is None
    assert "\nencode:" not in dump_recipe(plain)
    hashes = {recipe_hash(job("sagemaker", source=f"s3://bucket/{name}").job.source) for name in ("a", "b")}
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("backend", "changes", "rule"),
    [
        ("azure", {"source": "./pictures"}, "encode.place"),
        ("sagemaker", {"dest": "/data/latents"}, "encode.place"),
        ("sagemaker", {"dest": "https://host/latents"}, "encode.place"),
        ("sagemaker", {"more": "encoders.autoencoder.source=./vae"}, "encode.model"),
        ("azure", {"more": "encoders.text.0.source=models"}, "encode.model"),
        ("sagemaker", {"more": "backends.sagemaker.network_isolation=true"}, "encode.isolated"),
    ],
)
def test_what_a_clouds_job_cannot_do_is_refused_offline(
    backend: str, changes: dict[str, str], rule: str
) -> None:
    more = [changes.pop("more")] if "more" in changes else []
    found = errors(job(backend, *more, **changes))
    assert rule in found, found
    assert found[rule].fix


def test_another_clouds_store_and_a_path_in_the_image_are_warned_of() -> None:
    launch = job("azure", "encoders.autoencoder.source=/opt/vae", source="s3://bucket/tars")
    assert errors(launch) == {}
    warned = {one.id for one in launch.findings if one.level == "warning"}
    assert {"encode.other-cloud", "encode.model-in-image"} <= warned
    assert errors(job("azure", source="https://host/{000..199}.tar")) == {}


def test_a_source_that_is_the_destination_and_a_misspelt_field_are_recipe_errors() -> None:
    with pytest.raises(RecipeError, match="is the source"):
        job("sagemaker", dest="s3://bucket/tars/")
    with pytest.raises(RecipeError, match="encode"):
        job("sagemaker", dests="s3://bucket/x")
    section = {"source": {"azure": "az://c@a.blob.core.windows.net/t"}, "dest": "s3://bucket/x"}
    loaded = job_recipe("quickstart", OVERRIDES, section, nodes=None, here=None)
    with pytest.raises(RecipeError, match="no place for backend sagemaker"):
        prepare(loaded, backends=["sagemaker"])


def test_places_that_are_empty_or_taken_are_refused_before_machines_are_paid_for(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "manifest.json").write_text("{}")

    def look(source: Path, dest: Path) -> dict[str, Finding]:
        section = {"source": str(source), "dest": str(dest)}
        loaded = job_recipe("quickstart", [f"run_directory={tmp_path}/runs"], section, nodes=None, here=1)
        launch = prepare(loaded, backends=["local"], run_id="enc")
        assert list(encoding.lint(launch.job, frozenset({Capability.ATTACHED}))) == []
        return {one.id: one for one in encoding.look(launch.job)}

    assert look(full, tmp_path / "new") == {}
    assert set(look(tmp_path / "none", tmp_path / "new")) == {"encode.source"}
    assert (
        set(
            look(
                full,
                full / "..",
            )
        )
        == set()
    )
    assert set(look(tmp_path, full)) == {"encode.dest"}
    # The run that began it goes on, or finds that it has ended.
    (tmp_path / "runs" / "enc" / "encode").mkdir(parents=True)
    (tmp_path / "runs" / "enc" / "encode" / "begun.json").write_text("{}")
    assert look(tmp_path, full) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dry-run"], "--dry-run is of a job"),
        (["--follow"], "--follow is of a job"),
        (["--access", "mount"], "--access is of a job"),
        (["--backend", "azure", "--access", "copy"], "encode.access"),
        (["--backend", "azure", "--restart"], "--restart does not go with a job on azure"),
        (["--backend", "azure", "--device", "cuda"], "--device does not go with a job"),
        (["--backend", "sagemaker", "--ranks", "4"], "--ranks does not go with a job on sagemaker"),
        (["--backend", "local", "--nodes", "2"], "--nodes does not go with a job on local"),
        (["--backend", "local", "--rank", "1"], "--rank does not go with a job on local"),
        (["--backend", "nowhere"], "nowhere"),
        (["--backend", "local", "--format", "json"], "--format belongs to --dry-run"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    found = CliRunner().invoke(build("data"), ["data", "encode", "a", "b", "--recipe", "quickstart", *words])
    assert isinstance(found.exception, IsthmusError), found.output
    assert message in str(found.exception)
    assert found.exception.exit_code == 2


def test_the_estimate_is_the_published_pace_over_the_encoders_flops() -> None:
    recipe = job("sagemaker", precision="bf16", captions=1).job.recipe

    def with_sizes(*sizes: int) -> Recipe:
        stages = [recipe.stages[0].model_copy(update={"resolution": size}) for size in sizes]
        return recipe.model_copy(update={"stages": stages})

    # Against torch's own counter on the real class (meta device): 0.2727, 1.1167, 4.8789 TFLOP.
    text = 2 * 85e6 * 77
    for size, flops in ((256, 0.272722e12), (512, 1.116658e12), (1024, 4.878949e12)):
        counted = flops_per_image(with_sizes(size))
        assert counted is not None
        assert counted - text == pytest.approx(flops, rel=1e-3)
    found = encode_estimate(with_sizes(256, 512), 10**6, gpus=8, usd_per_hour=32.0)
    assert found is not None
    assert found.hours == pytest.approx(10**6 * (1.38938e12 + text) / (0.14 * 312e12 * 8) / 3600, rel=1e-3)
    assert found.usd == pytest.approx(32 * found.hours)
    assert found.usd_interval == (found.usd / 2, found.usd * 2)
    full = job("sagemaker").job.recipe
    slow = encode_estimate(full, 10**6, gpus=8, usd_per_hour=None)
    fast = encode_estimate(recipe, 10**6, gpus=8, usd_per_hour=None)
    assert slow is not None
    assert fast is not None
    assert (slow.hours / fast.hours, slow.usd) == (2.0, None)
    unknown = recipe.encoders.autoencoder.model_copy(update={"factor": 32})
    other = recipe.model_copy(
        update={"encoders": recipe.encoders.model_copy(update={"autoencoder": unknown})}
    )
    assert encode_estimate(other, 10, gpus=1, usd_per_hour=1.0) is None


def _capped(*words: str, source: str = "emoji", offline: bool = False) -> list[Finding]:
    """What the budget's check adds. `emoji` is counted without a store; that a cloud's job cannot read it is another finding."""
    own = f"backends.sagemaker={{role_arn: '{ROLE}', region: us-east-1, usd_per_hour: 32}}"
    launch = job("sagemaker", own, *words, source=source, precision="bf16")
    return list(with_budget(launch, offline=offline).findings[len(launch.findings) :])


def test_the_budget_is_held_against_the_estimate_before_a_launch() -> None:
    own = f"backends.sagemaker={{role_arn: '{ROLE}', region: us-east-1, usd_per_hour: 32}}"
    found = encode_estimate_of(job("sagemaker", own, source="emoji", precision="bf16"))
    assert (found.pictures, found.usd) == (528, pytest.approx(32 * found.hours))
    for share, level in ((0.4, "error"), (0.6, "warning"), (1.9, "warning"), (2.1, None)):
        for cap in (
            f"budget.max_usd={share * (found.usd or 0):.12f}",
            f"budget.max_hours={share * found.hours:.12f}",
        ):
            told = _capped(cap)
            assert [one.level for one in told] == ([level] if level else []), (cap, told)
    (refused,) = _capped("budget.max_hours=1e-9")
    assert refused.message.startswith("budget.max_hours 1e-09 h cannot be enough: ")
    assert refused.message.endswith(" are expected on sagemaker us-east-1 on_demand 3 x ml.p4de.24xlarge")
    # A dry run asks no store; what nobody has measured is said, and left to the job.
    (unseen,) = _capped("budget.max_usd=1", source="s3://bucket/tars", offline=True)
    assert (unseen.id, unseen.level) == ("budget.unestimated", "warning")
    assert "a dry run does not count the pictures of s3://bucket/tars" in unseen.message
    (unknown,) = _capped("budget.max_usd=1", "encoders.autoencoder.factor=32")
    assert "nobody has measured how fast a100-80gb runs these encoders" in unknown.message
    assert _capped() == []


def test_the_estimate_is_kept_with_the_run(tmp_path: Path) -> None:
    section = {"source": "emoji", "dest": str(tmp_path / "latents"), "precision": "bf16"}
    words = [*OVERRIDES[1:2], *OVERRIDES[3:], "compute.nodes=1", f"run_directory={tmp_path}/runs"]
    launch = prepare(
        job_recipe("quickstart", words, section, nodes=None, here=None), backends=["local"], run_id="enc"
    )
    keep_estimate(launch)
    kept = json.loads((tmp_path / "runs" / "enc" / FILE).read_text())
    assert (kept["backend"], kept["pictures"], kept["usd"]) == ("local", 528, None)
    assert kept["hours_interval"] == [kept["hours"] / 2, kept["hours"] * 2]


def test_a_rank_without_a_section_or_a_gpu_says_so(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from isthmus.core.encode import rank

    path = tmp_path / "recipe.yaml"
    path.write_text(Path("recipes/quickstart.yaml").read_text())
    with pytest.raises(UsageError, match="no section `encode`"):
        rank.main(["--recipe", str(path), "--run", str(tmp_path / "run")])
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="sees no CUDA device"):
            rank._device(job("sagemaker").job.recipe, 0)
