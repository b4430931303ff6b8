"""What commands that decode latents share: whose autoencoder, and where a picture goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def autoencoder_source(recipe: str, autoencoder: str) -> str | None:
    """Where the autoencoder is, by the name that was given or by a recipe's; None: beside the shards."""
    from isthmus.errors import UsageError

    if recipe and autoencoder:
        raise UsageError("--recipe and --autoencoder both name an autoencoder", hint="give one of them")
    if autoencoder:
        return autoencoder
    if recipe:
        from isthmus.core.recipe import load_recipe

        return load_recipe(recipe, []).recipe.encoders.autoencoder.source
    return None


def write_sheet(
    roots: Sequence[str],
    target: str,
    *,
    rows: int,
    resolution: int | None,
    source: str | None,
    device: str,
    seed: int,
    fonts: Sequence[str],
) -> dict[str, Any]:
    """Writes a contact sheet of a dataset as PNG.

    Returns:
        `file`, `rows` and `resolution`.

    Raises:
        UsageError: the file's name does not end in .png, or a setting does not fit the dataset.
        StorageError: it cannot be written.
    """
    from isthmus.core.encode.looking import looks, open_autoencoder, resolution_of
    from isthmus.errors import UsageError
    from isthmus.storage.shards import open_dataset

    if not target.lower().endswith(".png"):
        raise UsageError("a sheet is a PNG", where=target, hint="--sheet sheet.png")
    dataset = open_dataset(list(roots))
    pixels = resolution_of(dataset, resolution)
    decoder = open_autoencoder(dataset, source, device=device)
    from isthmus.core.encode.sheet import as_png, contact_sheet

    seen = list(looks(dataset, decoder, rows=rows, resolution=pixels, seed=seed))
    manifest = dataset.manifest
    heading = [
        dataset.uri,
        f"{len(seen)} of {manifest.samples:,} samples, {pixels} px, decoded from the mean of their latents; seed {seed};"
        f" fingerprint {manifest.fingerprint[:12]}",
    ]
    if manifest.source:
        heading.append(manifest.source)
    write_file(target, as_png(contact_sheet(seen, heading, fonts)))
    return {"file": target, "rows": len(seen), "resolution": pixels}


def write_file(target: str, data: bytes) -> None:
    """A file on any store, whole."""
    from isthmus.storage.filesystems import is_local, local_path
    from isthmus.storage.shards.files import write_whole

    where = str(local_path(target)) if is_local(target) else target
    folder, _, name = where.rpartition("/")
    write_whole(folder or "/", name, data)
