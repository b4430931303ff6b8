"""A team's own denoiser: the example is launched and resumed; each way to get it wrong is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training import environment, recipe_data, rows, train, write_recipe

from isthmus.core.recipe import load_recipe, parse_recipe, resolve
from isthmus.core.sample.export import export
from isthmus.core.sample.load import load_run
from isthmus.core.train.loop import train as train_here
from isthmus.errors import IsthmusError, RecipeError
from isthmus.storage.rundir import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_denoiser"
CONFIG = {"in_channels": 4, "text_width": 24, "width": 32, "layers": 2, "heads": 2, "patch": 1}


class Desk:
    """A copy of the example and the isthmus command in it, on the tests' tiny data."""

    def __init__(self, folder: Path, data: str) -> None:
        self.folder = Path(
            shutil.copytree(EXAMPLE, folder / "example", ignore=shutil.ignore_patterns("__pycache__"))
        )
        self.environment = environment(XDG_STATE_HOME=str(folder / "state"))
        text = {"name": "minilm", "kind": "minilm", "source": "test", "max_tokens": 5, "width": 24}
        stage = {"resolution": 16, "steps": 3, "global_batch_size": 8, "micro_batch_size": 4}
        changes = {
            "model.config": CONFIG,
            "encoders.autoencoder.latent_channels": 4,
            "encoders.text": [text],
            "data.sources.0.uri": data,
            "data.shuffle_window": 16,
            **{f"stages.0.{name}": value for name, value in stage.items()},
            "stages.0.lr_warmup_steps": 0,
            "checkpoint.every": 1,
            "checkpoint.keep": 9,
            "validation": {},
        }
        self.changes = [
            part for path, value in changes.items() for part in ("--set", f"{path}={json.dumps(value)}")
        ]

    def isthmus(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        done = subprocess.run(
            [sys.executable, "-m", "isthmus", *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=170, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr

    def run(self, run_id: str) -> RunDirectory:
        """The run's directory."""
        return RunDirectory(self.folder / "runs" / run_id)


@pytest.fixture
def desk(tmp_path: Path, latents: dict[str, str]) -> Desk:
    return Desk(tmp_path, latents["dit"])


def test_the_examples_recipe_is_valid() -> None:
    recipe = load_recipe(EXAMPLE / "recipe.yaml").recipe
    assert (recipe.code, recipe.model.family) == ("./code", "small-dit")


@pytest.mark.long
def test_the_example_is_launched_and_resumed_with_its_own_code_or_another(desk: Desk) -> None:
    """Slow: two processes, four times."""
    launch = ("launch", "recipe.yaml", "--backend", "local", "--run-id", "one", *desk.changes)
    code, out, err = desk.isthmus(*launch)
    assert code == 0, out + err
    assert "note: code ./code: 2 files" in err
    run = desk.run("one")
    facts = run.read_run_json()["code"]
    assert f'code: "sha256:{facts["sha256"]}"' in run.read_recipe()
    assert (desk.folder / "runs/one/code" / f"{facts['sha256']}.zip").is_file()
    assert [row["step"] for row in rows(run.uri)] == [1, 2, 3]

    # The launcher's folder is not looked at again: here it would fail.
    source = desk.folder / "code" / "small_dit.py"
    source.write_text(source.read_text() + "\nraise RuntimeError('the launcher\\'s disk')\n")
    code, out, err = desk.isthmus(*launch)
    assert code == 2
    assert "is not the code that the run was begun with" in err
    assert "--set code=./code" in err

    code, out, err = desk.isthmus("resume", "one", "--set", "stages.0.steps=4")
    assert code == 0, out + err
    assert "warning: code ./code has changed; the run goes on with what it was begun with" in err
    assert run.read_run_json()["code"] == facts

    code, out, err = desk.isthmus("resume", "one", "--set", "stages.0.steps=5", "--set", "code=./code")
    assert code != 0
    line = "code: isthmus_plugin.py: small_dit:SmallDiT cannot be loaded: RuntimeError: the launcher's disk (small_dit.py:"
    assert line in out + err
    assert (out + err).count("cannot be loaded") <= 3  # the rank's line, the worker's and the launcher's

    source.write_text(source.read_text().replace("raise RuntimeError", "str"))
    code, out, err = desk.isthmus("resume", "one", "--set", "stages.0.steps=5", "--set", "code=./code")
    assert code == 0, out + err
    assert run.read_run_json()["code"]["sha256"] != facts["sha256"]
    changes = [event["changes"] for event in run.events("submitted") if "code" in event.get("changes", {})]
    assert changes[-1]["code"][1] == f"sha256:{run.read_run_json()['code']['sha256']}"


def own_recipe(data: str, code: Path, **changes: Any) -> dict[str, Any]:
    return recipe_data(
        data,
        **{
            "model": {"family": "small-dit", "config": CONFIG},
            "code": str(code),
            "stages__0__steps": 3,
            **changes,
        },
    )


def here(data: str, code: Path, place: Path, **changes: Any) -> None:
    given = {"parallel__strategy": "ddp", "compute__gpus_per_node": 1} | changes
    text = json.dumps(own_recipe(data, code, **given))
    train_here(resolve(parse_recipe(text, filename="r").recipe, "local"), RunDirectory(place), cpu=True)


def test_a_run_is_sampled_and_exported_with_its_own_code(latents: dict[str, str], tmp_path: Path) -> None:
    code = Path(shutil.copytree(EXAMPLE / "code", tmp_path / "code"))
    here(
        latents["dit"],
        code,
        tmp_path / "run",
        validation={"loss_by_timestep": True, "samples": 8, "every": 3},
    )
    shutil.rmtree(code)
    run = load_run(str(tmp_path / "run"), device="cpu")
    assert type(run.denoiser).__name__ == "Model"
    written = export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert written.pipeline is None
    assert sorted(path.name for path in (tmp_path / "out" / "denoiser").iterdir()) == [
        "code.zip", "config.json", "diffusion_pytorch_model.safetensors",
    ]  # fmt: skip
    # What was exported starts another run, of the same code.
    code = Path(shutil.copytree(EXAMPLE / "code", tmp_path / "code"))
    here(latents["dit"], code, tmp_path / "next", model__init_from=str(tmp_path / "out" / "denoiser"))
    scratch = tmp_path / "scratch"
    here(latents["dit"], code, scratch)
    assert rows(tmp_path / "next")[0]["loss"] != rows(scratch)[0]["loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "ddp", "precision": "bf16"},
        {"strategy": "fsdp", "precision": "bf16", "activation_checkpointing": True},
        {
            "strategy": "fsdp",
            "precision": "fp32",
            "compile": "aot_eager",
            "activation_checkpointing": "selective",
        },
    ],
    ids=["ddp", "fsdp-bf16", "fsdp-compiled"],
)
def test_it_trains_as_isthmuss_own_do(
    latents: dict[str, str], tmp_path: Path, parallel: dict[str, Any]
) -> None:
    """Slow: two processes."""
    here(
        latents["dit"], EXAMPLE / "code", tmp_path / "one", parallel={"strategy": "ddp", "precision": "fp32"}
    )
    recipe = write_recipe(tmp_path, own_recipe(latents["dit"], EXAMPLE / "code", parallel=parallel))
    done = train(recipe, tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    close = 0.05 if parallel["precision"] == "bf16" else 2e-5
    for one, other in zip(rows(tmp_path / "run"), rows(tmp_path / "one"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=close)


def test_a_checkpoint_of_another_configuration_and_changed_code_are_refused(
    latents: dict[str, str], tmp_path: Path
) -> None:
    code = Path(shutil.copytree(EXAMPLE / "code", tmp_path / "code"))
    here(latents["dit"], code, tmp_path / "run")
    with pytest.raises(IsthmusError, match="model"):
        here(latents["dit"], code, tmp_path / "run", stages__0__steps=4, model__config=CONFIG | {"layers": 3})
    (code / "small_dit.py").write_text((code / "small_dit.py").read_text() + "# changed\n")
    with pytest.raises(
        IsthmusError, match=r"is not the code that the run was begun with \([0-9a-f]{12}, now"
    ):
        here(latents["dit"], code, tmp_path / "run", stages__0__steps=4)


BROKEN = [
    ("def build(", "def built(", "code: isthmus_plugin.py: small_dit:SmallDiT lacks build (a denoiser has build, blocks"),
    ("small_dit:SmallDiT", "small_dit:Other", "small_dit:Other cannot be loaded: AttributeError"),
    ("small_dit:SmallDiT", "elsewhere:Other", "elsewhere:Other cannot be loaded: ModuleNotFoundError: No module named 'elsewhere'"),
    ('"small-dit"', '"other-dit"', "model.family: no model family 'small-dit'"),
    ('"small-dit"', '"dit"', "code: isthmus_plugin.py: dit is a family of isthmus"),
    ('return [("small-dit", "small_dit:SmallDiT")]', "return []", "code: isthmus_plugin.py: announces no denoiser"),
    ('return [("small-dit", "small_dit:SmallDiT")]', "return 1 / 0", "code: isthmus_plugin.py: failed: ZeroDivisionError: division by zero (isthmus_plugin.py:"),
    ("import torch\n", "import torc\n", "cannot be loaded: ModuleNotFoundError: No module named 'torc' (small_dit.py:"),
    ("return Model(**", "return dict(**", "small_dit.py: SmallDiT.build returned a dict, expected a torch.nn.Module"),
    ("return [Block]", "return [int]", "small_dit.py: SmallDiT.blocks returned [<class 'int'>], expected classes"),
    ("return prediction", "return prediction[:, :3]", "small_dit.py: SmallDiT.predict returned [4, 3, 4, 8], expected [4, 4, 4, 8]"),
    ("return prediction", "return None", "small_dit.py: SmallDiT.predict returned None, expected a tensor"),
    ("condition.tokens, condition.mask)", "condition.tokens)", "small_dit.py: SmallDiT.predict failed: TypeError"),
    ("torch.cat([mask, mask", "torch.cat([mask[:1], mask", "small_dit.py: SmallDiT.predict failed: RuntimeError"),
    ('conditioning = "dit"', 'conditioning = "none"', "small_dit:SmallDiT.conditioning is 'none' (one of unet, dit"),
    ("return {\n            \"in_channels\"", "return [] or {1} or {\n            \"in_channels\"", "small_dit.py: SmallDiT.resolved_config returned a set, expected a dict"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "says"), BROKEN, ids=[f"{b[:20]}->{a[:20]}" for b, a, _ in BROKEN]
)
def test_a_broken_one_is_one_clear_line(
    latents: dict[str, str], tmp_path: Path, before: str, after: str, says: str
) -> None:
    code = Path(shutil.copytree(EXAMPLE / "code", tmp_path / "code"))
    changed = 0
    for path in code.glob("*.py"):
        text = path.read_text()
        changed += before in text
        path.write_text(text.replace(before, after))
    assert changed
    with pytest.raises(IsthmusError) as caught:
        here(latents["dit"], code, tmp_path / "run")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.long
def test_two_ranks_say_it_once(latents: dict[str, str], tmp_path: Path) -> None:
    """Slow: two processes, twice. A wrong shape, and weights that differ between ranks."""
    for before, after, says in (
        ("return prediction", "return prediction[:, :3]", "SmallDiT.predict returned [4, 3, 4, 8], expected [4, 4, 4, 8]"),
        ("return Model(**", "torch.manual_seed(__import__('os').getpid()); return Model(**", "build gave rank 1 other weights than rank 0"),
    ):  # fmt: skip
        code = Path(shutil.copytree(EXAMPLE / "code", tmp_path / says[:8]))
        source = code / "small_dit.py"
        source.write_text(source.read_text().replace(before, after))
        done = train(
            write_recipe(code.parent, own_recipe(latents["dit"], code)), tmp_path / f"run-{says[:8]}"
        )
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
        assert len(lines) == 1
        assert says in lines[0]


def test_code_that_was_swapped_in_the_store_is_not_run(latents: dict[str, str], tmp_path: Path) -> None:
    here(latents["dit"], EXAMPLE / "code", tmp_path / "run")
    (package,) = (tmp_path / "run" / "code").iterdir()
    data = bytearray(package.read_bytes())
    data[200] ^= 1
    package.write_bytes(data)
    probe = f"from isthmus.core.sample.load import load_run; load_run({str(tmp_path / 'run')!r})"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=os.environ, check=False
    )
    assert "is not what the run was begun with" in done.stderr


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model__family": "mmditt"}, "there is no family `mmditt` (did you mean `mmdit`?)"),
        ({"model__family": "small-cnn"}, "there is no family `small-cnn` (unet, dit, mmdit, sana, flux, or one of your own"),
        ({"code": "./mine"}, "is of a model.family of your own; dit is one of isthmus's"),
        ({"model": {"family": "my-own", "preset": "sdxl"}, "code": "./mine"}, "presets are of isthmus's families"),
        ({"model": {"family": "my-own"}, "code": "./mine", "stages__0__token_mask_ratio": 0.5}, "a team's own leaves tokens out by itself"),
        ({"model__guidance_embedding": 3.0}, "is of a flux with guidance_embeds"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_mean_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(json.dumps(recipe_data("x", **changes)), filename="r")
    assert says in str(caught.value)
