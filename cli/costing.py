"""What the commands about costs share: the catalog, measurements, the dataset's size, moments."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import IsthmusError, UsageError

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Recipe
    from isthmus.cost.catalog import Catalog
    from isthmus.cost.lines import Dataset
    from isthmus.cost.measured import Measurement


def catalog_of(prices: str | None) -> Catalog:
    """The snapshot, with a user's file over it."""
    from isthmus.cost.catalog import load_catalog

    return load_catalog(Path(prices) if prices else None)


def measured_folder() -> Path:
    """Where measurements of this machine are kept."""
    from isthmus.backends.runs import state_folder

    return state_folder() / "measured"


def known_measurements(recipe: Recipe) -> list[Measurement]:
    """Of the recipe's kind of training, on whatever machines, the newest first."""
    from isthmus.cost.measured import measurements, speed_key

    return measurements(measured_folder(), speed_key(recipe))


def dataset_of(recipe: Recipe, gigabytes: float | None, lies_in: str | None) -> Dataset:
    """The dataset as the command line tells it, or as it lies on this machine.

    Args:
        lies_in: `backend:region`, such as `azure:italynorth`.
    """
    from isthmus.cost.lines import Dataset

    if gigabytes is not None and not 0 <= gigabytes < 1e12:
        raise UsageError(f"{gigabytes:g} GB cannot be", where="--dataset-gb")
    place: tuple[str, str] | None = None
    if lies_in is not None:
        backend, colon, region = lies_in.partition(":")
        if not (backend and colon and region):
            raise UsageError(
                f"{lies_in!r} is no place",
                where="--data-in",
                hint="such as azure:italynorth or sagemaker:us-east-1",
            )
        from isthmus.cost.regions import REGIONS, check_region

        if backend not in REGIONS:
            raise UsageError(
                f"no cloud {backend!r}", where="--data-in", hint=f"there are {', '.join(REGIONS)}"
            )
        check_region(backend, region, where="--data-in")
        place = (backend, region)
    return Dataset(gigabytes=_local_size(recipe) if gigabytes is None else gigabytes, lies_in=place)


def _local_size(recipe: Recipe) -> float | None:
    """Gigabytes of the recipe's datasets where all of them lie on this machine; nothing is asked over a network."""
    from isthmus.core.recipe import resolve
    from isthmus.storage import filesystems
    from isthmus.storage.shards.manifest import parse_manifest

    try:
        sources = resolve(recipe, "local").data.sources
    except IsthmusError:
        return None
    total = 0
    for source in sources:
        for uri in [source.uri] if isinstance(source.uri, str) else list(source.uri):
            if not filesystems.is_local(str(uri)):
                return None
            path = filesystems.local_path(str(uri)) / "manifest.json"
            try:
                total += parse_manifest(path.read_bytes(), str(path)).size
            except (OSError, IsthmusError):
                return None
    return total / 1e9


def warn(texts: Iterable[str]) -> None:
    """On stderr, so that a table or JSON on stdout stays one."""
    for text in texts:
        print(f"warning: {text}", file=sys.stderr)
