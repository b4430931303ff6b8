"""``isthmus data encode``: pictures and captions to a latent dataset."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from isthmus.core.encode.encode import Progress
    from isthmus.storage.shards import Manifest


_OVERRIDES = typer.Option(
    [], "--set", metavar="PATH=VALUE", help="Override a field of the recipe. May be repeated."
)


def register(data: typer.Typer) -> None:
    """Adds the command to the `data` group."""
    data.command("encode")(_encode)


def _encode(
    source: str = typer.Argument(
        help="A folder of pictures with captions, a .csv or .jsonl that lists some, or `emoji`."
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
    device: str = typer.Option("auto", "--device", help="Where the encoders run: auto, cpu, cuda, cuda:1."),
    precision: str = typer.Option("fp32", "--precision", help="Of the encoders: fp32 or bf16."),
    batch_size: int = typer.Option(32, "--batch-size", min=1, help="Pictures encoded together."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Encode captioned pictures into latents and text embeddings, for all stages of a recipe at once.

    Example: isthmus data encode ./pictures ./data --recipe my.yaml
    """
    from isthmus.cli.output import emit
    from isthmus.core.encode.encode import encode
    from isthmus.core.encode.sources import open_source
    from isthmus.core.recipe import load_recipe
    from isthmus.errors import UsageError

    if precision not in ("fp32", "bf16"):
        raise UsageError(f"--precision is fp32 or bf16, not {precision}")
    loaded = load_recipe(recipe, overrides)
    last: list[Progress] = []

    def show(progress: Progress) -> None:
        last[:] = [progress]
        # On standard error, so that --json stays one document.
        print(progress, file=sys.stderr, flush=True)

    manifest = encode(
        open_source(source),
        dest,
        loaded.recipe,
        captions=captions,
        device=device,
        bf16=precision == "bf16",
        batch_size=batch_size,
        progress=show,
    )
    result = {
        "dataset": dest,
        "samples": manifest.samples,
        "rejected": last[-1].rejected,
        "captions_left_out": last[-1].captions_left_out,
        "fingerprint": manifest.fingerprint,
        "rows": {
            bucket: {str(size): n for size, n in rows.items()} for bucket, rows in manifest.rows.items()
        },
        "bytes": manifest.size,
        "seconds": round(last[-1].seconds, 2),
    }
    options = [word for override in overrides for word in ("--set", override)]
    following = [
        "isthmus",
        "launch",
        recipe,
        "--backend",
        "local",
        *options,
        "--set",
        f"data.sources.0.uri={dest}",
    ]
    result["next"] = shlex.join(following)
    emit(result, as_json=as_json, text=lambda: _text(dest, manifest, last[-1], shlex.join(following)))


def _text(dest: str, manifest: Manifest, progress: Progress, following: str) -> str:
    lines = [f"wrote {manifest.samples} samples, {manifest.size / 1e6:.1f} MB, to {dest}"]
    for bucket, rows in manifest.rows.items():
        counts = ", ".join(f"{count} up to {size} px" for size, count in rows.items())
        lines.append(f"  {bucket:>7}  {counts}")
    if progress.rejected:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(progress.rejected.items()))
        lines.append(
            f"rejected {sum(progress.rejected.values())}: {counts}; listed in {dest}/_rejected.jsonl"
        )
    else:
        lines.append("rejected none")
    if progress.captions_left_out:
        lines.append(
            f"left out {progress.captions_left_out} captions; --captions stores more for each picture"
        )
    lines.append(f"fingerprint {manifest.fingerprint}")
    lines.append(f"next: {following}")
    return "\n".join(lines)
