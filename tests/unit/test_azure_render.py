"""The Azure ML command job: stable, equal to the reviewed golden files, and safe from what users write.

`python tests/unit/test_azure_render.py` writes the golden files again; look at the difference before you commit it.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from azure_jobs import ACCOUNT, CASE_STUDY, CASES, IDENTITY, IMAGE, az, case_study, make_job, offer, shipped

import isthmus.backends.azure.render as renderer
from isthmus.backends.azure.backend import AzureBackend
from isthmus.backends.azure.body import check_body
from isthmus.backends.azure.document import seconds
from isthmus.backends.azure.render import duration, quoted, render
from isthmus.backends.spec import Job, Rendered
from isthmus.core.recipe import parse_recipe
from isthmus.errors import UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "azure"


def golden_texts(job: Job) -> dict[str, str]:
    """Suffix -> the request, the handle's part and what of the recipe differs by access; and the YAML form."""
    rendered = render(job)
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    text = {
        "request": rendered.request,
        "native": rendered.native,
        "files": sorted(rendered.files),
        "recipe in the job": {
            "access": inside.data.access,
            "data": [source.uri for source in inside.data.sources],
            "validation": [source.uri for source in inside.validation.sources],
        },
    }
    return {
        "json": json.dumps(text, indent=1) + "\n",
        "yaml": AzureBackend().document(rendered, "yaml"),
    }


def jobs() -> dict[str, Job]:
    """Name of the golden file -> its job."""
    made = {".".join(case): shipped(*case) for case in CASES}
    return made | {name: case_study(tier, compute) for name, tier, compute in CASE_STUDY}


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version that no release changes."""
    monkeypatch.setattr(renderer, "__version__", "0.0.0")


@pytest.mark.parametrize("name", [".".join(case) for case in CASES] + [name for name, *_ in CASE_STUDY])
def test_it_is_the_reviewed_request(name: str) -> None:
    job = jobs()[name]
    for suffix, text in golden_texts(job).items():
        assert text == (GOLDEN / f"{name}.{suffix}").read_text(), suffix
    assert render(job).to_json() == render(job).to_json()
    assert check_body(render(job).request) == []


@pytest.mark.parametrize(("recipe", "tier", "access"), CASES)
def test_a_shipped_recipe_is_accepted(recipe: str, tier: str, access: str) -> None:
    """T5's fixed-width embeddings make SD3 read more than one account of a region without raised limits gives."""
    findings = AzureBackend().lint(shipped(recipe, tier, access))
    errors = [finding.id for finding in findings if finding.level == "error"]
    assert errors == (["azure.egress"] if recipe == "sd3-medium" and access != "download" else [])


def test_the_case_study_is_accepted() -> None:
    for name, tier, compute in CASE_STUDY:
        findings = AzureBackend().lint(case_study(tier, compute))
        assert [finding for finding in findings if finding.level in ("error", "warning")] == [], name


def test_the_worker_is_the_only_launcher_and_the_first_process() -> None:
    for job in jobs().values():
        properties = render(job).request["properties"]
        assert properties["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
        assert properties["command"].count("exec python3 ") == 1
        assert "torchrun" not in properties["command"]


def test_every_value_of_the_environment_is_a_text_and_the_cache_is_bounded() -> None:
    for job in [*jobs().values(), make_job(*az(environment_variables={"A": True, "B": 3, "C": 0.5}))]:
        variables = render(job).request["properties"]["environmentVariables"]
        assert all(isinstance(value, str) for value in variables.values())
        assert int(variables["DATASET_MOUNT_CACHE_SIZE"]) > 0
    assert (variables["A"], variables["B"], variables["C"]) == ("true", "3", "0.5")


def test_infiniband_machines_get_ncclsettings_and_our_topology() -> None:
    rendered = render(shipped("sdxl-progressive", "on_demand", "mount"))
    variables = rendered.request["properties"]["environmentVariables"]
    assert variables["NCCL_IB_PCI_RELAXED_ORDERING"] == "1"
    assert variables["NCCL_SOCKET_IFNAME"] == variables["UCX_NET_DEVICES"] == "eth0"
    assert (variables["UCX_TLS"], variables["CUDA_DEVICE_ORDER"]) == ("tcp", "PCI_BUS_ID")
    command = rendered.request["properties"]["command"]
    assert command.startswith('export NCCL_TOPO_FILE="${{inputs.isthmus}}"/ndv4-topo.xml; exec python3 ')
    assert "NCCL_TOPO_FILE" not in variables, "Azure ML expands expressions in the command alone"
    devices = [
        entry.get("class") for entry in ET.fromstring(rendered.files["ndv4-topo.xml"]).iterfind(".//pci/pci")
    ]
    assert (devices.count("0x030200"), devices.count("0x020700")) == (8, 8)


def test_h100_has_infiniband_settings_without_a_topology_of_another_machine() -> None:
    rendered = render(make_job("compute.gpu=h100-80gb", recipe="sdxl-progressive"))
    assert rendered.request["properties"]["environmentVariables"]["NCCL_IB_PCI_RELAXED_ORDERING"] == "1"
    assert "NCCL_TOPO_FILE" not in rendered.request["properties"]["command"]
    assert "ndv4-topo.xml" not in rendered.files


def test_processors_get_no_nccl_settings() -> None:
    rendered = render(make_job())
    assert not [name for name in rendered.request["properties"]["environmentVariables"] if "NCCL" in name]


def test_serverless_names_the_machine_and_the_queue_and_no_compute() -> None:
    job = case_study("spot", "serverless")
    properties = render(job).request["properties"]
    assert "computeId" not in properties
    assert properties["resources"]["instanceType"] == "Standard_ND96amsr_A100_v4"
    assert properties["queueSettings"] == {"jobTier": "Spot"}
    assert properties["identity"] == {"identityType": "Managed", "clientId": IDENTITY}
    assert properties["environmentVariables"]["AZURE_CLIENT_ID"] == IDENTITY


@pytest.mark.parametrize(
    ("tier", "timeout", "expected"),
    [
        ("on_demand", None, "P21D"),
        ("spot", None, "P7D"),
        ("on_demand", "90 min", "PT1H30M"),
        ("spot", "1 s", "PT1S"),
    ],
)
def test_a_job_has_a_time_limit(tier: str, timeout: str | None, expected: str) -> None:
    job = make_job(*(az(timeout=timeout) if timeout else ()), offer=offer(tier))
    assert render(job).request["properties"]["limits"]["timeout"] == expected
    assert duration(seconds(expected)) == expected


def test_sources_are_inputs_and_the_job_knows_their_places() -> None:
    roots = [f"az://latents@account{n}.blob.core.windows.net/a" for n in range(3)]
    job = make_job(
        f"data.sources.0.uri={json.dumps(roots)}",
        "data.access=mount",
        f"model.init_from=az://weights@{ACCOUNT}/i",
    )
    rendered = render(job)
    assert list(rendered.request["properties"]["inputs"]) == [
        "isthmus",
        "data0",
        "data1",
        "data2",
        "val0",
        "init",
    ]
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.data.sources[0].uri == ["place:data0", "place:data1", "place:data2"]
    assert inside.validation.sources[0].uri == ["place:val0"]
    assert inside.model.init_from == "place:init"
    for name in ("data0", "val0", "init"):
        assert f'--place {name}="${{{{inputs.{name}}}}}"' in rendered.request["properties"]["command"]


def test_weights_of_the_hub_are_fetched_by_the_job_itself() -> None:
    place = f"hf://team/model@{'0' * 40}"
    job = make_job("data.access=mount", f"model.init_from={place}")
    rendered = render(job)
    assert "init" not in rendered.request["properties"]["inputs"]
    inside = parse_recipe(rendered.files["recipe.yaml"], filename="recipe.yaml").recipe
    assert inside.model.init_from == place
    assert not [finding for finding in AzureBackend().lint(job) if place in finding.message]


def test_a_download_is_a_mounts_path_to_the_job() -> None:
    job = make_job("data.access=download", "data.cache_limit=10 GB", "data.cache_directory=/local")
    inside = parse_recipe(render(job).files["recipe.yaml"], filename="recipe.yaml").recipe
    assert (inside.data.access, inside.data.cache_limit, inside.data.cache_directory) == ("mount", None, None)


NASTY = [
    "it's",
    'say "hi"',
    "$HOME `id` $(id) \\",
    "${{inputs.isthmus}}",
    "{inputs.data0}",
    "größe 猫 🐈",
    "a;b&c|d>e",
    "-x",
    "~",
    "*",
    "!1",
    "\t",
]


@pytest.mark.parametrize("text", NASTY)
def test_what_a_user_writes_is_one_argument_to_the_shell(text: str) -> None:
    word = quoted(f"x{text}")
    shell = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, text=True, check=True)
    assert shell.stdout == f"x{text}"
    assert "${{" not in word
    assert "{inputs." not in word, "the SDK turns that into ${{inputs.x}}"


def test_what_a_user_writes_survives_everywhere() -> None:
    path = 'it\'s "größe" $HOME ${{inputs.x}} 猫#?%'
    run = f"az://runs@{ACCOUNT}/{path}/r-1"
    job = make_job(
        f"data.sources.0.uri={json.dumps(f'az://latents@{ACCOUNT}/{path}')}",
        "data.access=mount",
        *az(tags={path: path}, environment_variables={"NOTE": "it's 猫 $HOME"}),
        run_uri=run,
        run_id="r-1",
    )
    rendered = render(job)
    properties = rendered.request["properties"]
    words = shlex.split(properties["command"].replace("${{inputs.", "@").replace("}}", "@"))
    assert words[words.index("--run") + 1].replace("@", "}}").endswith("猫#?%/r-1")
    assert properties["tags"]["isthmus-run-uri"] == run
    assert properties["inputs"]["data0"]["uri"].isascii()
    assert "'" not in properties["inputs"]["data0"]["uri"]
    assert check_body(rendered.request) == []
    assert json.loads(AzureBackend().document(rendered, "json")) == rendered.request


def test_no_secret_of_the_launchers_environment_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name, "hunter2-of-the-launcher")
    for job in jobs().values():
        assert "hunter2" not in render(job).to_json()


def test_the_same_image_is_the_same_environment_and_another_another() -> None:
    def environment(image: str) -> str:
        return str(render(make_job(*az(environment={"image": image}))).request["properties"]["environmentId"])

    assert environment(IMAGE) == environment(IMAGE)
    assert environment(IMAGE) != environment("other:1")


def test_a_build_folder_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")

    def rendered() -> Rendered:
        return render(make_job(*az(environment={"build": {"path": str(tmp_path)}})))

    first = rendered()
    assert first.request == rendered().request
    (tmp_path / "extra.txt").write_text("x")
    assert first.request["properties"]["environmentId"] != rendered().request["properties"]["environmentId"]
    (tmp_path / "Dockerfile").unlink()
    with pytest.raises(UsageError, match="no Dockerfile in it"):
        rendered()


def test_attempts_have_names_of_their_own() -> None:
    assert [render(make_job(attempt=n)).job_id for n in (1, 2)] == [
        "quickstart-20261130-4f2a-01",
        "quickstart-20261130-4f2a-02",
    ]


def test_it_renders_without_any_azure_package() -> None:
    code = (
        "import sys\n"
        "sys.modules.update({name: None for name in ('azure', 'torch', 'adlfs')})\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1] / 'helpers')!r})\n"
        "from azure_jobs import make_job\n"
        "from isthmus.backends.azure.backend import AzureBackend\n"
        "b = AzureBackend(); r = b.render(make_job(recipe='sdxl-progressive'))\n"
        "b.document(r, 'yaml'); b.lint(make_job()); b.offers(make_job()); print(r.job_id)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AZURE")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "sdxl-progressive-20261130-4f2a-01"


if __name__ == "__main__":
    renderer.__version__ = "0.0.0"
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for written, wanted in jobs().items():
        for ending, content in golden_texts(wanted).items():
            (GOLDEN / f"{written}.{ending}").write_text(content)
