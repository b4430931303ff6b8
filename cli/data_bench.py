"""``isthmus data bench``: how fast a place delivers batches, at which depth, and whether that is the pace of a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.storage.stream.bench import Measurement

_ROOTS = typer.Argument(
    [], metavar="[URI]...", help="A dataset's roots; with --recipe they take the place of its sources."
)
_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field of the recipe. May be repeated."
)


def register(group: typer.Typer) -> None:
    """Add the command to `isthmus data`."""
    group.command("bench")(bench)


def bench(
    roots: list[str] = _ROOTS,
    recipe: str = typer.Option("", "--recipe", help="Read in this recipe's order, batch, memory and checks."),
    stage: int = typer.Option(0, "--stage", help="With a recipe: the stage's number, 0 for the first."),
    access: str = typer.Option(
        "", "--access", help="stream, mount or download; default: the recipe's, or stream."
    ),
    resolution: int = typer.Option(
        0, "--resolution", help="Without a recipe; default: the dataset's largest."
    ),
    batch_size: int = typer.Option(64, "--batch-size", help="Samples of a rank's batch, without a recipe."),
    lanes: int = typer.Option(8, "--lanes", help="Lanes of a rank, without a recipe."),
    window: int = typer.Option(
        1024, "--window", help="Shuffle window of a rank in samples, without a recipe."
    ),
    memory_limit: str = typer.Option("4 GB", "--memory-limit", help="Without a recipe."),
    seconds: float = typer.Option(5.0, "--seconds", help="For each depth, after its first batch."),
    depth: str = typer.Option("1,2,4,8,16,32,auto", "--depth", help="Reads in flight, one run each."),
    ranks: int = typer.Option(
        1, "--ranks", min=1, help="Then so many ranks at once, a process each, as many as there are cores."
    ),
    region: str = typer.Option(
        "", "--region", help="Of the Azure storage accounts, whose egress differs; default: the recipe's."
    ),
    backend: str = typer.Option("local", "--backend", help="Whose places of the recipe to read."),
    overrides: list[str] = _OVERRIDES,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Measure MB/s, samples/s, latency and processor time of a rank's reading, for each number of reads in flight.

    With --ranks several read together. With --recipe the last line says whether its GPUs are fed at full speed, or what
    starves them. What was read before may come from a cache of the store or of this machine: a first run tells more.

    Example: isthmus data bench s3://bucket/latents --recipe my.yaml --ranks 8
    """
    from isthmus.cli.data_bench_ranks import Task, run_ranks
    from isthmus.cli.data_bench_setup import setup_of
    from isthmus.cli.data_bench_verdict import feeding, read_again, together
    from isthmus.storage.filesystems import is_local
    from isthmus.storage.stream.bench import as_json as row
    from isthmus.storage.stream.bench import sweep, verdict
    from isthmus.storage.stream.depth import usable_cores

    depths = _depths(depth)
    task = Task(
        recipe=recipe,
        overrides=overrides,
        backend=backend,
        roots=roots,
        stage=stage,
        access=access,
        resolution=resolution,
        batch_size=batch_size,
        lanes=lanes,
        window=window,
        memory_limit=memory_limit,
        ranks=ranks,
        depth=None,
        seconds=seconds,
        start_step=0,
    )
    setup = setup_of(task)
    if not as_json:
        print(f"{setup.describe()}\n{_HEAD}", flush=True)
    measured = []
    for one in sweep(setup.make_loader, depths, seconds):
        measured.append(one)
        if not as_json:
            print(_line(one), flush=True)
    local = all(is_local(root) for dataset in setup.datasets for root in dataset.roots)
    found = verdict(measured, local=local)
    several: list[dict[str, object]] = []
    if ranks > 1:
        reads = None if None in depths else found["best_depth"]
        task = replace(task, depth=reads, start_step=measured[-1].next_step)
        several = run_ranks(task, min(ranks, usable_cores()))
    best = max(measured, key=lambda one: one.samples_per_s)
    fed = feeding(setup, found | {"best": row(best)}, several, region or None)
    all_ranks = together(several, ranks) if several else None
    factor, why = read_again(best, setup.row_bytes)
    sentences = [found["sentence"], *([why] if why else [])]
    if all_ranks:
        sentences.append(_ranks_line(all_ranks))
    if fed:
        sentences.append(fed["sentence"])
    elif setup.recipe is not None:
        gpu = setup.recipe.compute.gpu
        why = "it names no GPU" if gpu == "none" else "the figures of its model are not known"
        sentences.append(f"No verdict on the recipe: {why}.")
    result = {**setup.facts(), "depths": [row(one) for one in measured], **found}
    result |= {
        "bytes_read_per_byte": factor,
        "ranks": all_ranks,
        "verdict": fed,
        "sentence": "\n".join(sentences),
    }
    emit(result, as_json=as_json, text=result["sentence"])


def _ranks_line(found: dict[str, Any]) -> str:
    asked = "" if found["processes"] == found["asked"] else f" of {found['asked']}, one a core,"
    return (
        f"{found['processes']} ranks{asked} together: {found['megabytes_per_s']:,.0f} MB/s and"
        f" {found['samples_per_s']:,.0f} samples/s, the slowest {found['slowest_samples_per_s']:,.0f};"
        f" p50 {1000 * found['latency_s']['p50']:.3g} ms, p99 {1000 * found['latency_s']['p99']:.3g} ms;"
        f" {found['retries']} retries."
    )


_COLUMNS = (
    ("depth", 9), ("MB/s", 8), ("samples/s", 10), ("p50 ms", 8), ("p90 ms", 8), ("p99 ms", 8), ("CPU s/GB", 9),
    ("cores", 6), ("first batch s", 14), ("retries", 8),
)  # fmt: skip
_HEAD = "".join(f"{name:>{width}}" for name, width in _COLUMNS)


def _line(one: Measurement) -> str:
    depth = f"auto: {one.depth_reached}" if one.depth is None else str(one.depth)
    latency = [f"{1000 * one.latency_s[name]:.3g}" for name in ("p50", "p90", "p99")]
    cells = [
        depth,
        f"{one.megabytes_per_s:,.0f}",
        f"{one.samples_per_s:,.0f}",
        *latency,
        "" if one.cpu_s_per_gb is None else f"{one.cpu_s_per_gb:.2f}",
        f"{one.cores_busy:.2f}",
        f"{one.first_batch_s:.2f}",
        str(one.retries),
    ]
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def _depths(text: str) -> list[int | None]:
    from isthmus.errors import UsageError

    found: list[int | None] = []
    for part in text.split(","):
        word = part.strip()
        if word == "auto":
            found.append(None)
        elif word.isdigit() and 0 < int(word) <= 256:
            found.append(int(word))
        else:
            raise UsageError(
                f"--depth {text}: {word!r} is neither a number from 1 to 256 nor auto", hint="1,4,16,auto"
            )
    return found
