"""Denoisers that installed packages announce, beside backends, through the same entry-point group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.core.models import denoisers
from isthmus.core.models.denoisers import announce, build_own, find, own_config, own_train_flops
from isthmus.core.models.families import block_classes, resolved_config
from isthmus.errors import PluginError, UsageError

PLUGIN = """
from isthmus.core.plugins import hookimpl
@hookimpl
def isthmus_denoisers(): return [("acme-dit", "acme:Acme")]
@hookimpl
def isthmus_backends(): return [("acme", "acme:Backend", None)]
"""
ACME = """
class Backend: pass
class Acme:
    def build(self, config, seed): ...
    def blocks(self, model): ...
    def predict(self, model, noisy, timestep, condition): ...
    def resolved_config(self, model): ...
"""
ASK = """
import sys
from isthmus.backends.registry import backend_names
from isthmus.core.models.denoisers import find
from isthmus.core.recipe import parse_recipe
from isthmus.errors import IsthmusError
import training, json
print(backend_names())
for name in sys.argv[1:]:
    try:
        print(type(find(name)).__name__)
        parse_recipe(json.dumps(training.recipe_data("x", model={"family": name})), filename="r")
    except IsthmusError as error:
        print(type(error).__name__, error)
"""


def ask(folder: Path, *names: str) -> tuple[list[str], str]:
    """Lines of a program that sees the plugins installed in `folder`, and its stderr."""
    helpers = Path(__file__).parents[1] / "helpers"
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{helpers}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def install(folder: Path, point: str, module: str, source: str) -> None:
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{point}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {point}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[isthmus]\n{point} = {module}\n")


def test_one_plugin_brings_a_backend_and_a_denoiser(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_plugin", PLUGIN)
    (tmp_path / "acme.py").write_text(ACME)
    (names, found, other), stderr = ask(tmp_path, "acme-dit", "acme-unet")
    assert names == "['acme', 'azure', 'local', 'sagemaker']"
    assert found == "Acme"
    assert other.startswith("UsageError model.family: no model family 'acme-unet' (isthmus has unet, dit,")
    assert other.endswith("announce acme-dit)")
    assert "warning" not in stderr


def test_a_broken_plugin_is_named_when_its_denoiser_is_missed(tmp_path: Path) -> None:
    install(tmp_path, "acme", "acme_plugin", "import nowhere\n")
    (names, found), stderr = ask(tmp_path, "acme-dit")
    assert names == "['azure', 'local', 'sagemaker']"
    assert "plugin acme is broken: ModuleNotFoundError: No module named 'nowhere'" in found
    assert "warning: plugin acme is broken" in stderr


class Cells(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.unlike = nn.Parameter(torch.zeros(2))


class Whole:
    """A denoiser that only lacks a forward pass."""

    def build(self, config: dict[str, int], seed: int) -> nn.Module:
        return Cells(**config)

    def blocks(self, model: nn.Module) -> list[type[nn.Module]]:
        return [nn.Linear]

    def predict(self, model: nn.Module, *given: torch.Tensor) -> torch.Tensor:
        return given[0]

    def resolved_config(self, model: nn.Module) -> dict[str, int]:
        return {"width": 4}


class Half(Whole):
    """Weights that cannot be trained here."""

    def build(self, config: dict[str, int], seed: int) -> nn.Module:
        return Cells(**config).half()


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CODE", "_LOADED"):
        monkeypatch.setattr(denoisers, name, {})
    monkeypatch.setitem(sys.modules, "own_module", sys.modules[__name__])
    announce([("whole", "own_module:Whole"), ("half", "own_module:Half")], "code")


def test_weights_come_from_the_seed_and_blocks_and_configuration_from_the_denoiser() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, same, other = (
        build_own("whole", {"width": 4}, 1),
        build_own("whole", {"width": 4}, 1),
        build_own("whole", {"width": 4}, 2),
    )
    assert torch.equal(torch.get_rng_state(), state)
    weights = [torch.cat([w.detach().flatten() for w in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert block_classes(one) == {nn.Linear}
    assert resolved_config(one) == own_config(one) == {"width": 4}
    assert own_train_flops("whole", {}, 4, 4, 8) is None


def test_what_is_wrong_is_said_with_class_and_method() -> None:
    with pytest.raises(
        PluginError, match=r"Half.build returned torch.float16 on cpu, expected float32 on the CPU"
    ):
        build_own("half", {"width": 4}, 0)
    with pytest.raises(
        PluginError, match=r"Whole.build failed: TypeError: .*unexpected keyword argument 'depth'"
    ):
        build_own("whole", {"depth": 4}, 0)
    with pytest.raises(UsageError, match=r"no model family 'hole'"):
        find("hole")
    with pytest.raises(PluginError, match=r"isthmus_denoisers gave \('one',\)"):
        announce([("one",)], "code")  # type: ignore[list-item]
