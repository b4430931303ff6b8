"""``isthmus data encode``: pictures and captions to a latent dataset."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from isthmus.core.encode.job import Progress
    from isthmus.storage.shards import Manifest


_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field of the recipe. May be repeated."
)


def register(data: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    data.command("encode")(_encode)


def _encode(
    source: str = typer.Argument(
        help="A folder or URI of pictures, WebDataset tars, parquet or a Hugging Face dataset; a .csv or .jsonl "
        "that lists pictures; https://host/{000..199}.tar; or `emoji`."
    ),
    dest: str = typer.Argument(help="Where the dataset is written: a folder or URI without one."),
    recipe: str = typer.Option(
        ..., "--recipe", help="A recipe file or a shipped recipe's name; says encoders, sizes and prompts."
    ),
    overrides: list[str] = _OVERRIDES,
    captions: int | None = typer.Option(
        None,
        "--captions",
        min=1,
        max=64,
        help="Captions stored for each picture; default the most it has, up to 5.",
    ),
    device: str = typer.Option(
        "auto",
        "--device",
        help="Where the encoders run: auto, cpu, cuda, cuda:1; in a job each rank has its GPU.",
    ),
    precision: str = typer.Option("fp32", "--precision", help="Of the encoders: fp32 or bf16."),
    batch_size: int = typer.Option(32, "--batch-size", min=1, help="Pictures encoded together."),
    threads: int | None = typer.Option(
        None,
        "--threads",
        min=1,
        max=256,
        help="That decode ahead of the encoders; default all cores but one with a GPU, half of them without.",
    ),
    rank: int | None = typer.Option(
        None, "--rank", min=0, envvar="RANK", help="This process, of --ranks; default $RANK."
    ),
    ranks: int = typer.Option(
        1,
        "--ranks",
        min=1,
        envvar="WORLD_SIZE",
        help="Processes that share the work; without --rank all of them are started here. Default $WORLD_SIZE.",
    ),
    unit: str | None = typer.Option(
        None, "--unit", metavar="SIZE", help="Source bytes of a work unit, such as 500MB; default 2GB."
    ),
    restart: bool = typer.Option(
        False,
        "--restart",
        help="Forget an encoding that was begun here with other settings or another source.",
    ),
    backend: str = typer.Option(
        "",
        "--backend",
        metavar="NAME[,NAME...]",
        help="As a job, one process a GPU: local, azure, sagemaker, ... and where to go next. Default: in this process.",
    ),
    access: str = typer.Option(
        "",
        "--access",
        metavar="stream|mount|download",
        help="How a cloud's job reads SOURCE: by requests, or as a folder mounted or copied to each node; default stream.",
    ),
    nodes: int | None = typer.Option(
        None, "--nodes", min=1, help="Machines of a job; default compute.nodes."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Print the job's native request and what is wrong with it; no network."
    ),
    format: str = typer.Option("text", "--format", metavar="json|yaml|text", help="Of a dry run."),
    detach: bool = typer.Option(False, "--detach", help="Return at once; the job goes on."),
    follow: bool = typer.Option(
        False, "--follow", help="Stay with a job that goes on by itself: its log, and `isthmus supervise`."
    ),
    run_id: str = typer.Option("", "--run-id", metavar="ID", help="Name the job's run; a known one goes on."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask, even when there are warnings."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Encode captioned pictures into latents and text embeddings, for all stages of a recipe at once.

    With --backend, or with --ranks and no --rank, it runs as a job with a run directory: `isthmus status`, `logs`, `stop`,
    `resume` and `supervise` know it, and its exit codes are those of `launch`.

    Example: isthmus data encode s3://bucket/tars s3://bucket/latents --recipe my.yaml --backend sagemaker --follow
    """
    from isthmus.cli.output import emit
    from isthmus.core.recipe import load_recipe
    from isthmus.core.recipe.encoding import UNIT_BYTES
    from isthmus.core.recipe.units import parse_size
    from isthmus.errors import UsageError

    if precision not in ("fp32", "bf16"):
        raise UsageError(f"--precision is fp32 or bf16, not {precision}")
    try:
        unit_bytes = UNIT_BYTES if unit is None else parse_size(unit)
    except ValueError as error:
        raise UsageError(f"--unit {unit}: {error}") from None
    as_job = bool(backend) or (ranks > 1 and rank is None)
    jobs_own = {
        "--nodes": nodes, "--dry-run": dry_run, "--detach": detach, "--follow": follow, "--run-id": run_id,
        "--yes": yes, "--format": format != "text", "--access": access,
    }  # fmt: skip
    if not as_job and (given := [name for name, value in jobs_own.items() if value]):
        raise UsageError(f"{given[0]} is of a job", hint="name where it runs: --backend local")
    if as_job:
        from isthmus.cli.encode_job import job_recipe, run_job

        here = backend in ("", "local")
        not_of_jobs = {
            "--restart": (restart, "remove the folder _encode at DEST"),
            "--device": (device != "auto", "each rank takes its own GPU"),
            "--rank": (rank is not None, "a job numbers its ranks itself"),
            "--nodes": (here and nodes not in (None, 1), "this machine is one node"),
            "--ranks": (not here and ranks > 1, "--nodes, or --set compute.gpus_per_node=N"),
        }
        for name, (given_it, hint) in not_of_jobs.items():
            if given_it:
                raise UsageError(f"{name} does not go with a job on {backend or 'local'}", hint=hint)
        section = {
            "source": source, "dest": dest, "captions": captions, "precision": precision,
            "batch_size": batch_size, "threads": threads, "unit": unit_bytes, "access": access or None,
        }  # fmt: skip
        written = {name: value for name, value in section.items() if value is not None}
        run_job(
            job_recipe(recipe, overrides, written, nodes=nodes, here=ranks if here else None),
            backend or "local", run_id=run_id, dry_run=dry_run, format=format, detach=detach, follow=follow,
            yes=yes, as_json=as_json,
        )  # fmt: skip
        return
    from isthmus.core.encode.encode import Progress, encode_share
    from isthmus.core.encode.sources import open_source

    loaded = load_recipe(recipe, overrides)
    last: list[Progress] = []

    def show(progress: Progress) -> None:
        last[:] = [progress]
        # On standard error, so that --json stays one document.
        print(progress, file=sys.stderr, flush=True)

    manifest = encode_share(
        open_source(source, loaded.recipe.data.pictures),
        dest,
        loaded.recipe,
        captions=captions,
        device=device,
        bf16=precision == "bf16",
        batch_size=batch_size,
        rank=rank or 0,
        ranks=ranks,
        restart=restart,
        threads=threads,
        unit_bytes=unit_bytes,
        progress=show,
    )
    if not last:
        last.append(Progress(written=manifest.samples if manifest else 0))
    if manifest is None:
        share = {"dataset": None, "rank": rank or 0, "ranks": ranks, "written": last[-1].written}
        emit(share, as_json=as_json, text=lambda: f"rank {rank or 0} is done; other ranks are still at work")
        return
    told = last[-1].rejected
    filtered = {reason: n for reason, n in sorted(told.items()) if reason.startswith("filter-")}
    rejected = {reason: n for reason, n in told.items() if reason not in filtered}
    result = {
        "dataset": dest,
        "samples": manifest.samples,
        "rejected": rejected,
        "filtered": filtered,
        "captions_left_out": last[-1].captions_left_out,
        "fields": {
            name: {"told": count, "unfit": last[-1].unfit.get(name, 0)}
            for name, count in last[-1].told.items()
        },
        "fingerprint": manifest.fingerprint,
        "rows": {
            bucket: {str(size): n for size, n in rows.items()} for bucket, rows in manifest.rows.items()
        },
        "bytes": manifest.size,
        "seconds": round(last[-1].seconds, 2),
    }
    changes = dict.fromkeys(
        (
            *(one for one in overrides if not one.startswith("data.sources.0.uri=")),
            f"data.sources.0.uri={dest}",
        )
    )
    options = [word for override in changes for word in ("--set", override)]
    following = [
        "isthmus",
        "launch",
        recipe,
        "--backend",
        "local",
        *options,
    ]
    result["next"] = shlex.join(following)
    emit(result, as_json=as_json, text=lambda: _text(dest, manifest, last[-1], shlex.join(following)))


def _text(dest: str, manifest: Manifest, progress: Progress, following: str) -> str:
    lines = [f"wrote {manifest.samples} samples, {manifest.size / 1e6:.1f} MB, to {dest}"]
    for bucket, rows in manifest.rows.items():
        counts = ", ".join(f"{count} up to {size} px" for size, count in rows.items())
        lines.append(f"  {bucket:>7}  {counts}")
    wished = {reason: n for reason, n in sorted(progress.rejected.items()) if reason.startswith("filter-")}
    rejected = {reason: n for reason, n in sorted(progress.rejected.items()) if reason not in wished}
    if rejected:
        counts = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
        lines.append(f"rejected {sum(rejected.values())}: {counts}; listed in {dest}/_rejected.jsonl")
    else:
        lines.append("rejected none")
    if wished:
        counts = ", ".join(f"{count} {reason}" for reason, count in wished.items())
        lines.append(f"left out by the recipe's filters {sum(wished.values())}: {counts}")
    if progress.captions_left_out:
        lines.append(
            f"left out {progress.captions_left_out} captions; --captions stores more for each picture"
        )
    lines += progress.fields_in_words()
    lines.append(f"fingerprint {manifest.fingerprint}")
    lines.append(f"next: {following}")
    return "\n".join(lines)
