"""The section `encode`: a run that makes a dataset instead of training on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from isthmus.core.recipe.problems import Problem
from isthmus.core.recipe.stages import Positive, Section
from isthmus.core.recipe.units import Size

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Recipe

UNIT_BYTES = 2 * 10**9
"""Of a work unit, as the source stores it. A killed rank loses one unit's work."""


def _place(value: object) -> object:
    parts = value.values() if isinstance(value, dict) else [value]
    if all(isinstance(part, str) and part for part in parts):
        return value
    raise ValueError("a URI or path, or one for each backend")


EncodePlace = Annotated[str | dict[str, str], BeforeValidator(_place)]


class Encode(Section):
    """What `isthmus data encode --backend` runs: the recipe's encoders, stages, buckets and prompts say the rest."""

    source: EncodePlace
    """Pictures and captions: a folder or URI, as `isthmus data encode` takes it."""
    dest: EncodePlace
    """Where the dataset is written: a folder or URI without one."""
    access: Literal["stream", "mount", "download"] = "stream"
    """How a cloud's job reads the source: by range requests, or as a folder that its cloud mounts, or copies to every node."""
    origin: str | None = None
    """Where a source that lies elsewhere now is from; backends write it. Names and keys are then those of the origin."""
    captions: Annotated[int, Field(ge=1, le=64)] | None = None
    """Stored for each picture; null: the most that any has, up to 5."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the encoders."""
    batch_size: Positive = 32
    """Pictures that are encoded together."""
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    """Of each process, that decode ahead of its encoders; null: all but one of its share of the node's cores with encoders on
    a GPU, half of them without."""
    unit: Size = UNIT_BYTES
    """Source bytes of a work unit; each is encoded by one process, and by itself."""


def for_encoding(recipe: Recipe) -> Recipe:
    """What of a recipe an encoding's job needs: nothing of the training's data, weights, trackers and alarms.

    Its one data source is what it writes, so that whatever looks at a job's places looks at this one.
    """
    from isthmus.core.recipe.schema import Monitor, Place, Source

    if recipe.encode is None:
        return recipe
    dest = recipe.encode.dest
    place: Place = dest if isinstance(dest, str) else {**dest}
    data = {"sources": [Source(uri=place)], "access": "stream"}
    absent = {"cache_limit", "cache_directory"}
    kept = recipe.data.model_copy(update=data | dict.fromkeys(absent))
    kept.__pydantic_fields_set__.difference_update(absent)
    update: dict[str, object] = {"data": kept}
    if recipe.validation.sources:
        validation = recipe.validation.model_copy(update={"sources": []})
        validation.__pydantic_fields_set__.discard("sources")
        update["validation"] = validation
    without = recipe.model_copy(update=update)
    for name, empty in (("trackers", []), ("on_loss_spike", None), ("code", None)):
        if name in recipe.model_fields_set:
            without = without.model_copy(update={name: empty})
            without.__pydantic_fields_set__.discard(name)
    if "monitor" in recipe.model_fields_set:
        without = without.model_copy(update={"monitor": Monitor()})
        without.__pydantic_fields_set__.discard("monitor")
    if recipe.model.init_from is not None:
        model = recipe.model.model_copy(update={"init_from": None})
        model.__pydantic_fields_set__.discard("init_from")
        without = without.model_copy(update={"model": model})
    return without


def check_encoding(recipe: Recipe) -> list[Problem]:
    """Problems of an encoding: where it reads is not where it writes. What only training needs is not looked at."""
    from isthmus.core.recipe.checks_places import check_places

    section = recipe.encode
    assert section is not None
    problems = check_places(for_encoding(recipe))
    here = section.source if isinstance(section.source, dict) else {"": section.source}
    there = section.dest if isinstance(section.dest, dict) else {"": section.dest}
    for name, source in here.items():
        dest = there.get(name) or there.get("")
        if dest is not None and dest.rstrip("/") == source.rstrip("/"):
            problems.append(Problem(("encode", "dest"), f"{dest} is the source", "another folder"))
    pictures = recipe.data.pictures
    if pictures.licences and pictures.licence is None:
        message = "needs data.pictures.licence, the field that names a picture's licence"
        problems.append(Problem(("data", "pictures", "licences"), message, "such as `licence: license`"))
    return problems
