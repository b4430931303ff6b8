"""What an hour costs, for whoever launches: the price function that the backends are handed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.backends.prepare import Price
    from isthmus.core.recipe.schema import Recipe


def price_function() -> Price:
    """US dollars an hour by the catalog of prices. What estimates a run is not imported: a dry run shall be quick."""

    def usd_per_hour(
        recipe: Recipe, backend: str, region: str | None, tier: str, sku: str | None
    ) -> float | None:
        from isthmus.cost.catalog import load_catalog
        from isthmus.cost.placing import place
        from isthmus.errors import IsthmusError

        try:
            return place(
                recipe, load_catalog(), backend=backend, region=region, tier=tier, sku=sku
            ).usd_per_hour
        except IsthmusError:
            return None

    return usd_per_hour
