"""One rank of torchrun's: what an engine communicates, and its moving average against double precision.

    python -m torch.distributed.run ... optim_rank.py STRATEGY...

Rank 0 prints one line of JSON for each strategy.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from training import MODELS

from isthmus.core.models.families import build_from_config
from isthmus.core.recipe.schema import Parallel
from isthmus.core.recipe.stages import EMA as EMASettings
from isthmus.core.recipe.stages import Optimizer
from isthmus.core.train.ema import EMA
from isthmus.core.train.parallel import Engine, prepare
from isthmus.core.train.weights import full


def made(strategy: str, **optimizer: Any) -> Engine:
    model = build_from_config("PixArtTransformer2DModel", MODELS["dit"], 0)
    size = {"shard_size": 2} if strategy == "hsdp" else {}
    settings = Parallel(strategy=strategy, precision="fp32", **size)  # type: ignore[arg-type]
    return prepare(model, Optimizer(**optimizer), settings, cpu=True)


def passes(engine: Engine, count: int) -> None:
    """Forward and backward passes of a step of `count` micro-batches."""
    generator = torch.Generator().manual_seed(engine.rank)
    for number in range(count):
        noisy = torch.randn(2, 4, 8, 8, generator=generator)
        tokens = torch.randn(2, 5, 24, generator=generator)
        with engine.accumulating(last=number == count - 1):
            output = engine.model(
                noisy,
                encoder_hidden_states=tokens,
                timestep=torch.full((2,), 500.0),
                added_cond_kwargs={"resolution": None, "aspect_ratio": None},
                return_dict=False,
            )[0]
            output.square().mean().backward()


def reductions(engine: Engine, count: int) -> dict[str, int]:
    """Reductions that a step of `count` micro-batches starts, by kind."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        passes(engine, count)
    names = Counter(event.name.lower() for event in recorded.events() if event.name.startswith("gloo:"))
    engine.optimizer.zero_grad()
    return {name: number for name, number in names.items() if "reduce" in name}


def drift(engine: Engine, steps: int = 40, decay: float = 0.97) -> float:
    """Largest difference of the average from a double-precision one, relative to the largest weight."""
    ema, settings = EMA(engine.parameters), EMASettings(decay=decay)
    reference = {name: full(w.detach()).double() for name, w in engine.parameters.items()}
    for step in range(1, steps + 1):
        passes(engine, 1)
        engine.clip(1.0)
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        ema.step(step, settings)
        kept = min(decay, (1 + step) / (10 + step))
        for name, weight in engine.parameters.items():
            reference[name] = kept * reference[name] + (1 - kept) * full(weight.detach()).double()
    worst = 0.0
    for name, expected in reference.items():
        found = full(ema.shadow[name]).double()
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    return worst


def muon(strategy: str, steps: int = 3) -> bool:
    """Whether Muon on shards does, bit for bit, what torch's does on whole matrices with the same gradients."""
    engine = made(strategy, name="muon")
    chosen = {
        id(weight)
        for group in engine.optimizer.param_groups
        if "momentum" in group
        for weight in group["params"]
    }
    ours = [weight for weight in engine.parameters.values() if id(weight) in chosen]
    theirs = [torch.nn.Parameter(full(weight.detach()).clone()) for weight in ours]
    reference = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(steps):
        passes(engine, 1)
        for weight, other in zip(ours, theirs, strict=True):
            assert weight.grad is not None
            other.grad = full(weight.grad).clone()
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-2
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        reference.step()
    return all(torch.equal(full(w.detach()), o.detach()) for w, o in zip(ours, theirs, strict=True))


for chosen in sys.argv[1:]:
    prepared = made(chosen)
    passes(prepared, 1)  # DDP lays out its buckets anew after the first pass
    facts: dict[str, Any] = {
        "strategy": chosen,
        "one": reductions(prepared, 1),
        "four": reductions(prepared, 4),
        "drift": drift(prepared) if chosen != "hsdp" else None,
        "muon": muon(chosen),
    }
    if prepared.rank == 0:
        print(json.dumps(facts), flush=True)
