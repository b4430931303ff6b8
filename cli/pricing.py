"""What an hour costs, for whoever launches: the price function that the backends are handed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.backends.prepare import Price
    from isthmus.core.recipe.schema import Recipe


def price_function(prices: str = "") -> Price:
    """US dollars an hour by the catalog of prices. What estimates a run is not imported: a dry run shall be quick.

    Args:
        prices: a user's own, over the snapshot's; read at once, so that what is wrong with it is said before anything else.
    """
    from isthmus.cli.costing import catalog_of

    own = catalog_of(prices) if prices else None

    def usd_per_hour(
        recipe: Recipe, backend: str, region: str | None, tier: str, sku: str | None
    ) -> float | None:
        from isthmus.cost.placing import place
        from isthmus.errors import IsthmusError

        try:
            catalog = own or catalog_of(None)
            return place(recipe, catalog, backend=backend, region=region, tier=tier, sku=sku).usd_per_hour
        except IsthmusError:
            return None

    return usd_per_hour
