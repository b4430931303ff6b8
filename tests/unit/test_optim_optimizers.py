"""Optimizers in one process: torch's own results, what decays, what a checkpoint of them holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from optim import WIDE, made, step
from torch import nn
from training import recipe_data

from isthmus.core.recipe import parse_recipe
from isthmus.core.recipe.schema import Checkpoint as CheckpointSettings
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.checkpoint import Checkpoints, flat_state
from isthmus.core.train.ema import EMA
from isthmus.core.train.optimizers import make_optimizer, reset_optimizer
from isthmus.core.train.parallel import Engine
from isthmus.core.train.weights import checksum, full
from isthmus.errors import RecipeError, UsageError

FAMILIES = ["dit", "unet", "mmdit"]


def matrices(engine: Engine) -> dict[str, nn.Parameter]:
    muon = {id(w) for group in engine.optimizer.param_groups if "momentum" in group for w in group["params"]}
    return {name: weight for name, weight in engine.parameters.items() if id(weight) in muon}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_muon_is_torchs_and_the_rest_is_adamw(strategy: str) -> None:
    engine = made(strategy=strategy, name="muon", weight_decay=0.1, momentum=0.9)
    theirs = {name: nn.Parameter(full(w.detach()).clone()) for name, w in engine.parameters.items()}
    chosen = set(matrices(engine))
    muon = torch.optim.Muon(
        [theirs[name] for name in engine.parameters if name in chosen],
        lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    rest = [weight for name, weight in theirs.items() if name not in chosen]
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1, foreach=True)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for weight in theirs.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
        muon.step()
        adamw.step()
        step(engine, number)
    for name, weight in engine.parameters.items():
        assert torch.equal(full(weight.detach()), theirs[name].detach()), name


@pytest.mark.parametrize("kernels", ["foreach", "fused"])
def test_kernels_of_adamw_do_the_same_to_shards_and_replicas(kernels: str) -> None:
    results = []
    for strategy in ("ddp", "fsdp"):
        engine = made(strategy=strategy, implementation=kernels, weight_decay=0.1)
        for number in range(3):
            step(engine, number)
        results.append({name: full(weight.detach()) for name, weight in engine.parameters.items()})
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_takes_the_matrices_of_blocks(family: str) -> None:
    chosen = matrices(made(family, name="muon"))
    assert chosen
    for name, weight in chosen.items():
        assert weight.dim() == 2, name
        assert any(word in name for word in ("transformer_blocks", "resnets")), name
        assert "embed" not in name.rsplit(".", 1)[-1], name
        assert "table" not in name, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_can_spare_biases_norms_and_embeddings(family: str, name: str) -> None:
    engine = made(family, name=name, weight_decay=0.1, weight_decay_on="matrices")
    names = {id(weight): found for found, weight in engine.parameters.items()}
    decayed = {
        names[id(w)] for g in engine.optimizer.param_groups if g["weight_decay"] > 0 for w in g["params"]
    }
    spared = set(engine.parameters) - decayed
    assert all(engine.parameters[found].dim() >= 2 for found in decayed)
    assert not any("table" in found for found in decayed)
    assert {found for found in engine.parameters if found.endswith("bias")} <= spared
    assert {g["weight_decay"] for g in made(family, name=name).optimizer.param_groups} == {0.01}


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_state_exists_before_the_first_step_and_reset_makes_it_anew(name: str) -> None:
    engine = made(name=name, weight_decay_on="matrices", config=WIDE)
    ema = EMA(engine.parameters)
    empty = checksum(flat_state(engine, ema))
    weights = {found: weight.detach().clone() for found, weight in engine.parameters.items()}
    step(engine, 1)
    with torch.no_grad():
        for found, weight in engine.parameters.items():
            weight.copy_(weights[found])
    assert checksum(flat_state(engine, ema)) != empty
    reset_optimizer(engine.optimizer)
    assert checksum(flat_state(engine, ema)) == empty


def test_a_model_without_blocks_has_nothing_for_muon() -> None:
    with pytest.raises(UsageError, match="muon is for the matrices of a model's blocks, and Linear has none"):
        make_optimizer(nn.Linear(3, 3), Optimizer(name="muon"), cpu=True)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("optimizer__name", "paged_adamw_8bit", "adamw_8bit is the one with moments of 8 bits"),
        ("parallel__precision", "fp8", "fp8 is not in this version"),
        ("optimizer__momentum", 0.9, "is of name muon; it is adamw"),
        ("parallel__activation_checkpointing", "some", "selective"),
    ],
)
def test_what_is_not_offered_is_refused_in_one_line(
    tmp_path: Path, field: str, value: Any, words: str
) -> None:
    import json

    with pytest.raises(RecipeError) as caught:
        parse_recipe(json.dumps(recipe_data(str(tmp_path), **{field: value})), filename="r")
    assert words in str(caught.value)
    assert field.replace("__", ".") in str(caught.value)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_a_checkpoint_holds_the_optimizers_state_for_any_strategy(tmp_path: Path, name: str) -> None:
    """Through the same calls that a run makes."""
    from isthmus.core.train import checkpoint as module
    from isthmus.storage.rundir import RunDirectory

    state_type, identity_type = module.TrainerState, module.Identity
    engine = made(name=name, config=WIDE)
    ema = EMA(engine.parameters)
    for number in (1, 2):
        step(engine, number)
    identity = identity_type("model", ("data",), 1)
    expected = checksum(flat_state(engine, ema))
    Checkpoints(RunDirectory(tmp_path), engine, ema, CheckpointSettings(), None).save(
        state_type(identity, step=2)
    )
    other = made(name=name, strategy="ddp", config=WIDE)
    other_ema = EMA(other.parameters)
    Checkpoints(RunDirectory(tmp_path), other, other_ema, CheckpointSettings(), None).load(identity)
    assert checksum(flat_state(other, other_ema)) == expected
