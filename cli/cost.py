"""``isthmus cost``: what a run will cost or has cost, and the estimator alone."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from isthmus.cli import cost_recipe, cost_run
from isthmus.cli.output import emit

DEFAULT = "recipe"
"""The command that `isthmus cost RECIPE` means. A recipe named as a command is reached as `isthmus cost recipe NAME`."""


class DefaultGroup(TyperGroup):
    """A group whose first word may also be an argument of its default command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the default command's name in front of what names none."""
        own = {"-h", "--help"}
        if args and args[0] not in self.commands and args[0] not in own and DEFAULT in self.commands:
            args = [DEFAULT, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = typer.Typer(
        cls=DefaultGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        help="What a run will cost, has cost, and how fast a model trains.\n\n"
        "A recipe may follow at once: `isthmus cost my.yaml --backend azure` is `isthmus cost recipe my.yaml --backend azure`.\n\n"
        "Example: isthmus cost my.yaml --backend azure",
    )
    group.command("recipe")(cost_recipe.recipe)
    group.command("run")(cost_run.run)
    group.command("throughput")(throughput)
    app.add_typer(group, name="cost")


def throughput(
    model: str = typer.Option(
        ..., "--model", help="A preset, such as sd2-base, sdxl, sd3-medium or flux-12b."
    ),
    gpu: str = typer.Option(..., "--gpu", help="Such as a100-80gb."),
    gpus: int = typer.Option(..., "--gpus", help="GPUs of all nodes."),
    gpus_per_node: int = typer.Option(8, "--gpus-per-node", help="GPUs of one node."),
    global_batch_size: int = typer.Option(..., "--global-batch-size", help="Images of one step."),
    resolution: int = typer.Option(..., "--resolution", help="Pixels along one side of a square image."),
    precision: str = typer.Option("bf16", "--precision", help="bf16, fp16 or fp32."),
    strategy: str | None = typer.Option(
        None, "--strategy", help="ddp, fsdp or hsdp; default ddp, or hsdp for large models."
    ),
    fabric: str | None = typer.Option(
        None, "--fabric", help="infiniband, efa or ethernet; default the GPU's usual one."
    ),
    checkpointing: bool = typer.Option(
        False, "--activation-checkpointing", help="Blocks are computed again in the backward pass."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Estimate how many images a second a model trains on, with the range that four of five runs fall in.

    Example: isthmus cost throughput --model sd2-base --gpu a100-80gb --gpus 64 --global-batch-size 2048 --resolution 512
    """
    from isthmus.cost.throughput import estimate_throughput

    found = estimate_throughput(
        model=model,
        gpu=gpu,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        global_batch_size=global_batch_size,
        resolution=resolution,
        precision=precision,
        strategy=strategy,
        fabric=fabric,
        activation_checkpointing=checkpointing,
    )
    low, high = found.interval80
    text = (
        f"{found.images_per_s:,.1f} images/s ({low:,.1f} to {high:,.1f} in four of five runs), "
        f"{found.images_per_s_per_gpu:.1f} a GPU, step {found.step_s * 1e3:,.1f} ms, MFU {found.mfu:.1%}\n{found.basis}"
    )
    emit(found.to_json(), as_json=as_json, text=text)
