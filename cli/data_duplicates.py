"""``isthmus data duplicates``: pictures that a dataset holds more than once, or nearly so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from isthmus.core.encode.autoencoders import Autoencoder
    from isthmus.core.encode.duplicates import Duplicates, Member
    from isthmus.core.encode.hashes import Hashes
    from isthmus.storage.shards import Dataset

_ROOTS = typer.Argument(help="A dataset's folder or URI; its roots, when its shards are spread over several.")
_FONTS = typer.Option([], "--font", metavar="FILE", help="Of the sheet, asked first. May be repeated.")
_SHOWN = 10
_ON_SHEET = 4
"""Members of a group, of up to `_SHOWN` groups."""


def register(group: typer.Typer) -> None:
    """Add the command to `isthmus data`."""
    group.command("duplicates")(duplicates)


def duplicates(
    roots: list[str] = _ROOTS,
    distance: int = typer.Option(
        4, "--distance", help="Bits of 64 that the hashes of two may differ by, 0 to 8."
    ),
    decode: bool = typer.Option(
        False, "--decode", help="Decode every latent, instead of a few to learn what their channels show."
    ),
    latents: bool = typer.Option(
        False, "--latents", help="Look at the latents, even where encoding kept hashes of the pictures."
    ),
    out: str = typer.Option("", "--out", metavar="FILE.jsonl", help="Write every group, one a line."),
    sheet: str = typer.Option(
        "",
        "--sheet",
        metavar="FILE.png",
        help="Decode some of the largest groups and write them as pictures.",
    ),
    fonts: list[str] = _FONTS,
    resolution: int | None = typer.Option(
        None, "--resolution", help="That is looked at; default: the smallest."
    ),
    recipe: str = typer.Option("", "--recipe", help="Whose autoencoder; a patch_pca lies beside the data."),
    autoencoder: str = typer.Option(
        "", "--autoencoder", help="A folder, URI or hub name; instead of a recipe."
    ),
    device: str = typer.Option("auto", "--device", help="Where it decodes: auto, cpu, cuda."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document."),
) -> None:
    """Find pictures that look alike, by the hashes that encoding kept, or else of what the latents show. Nothing is changed.

    Example: isthmus data duplicates ./data --out duplicates.jsonl
    """
    import json
    import time
    from dataclasses import asdict

    from isthmus.cli.data_looking import autoencoder_source, write_file
    from isthmus.core.encode.kept_hashes import kept_hashes
    from isthmus.core.encode.looking import open_autoencoder, resolution_of
    from isthmus.errors import UsageError
    from isthmus.storage.shards import open_dataset

    if sheet and not sheet.lower().endswith(".png"):
        raise UsageError("a sheet is a PNG", where=sheet, hint="--sheet sheet.png")
    if fonts and not sheet:
        raise UsageError("--font is of a sheet", hint="add --sheet FILE.png")
    dataset = open_dataset(roots)
    pixels = resolution_of(dataset, resolution, smallest=True)
    from isthmus.core.encode.duplicates import find_duplicates

    began = last = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            print(f"{done:,} of {of:,} pictures, {done / (last - began):,.0f}/s", file=sys.stderr, flush=True)

    if decode or latents:
        kept: Hashes | str = "--decode" if decode else "--latents"
    elif pixels != resolution_of(dataset, None, smallest=True):
        kept = f"those that were kept are not of {pixels} px"
    else:
        kept = kept_hashes(dataset, tell)
    hashes, why = (None, kept) if isinstance(kept, str) else (kept, "")
    decoder = None
    if hashes is None or sheet:
        decoder = open_autoencoder(dataset, autoencoder_source(recipe, autoencoder), device=device)
    found = find_duplicates(
        dataset, decoder, resolution=pixels, distance=distance, whole=decode, kept=hashes, progress=tell
    )
    if out:
        lines = [
            json.dumps({"group": number, "rows": [asdict(row) for row in rows]}, ensure_ascii=False)
            for number, rows in enumerate(found.members(dataset, found.groups))
        ]
        write_file(out, "".join(f"{line}\n" for line in lines).encode())
    shown = list(found.members(dataset, found.groups[:_SHOWN]))
    drawn = None
    if sheet and shown and decoder is not None:
        drawn = _draw(dataset, decoder, found, shown, sheet, fonts)
    result = {
        "uri": dataset.uri,
        "fingerprint": dataset.fingerprint,
        "samples": found.samples,
        "resolution": pixels,
        "distance": distance,
        "hashes": "latents" if hashes is None else "kept",
        "why_latents": why or None,
        "explained": found.explained,
        "groups": len(found.groups),
        "rows": found.surplus + len(found.groups),
        "surplus": found.surplus,
        "largest": [[asdict(row) for row in rows] for rows in shown],
        "file": out or None,
        "sheet": drawn,
    }
    emit(result, as_json=as_json, text=lambda: _describe(result, found, shown))


def _draw(
    dataset: Dataset,
    decoder: Autoencoder,
    found: Duplicates,
    shown: list[list[Member]],
    target: str,
    fonts: list[str],
) -> str:
    """Writes the sheet. Returns its name."""
    from dataclasses import replace

    from isthmus.cli.data_looking import write_file
    from isthmus.core.encode.looking import look_at
    from isthmus.core.encode.sheet import as_png, contact_sheet

    looks = []
    for number, (group, rows) in enumerate(zip(found.groups, shown, strict=False)):
        places = [found.place(int(position)) for position in group[:_ON_SHEET]]
        for look, row in zip(look_at(dataset, decoder, places, found.resolution), rows, strict=False):
            looks.append(replace(look, key=f"group {number}, {row.distance} bits: {look.key}"))
    heading = [
        f"{dataset.uri}: {counted(len(found.groups), 'group')} of look-alikes,"
        f" {counted(found.surplus, 'picture')} more than one of each",
        f"the {len(shown)} largest, up to {_ON_SHEET} of each; {found.resolution} px, up to {found.distance} bits",
    ]
    write_file(target, as_png(contact_sheet(looks, heading, fonts)))
    return target


def _describe(result: dict[str, Any], found: Duplicates, shown: list[list[Member]]) -> str:
    share = 100 * found.surplus / found.samples if found.samples else 0.0
    lines = [
        f"{counted(found.samples, 'picture')} at {found.resolution} px: {counted(len(found.groups), 'group')} of"
        f" look-alikes (up to {found.distance} bits of 64 between neighbours),"
        f" {counted(found.surplus, 'picture')} more than one of each,"
        f" {share:.2g} %"
    ]
    if result["hashes"] == "kept":
        lines.append("by the hashes that encoding kept of the pictures; no latent was read")
    else:
        lines.append(f"by hashes of what the latents show: {result['why_latents']}")
    if found.explained is not None:
        lines.append(
            f"seen without decoding: a linear preview that shows {found.explained:.0%} of light and dark"
        )
    for rows in shown:
        names = ", ".join(f"{row.key}{f' ({row.distance})' if row.distance else ''}" for row in rows[:6])
        lines.append(f"  {len(rows)}: {names}{', ...' if len(rows) > 6 else ''}")
    if len(found.groups) > len(shown):
        more = f"and {counted(len(found.groups) - len(shown), 'group')} more"
        lines.append(
            f"{more}; all are in {result['file']}" if result["file"] else f"{more}: --out FILE.jsonl"
        )
    elif result["file"]:
        lines.append(f"written to {result['file']}")
    if result["sheet"]:
        lines.append(f"the largest are drawn in {result['sheet']}")
    return "\n".join(lines)
