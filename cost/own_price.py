"""What a recipe's own section of a backend says an hour costs (`backends.sagemaker.usd_per_hour`), as its launch counts it."""

from __future__ import annotations

from isthmus.core.recipe.schema import Recipe
from isthmus.cost.placing import Place, priced_at


def own_priced(recipe: Recipe, found: Place) -> Place:
    """The place at the recipe's own price, where it is one that the section is about: its machines, as many, where it goes.

    As at a launch, that price is of all nodes, and stands over the snapshot's and a prices file's.
    """
    section = recipe.backends.get(found.backend, {})
    usd = section.get("usd_per_hour")
    if not isinstance(usd, int | float) or isinstance(usd, bool) or usd <= 0:
        return found  # what is wrong with it, the backend's own model of its section says
    return (
        priced_at(found, float(usd), f"backends.{found.backend}.usd_per_hour")
        if _meant(recipe, found)
        else found
    )


def _meant(recipe: Recipe, found: Place) -> bool:
    compute, section = recipe.compute, recipe.backends.get(found.backend, {})
    if (found.nodes, found.gpus_per_node, found.gpu) != (compute.nodes, compute.gpus_per_node, compute.gpu):
        return False
    offers = [offer for offer in compute.offers if offer.backend == found.backend]
    skus = {section.get("sku")} - {None} or {offer.sku for offer in offers} - {None}
    if skus and found.sku not in skus:
        return False
    if found.backend == "local":
        return True
    places = {(offer.region, offer.tier) for offer in offers}
    if not places:
        places = {(section.get("region"), section.get("tier") or "on_demand")}
    return any(region in (None, found.region) and tier == found.tier for region, tier in places)
