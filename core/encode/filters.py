"""What a recipe takes of a source's fields: captions, provenance, and whether the picture is wanted at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.core.encode.pictures import Size, Unusable

if TYPE_CHECKING:
    from isthmus.core.recipe.pictures import Pictures

MAX_CAPTION = 20_000
"""Characters of a caption; a longer one is no caption. What an encoder does not take is cut by its tokenizer."""
CAPTION_FIELDS = ("txt", "text", "caption", "captions")
PROVENANCE_FIELDS = ("source", "url")
FILTER = "filter-"
"""Reasons that begin so are the recipe's own wish: counted, and not listed one by one."""


def captions_of(fields: Mapping[str, Any], pictures: Pictures) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Captions and their weights: without surplus white space, empty ones and repetitions; at least one.

    A field may hold one caption or a list. Of a caption that several fields hold, the weights add up; a list shares its
    field's weight.

    Raises:
        Unusable: `no-caption`, `caption-too-long`, or `bad-caption` for a field that is no text.
    """
    asked = [(item.field, item.weight) for item in pictures.captions]
    weights: dict[str, float] = {}
    for name, weight in asked or [(name, 1.0) for name in CAPTION_FIELDS if name in fields]:
        value = fields.get(name)
        if value is None:
            continue
        values = list(value) if isinstance(value, list | tuple) else [value]
        values = [item for item in values if item is not None]
        if not all(isinstance(item, str) for item in values):
            raise Unusable("bad-caption", f"{name} is not text")
        texts = list(dict.fromkeys(text for text in map(clean, values) if text))
        for text in texts:
            share = weight / len(texts) if asked else weight
            weights[text] = weights.get(text, 0.0) + share if asked else share
    if not weights:
        raise Unusable("no-caption", _without_caption(fields, [name for name, _ in asked]))
    if any(len(text) > MAX_CAPTION for text in weights):
        raise Unusable("caption-too-long", f"over {MAX_CAPTION} characters")
    return tuple(weights), tuple(weights.values())


def _without_caption(fields: Mapping[str, Any], asked: Sequence[str]) -> str:
    """Why a picture has none: nothing where one could be, or only empty ones."""
    names = asked or CAPTION_FIELDS
    if any(name in fields for name in names):
        return "every caption is empty"
    return f"there is no {', '.join(names)}"


def clean(text: str) -> str:
    """One line of valid Unicode: white space made single, zero bytes gone, lone surrogates replaced."""
    return " ".join(text.replace("\0", " ").encode("utf-8", "replace").decode().split())


def allot(captions: Sequence[str], weights: Sequence[float], count: int) -> tuple[str, ...]:
    """The captions of `count` places, each as often as its weight asks, by largest remainder.

    With even weights: the captions as they are, the first `count` of them; the writer repeats them in turn.
    """
    if not weights or max(weights) == min(weights):
        return tuple(captions[:count])
    total = math.fsum(weights)
    shares = [count * weight / total for weight in weights]
    places = [math.floor(share + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (places[i] - shares[i], -weights[i], i))
    for i in order[: count - sum(places)]:
        places[i] += 1
    return tuple(text for text, n in zip(captions, places, strict=True) for _ in range(n))


def provenance_of(fields: Mapping[str, Any], pictures: Pictures, otherwise: str) -> str:
    """Where a picture is from."""
    names = [pictures.provenance] if pictures.provenance else PROVENANCE_FIELDS
    value = next((fields[name] for name in names if isinstance(fields.get(name), str) and fields[name]), None)
    return clean(value)[:2000] if value else otherwise


def check_fields(fields: Mapping[str, Any], pictures: Pictures) -> None:
    """Raises Unusable, `filter-score` or `filter-licence`, when a field is not what the recipe takes."""
    for name, bounds in pictures.scores.items():
        value = fields.get(name)
        try:
            number = math.nan if value is None or isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        # Not a number is neither above nor below anything.
        low = -math.inf if bounds.min is None else bounds.min
        high = math.inf if bounds.max is None else bounds.max
        if not low <= number <= high:
            raise Unusable(f"{FILTER}score", f"{name} is {value}")
    if pictures.licences:
        value = fields.get(pictures.licence or "")
        if not isinstance(value, str) or clean(value).casefold() not in {
            licence.casefold() for licence in pictures.licences
        }:
            raise Unusable(f"{FILTER}licence", f"{value}")


MAX_KEPT = 2000
"""Characters of a text that is kept."""


def kept_of(
    fields: Mapping[str, Any], pictures: Pictures
) -> tuple[dict[str, float | str | None], tuple[str, ...]]:
    """What the recipe keeps of a picture's fields, by the names in the dataset; and which were there, and not of their kind.

    A null, an empty text and a number that is NaN are not told. A list, an object, bytes, a number that is infinite, what
    cannot be read as a number, and a text of more than `MAX_KEPT` characters are not of their kind: they become null.
    """
    kept: dict[str, float | str | None] = {}
    unfit = []
    for item in pictures.keep:
        value = fields.get(item.field)
        if isinstance(value, str):
            value = clean(value) or None
        found: float | str | None = None
        if value is not None:
            found = _number(value) if item.kind == "number" else _text(value)
            if found is None:
                unfit.append(item.stored)
            elif found != found:  # NaN
                found = None
        kept[item.stored] = found
    return kept, tuple(unfit)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isinf(number) else number


def _text(value: Any) -> str | None:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | Mapping | bytes):
        return None
    text = clean(str(value))
    return text if len(text) <= MAX_KEPT else None


def check_size(size: Size, pictures: Pictures) -> None:
    """Raises Unusable, `filter-size` or `filter-aspect`."""
    if min(size) < pictures.min_side:
        raise Unusable(f"{FILTER}size", f"{size.width} x {size.height}")
    ratio = size.width / size.height
    if not (pictures.min_ratio or 0) <= ratio <= (pictures.max_ratio or math.inf):
        raise Unusable(f"{FILTER}aspect", f"{size.width} x {size.height}")
