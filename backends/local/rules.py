"""The rules of this machine."""

from __future__ import annotations

from isthmus.backends.rules import Rule

NODES = Rule(
    id="local.nodes",
    level="error",
    title="more nodes than one",
    why="This machine is one node; a recipe for many is tried here with one.",
    fix="--set compute.nodes=1",
    exit_code=2,
)
PRICE = Rule(
    id="local.price",
    level="error",
    title="`budget.max_usd` without a price of this machine",
    why="What an hour here costs nobody but its owner knows, so the cap could not be kept.",
    fix="--set backends.local.usd_per_hour=0.5, or use budget.max_hours",
    exit_code=2,
)
CORES = Rule(
    id="local.cores",
    level="warning",
    title="more processes than cores",
    why="Without a GPU each process computes on cores; where they share them all wait for the slowest.",
    fix="--set compute.gpus_per_node=<cores>",
)
GPUS = Rule(
    id="local.gpus",
    level="error",
    title="more GPUs than this machine has",
    why="Each rank takes a CUDA device of its own; a rank without one ends at once.",
    fix="--set compute.gpu=none --set compute.gpus_per_node=2 trains on CPU",
    exit_code=2,
)
TORCH = Rule(
    id="local.torch",
    level="error",
    title="training is not installed",
    why="The launcher needs no torch, but here it trains as well.",
    fix="pip install 'isthmus[train]'",
    exit_code=2,
)
INIT_FROM = Rule(
    id="local.init-from",
    level="error",
    title="`model.init_from` names no folder",
    why="The first weights are read from it; what is in it, the trainer looks at.",
    fix="a folder or URI of a diffusers checkpoint",
    exit_code=2,
)
DATA = Rule(
    id="local.data",
    level="error",
    title="no latent dataset, or one that does not fit the recipe",
    why="Read before anything starts: the manifest, the encoders it was made with, the latents of each stage's resolution, "
    "and the memory that the sample order needs on each rank.",
    fix="encode one with `isthmus data encode`, or correct data.sources",
    exit_code=2,
)
RUN_DIRECTORY = Rule(
    id="local.run-directory",
    level="error",
    title="a run directory that cannot be written, or holds a run of another recipe",
    why="All that is known of a run is in it; two recipes in one would make one run of two.",
    fix="another run_directory or --run-id",
)
DISK = Rule(
    id="local.disk",
    level="error",
    title="too little room for the checkpoints",
    why="`checkpoint.keep` of them are there at once, and one more while it is written: 16 bytes a parameter each.",
    fix="lower checkpoint.keep, or choose another run_directory",
)
RULES = (NODES, PRICE, CORES, GPUS, TORCH, INIT_FROM, DATA, RUN_DIRECTORY, DISK)
