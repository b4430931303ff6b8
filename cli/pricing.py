"""What an hour costs, for whoever launches: the price function that the backends are handed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.backends.prepare import Price


def price_function() -> Price | None:
    """US dollars an hour by the catalog of prices; None in an installation without it."""
    if find_spec("isthmus.cost.estimate") is None:
        return None
    from isthmus.cost.estimate import usd_per_hour

    return usd_per_hour
