"""Where a run shall go, and where next: `compute.offers`, narrowed and ordered by the backends that the user names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.core.recipe.schema import Offer as WantedOffer
from isthmus.core.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Destination:
    """A backend, and the one of the recipe's offers that it is asked for; None: what the backend's settings say."""

    backend: str
    offer: WantedOffer | None = None

    def __str__(self) -> str:
        offer = self.offer
        words = [self.backend]
        if offer is not None:
            words += [word for word in (offer.region, offer.sku) if word] + [offer.tier.replace("_", "-")]
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """For run.json."""
        offer = self.offer.model_dump(mode="json", exclude_unset=True) if self.offer is not None else None
        return {"backend": self.backend, "offer": offer}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Destination:
        """Reads what `to_json` wrote."""
        offer = data.get("offer")
        return cls(str(data["backend"]), WantedOffer.model_validate(offer) if offer else None)


def destinations(recipe: Recipe, backends: Sequence[str] = ()) -> tuple[Destination, ...]:
    """In order of preference; at least one.

    Args:
        backends: names, in the order that the user gave; none: the recipe's offers in theirs, or `local`.
    """
    offers = recipe.compute.offers
    if not backends:
        found = [Destination(offer.backend, offer) for offer in offers]
        return tuple(found) or (Destination("local"),)
    chosen: list[Destination] = []
    for name in dict.fromkeys(backends):
        own = [Destination(name, offer) for offer in offers if offer.backend == name]
        chosen += own or [Destination(name)]
    return tuple(chosen)


def known_destinations(run_json: Mapping[str, Any], recipe: Recipe) -> tuple[Destination, ...]:
    """Those that a run was launched with, as its run.json tells."""
    told = run_json.get("destinations")
    if told:
        return tuple(Destination.from_json(one) for one in told)
    return destinations(recipe, [str(run_json["backend"])])
