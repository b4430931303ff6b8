"""On which machines, where and at which price a recipe would run: backend, region, tier and SKU against the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date

from isthmus.core.recipe.schema import Recipe
from isthmus.core.recipe.summary import admitted_world_sizes
from isthmus.cost.catalog import CURRENCY, Catalog, Price
from isthmus.cost.regions import check_region
from isthmus.errors import UsageError

LOCAL = "local"
ANY_CPU = "its-own-cpu-machine"
"""Stands for the machine that a cloud's backend chooses for a recipe without GPUs."""
CLOUDS = ("azure", "sagemaker")
TIER_ROWS = {"spot": ("spot", "low_priority"), "on_demand": ("on_demand",), "reserved": ("reserved",)}
"""A recipe's word for a tier -> the catalog's, in the order they are looked for: Azure ML's spot is its low priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run would be."""

    backend: str
    region: str
    tier: str
    """The recipe's word: on_demand, spot, reserved."""
    sku: str
    gpu: str
    gpus_per_node: int
    nodes: int
    price: Price | None
    """The row; None, or one without a figure: nobody prices it."""
    why: str = ""
    """How region or SKU were chosen, where nobody said."""

    @property
    def usd_per_hour(self) -> float | None:
        """Of all nodes; None where nobody prices it."""
        if self.price is None or self.price.usd_per_hour is None:
            return None
        return self.nodes * self.price.usd_per_hour

    @property
    def label(self) -> str:
        """`azure eastus on_demand 16 x Standard_ND96amsr_A100_v4`."""
        return f"{self.backend} {self.region} {self.tier} {self.nodes} x {self.sku}"

    @property
    def fabric(self) -> str | None:
        """What joins the nodes; None: what is usual for the GPU."""
        if self.nodes == 1:
            return None
        name = self.sku.lower()
        if self.backend == "azure":
            return "infiniband" if name.startswith("standard_nd") else "ethernet"
        if self.backend == "sagemaker":
            return "efa" if name.startswith("ml.p") else "ethernet"
        return None

    def how_to_price(self) -> str:
        """What to write into a prices file, in one line."""
        return (
            f"give --prices FILE with a row: backend {self.backend}, sku {self.sku}, region {self.region}, "
            f"tier {self.tier}, usd_per_hour ... (see `isthmus prices show` and docs/cost.md)"
        )


def find_price(catalog: Catalog, backend: str, sku: str, region: str, tier: str) -> Price | None:
    """The row of a recipe's tier: the one with a figure where there are several."""
    rows = TIER_ROWS.get(tier, (tier,))
    found = [price for row in rows if (price := catalog.find(backend, sku, region, row)) is not None]
    return next((price for price in found if price.usd_per_hour is not None), next(iter(found), None))


def place(
    recipe: Recipe,
    catalog: Catalog,
    *,
    backend: str,
    region: str | None = None,
    tier: str | None = None,
    sku: str | None = None,
    nodes: int | None = None,
) -> Place:
    """The place that a recipe names for a backend, with what is said here over it.

    Region, tier and SKU come from the arguments, then from the first of `compute.offers` of that backend (and region, where
    one is given); then the region is the cheapest one that is priced, the tier on_demand, and the SKU the one with the recipe's
    GPU and count.

    Raises:
        UsageError: no such backend, region or SKU; a GPU that nobody prices; a world size that the recipe cannot have.
    """
    _check_backend(catalog, backend)
    offers = [offer for offer in recipe.compute.offers if offer.backend == backend]
    offer = next((offer for offer in offers if region in (None, offer.region)), None)
    if offer is not None:
        region = region or offer.region
        tier = tier or offer.tier
        sku = sku or offer.sku
    tier = tier or "on_demand"
    if backend == LOCAL:
        return _local(recipe, catalog, nodes)
    if recipe.compute.gpu == "none":
        return _processors(recipe, catalog, backend, region, tier, sku, nodes)
    if region is not None:
        check_region(backend, region, {price.region for price in catalog.prices if price.backend == backend})
    rows = _rows(recipe, catalog, backend, sku)
    chosen, why = _choose(rows, region, tier)
    region = region or chosen.region
    return Place(
        backend=backend,
        region=region,
        tier=tier,
        sku=chosen.sku,
        gpu=chosen.gpu,
        gpus_per_node=chosen.gpus,
        nodes=nodes_for(recipe, chosen.gpus, nodes),
        price=find_price(catalog, backend, chosen.sku, region, tier),
        why=why,
    )


def priced_at(found: Place, usd_per_hour: float, source: str) -> Place:
    """The place at another price than the catalog's, such as one that a backend's settings name.

    Args:
        usd_per_hour: of all nodes.
        source: who says so.
    """
    return replace(
        found,
        price=Price(
            backend=found.backend,
            service=found.backend,
            sku=found.sku,
            gpu=found.gpu,
            gpus=found.gpus_per_node,
            region=found.region,
            tier=found.tier,
            usd_per_hour=usd_per_hour / found.nodes,
            currency=CURRENCY,
            unit="hour",
            source=source,
            as_of=date.today().isoformat(),
        ),
    )


def check_tier(text: str | None) -> str | None:
    """The recipe's word for a tier; nothing said is None. Raises UsageError on another word."""
    if not text:
        return None
    word = {"low_priority": "spot"}.get(text.replace("-", "_"), text.replace("-", "_"))
    if word not in TIER_ROWS:
        raise UsageError(f"no tier {text!r}", where="--tier", hint=_near(text, TIER_ROWS))
    return word


def with_place(recipe: Recipe, place: Place) -> Recipe:
    """The recipe on those machines."""
    update = {"nodes": place.nodes, "gpus_per_node": place.gpus_per_node, "gpu": place.gpu}
    return recipe.model_copy(update={"compute": recipe.compute.model_copy(update=update)})


def nodes_for(recipe: Recipe, gpus_per_node: int, nodes: int | None = None) -> int:
    """Nodes: as many as asked for, or as keep the recipe's world size. Raises UsageError."""
    ranks = recipe.compute.nodes * recipe.compute.gpus_per_node
    if nodes is None:
        if ranks % gpus_per_node:
            raise UsageError(
                f"{ranks} ranks do not fill nodes of {gpus_per_node} GPUs",
                hint="say how many with --nodes, or choose another --sku",
            )
        return ranks // gpus_per_node
    if nodes < 1:
        raise UsageError(f"{nodes} nodes cannot be", where="--nodes")
    admitted = admitted_world_sizes(recipe)
    if nodes * gpus_per_node != ranks and nodes * gpus_per_node not in admitted:
        fits = [size // gpus_per_node for size in admitted if size % gpus_per_node == 0]
        raise UsageError(
            f"{nodes} nodes of {gpus_per_node} GPUs cannot share data.lanes {recipe.data.lanes} and the batches",
            where="--nodes",
            hint=f"can be {', '.join(map(str, fits))}" if fits else "choose other lanes or batch sizes",
        )
    return nodes


def _check_backend(catalog: Catalog, backend: str) -> None:
    known = {LOCAL, *CLOUDS, *(price.backend for price in catalog.prices)}
    if backend not in known:
        raise UsageError(f"no prices of a backend {backend!r}", where="--backend", hint=_near(backend, known))


def _rows(recipe: Recipe, catalog: Catalog, backend: str, sku: str | None) -> list[Price]:
    here = [price for price in catalog.prices if price.backend == backend]
    if sku is not None:
        rows = [price for price in here if price.sku == sku]
        if not rows:
            raise UsageError(
                f"nobody prices a {sku} on {backend}",
                where="--sku",
                hint=f"{_near(sku, {price.sku for price in here})}; a prices file may add it (docs/cost.md)",
            )
        return rows
    gpu, count = recipe.compute.gpu, recipe.compute.gpus_per_node
    rows = [price for price in here if price.gpu == gpu and price.gpus == count]
    if not rows:
        counts = sorted({price.gpus for price in here if price.gpu == gpu})
        many = ", ".join(map(str, counts))
        raise UsageError(
            f"nobody prices a machine with {count} x {gpu} on {backend}",
            where="compute.gpu",
            hint=f"there are machines with {many} of them: compute.gpus_per_node"
            if counts
            else f"{backend} has {', '.join(sorted({price.gpu for price in here}))}; a prices file may add others (docs/cost.md)",
        )
    return rows


def _choose(rows: Iterable[Price], region: str | None, tier: str) -> tuple[Price, str]:
    """The row whose SKU and region are taken, and what to say of the choice."""
    wanted = TIER_ROWS.get(tier, (tier,))

    def order(price: Price) -> tuple[bool, bool, bool, float, str, str]:
        usd = price.usd_per_hour
        return (
            region is not None and price.region != region,
            price.tier not in wanted,
            usd is None,
            usd or 0.0,
            price.sku,
            price.region,
        )

    best = min(rows, key=order)
    return best, "" if region is not None else f"region {best.region}: the cheapest that is priced"


def _local(recipe: Recipe, catalog: Catalog, nodes: int | None) -> Place:
    compute = recipe.compute
    price = next((price for price in catalog.prices if price.backend == LOCAL), None)
    return Place(
        backend=LOCAL,
        region=price.region if price else LOCAL,
        tier="on_demand",
        sku=price.sku if price else "this-machine",
        gpu=compute.gpu,
        gpus_per_node=compute.gpus_per_node,
        nodes=nodes_for(recipe, compute.gpus_per_node, nodes),
        price=price,
    )


def _processors(
    recipe: Recipe,
    catalog: Catalog,
    backend: str,
    region: str | None,
    tier: str,
    sku: str | None,
    nodes: int | None,
) -> Place:
    """A cloud's machines without a GPU, which the backend itself chooses unless it is told."""
    count = recipe.compute.gpus_per_node
    region, sku = region or "its-own-region", sku or ANY_CPU
    return Place(
        backend=backend,
        region=region,
        tier=tier,
        sku=sku,
        gpu="none",
        gpus_per_node=count,
        nodes=nodes_for(recipe, count, nodes),
        price=find_price(catalog, backend, sku, region, tier),
    )


def as_measured(found: Place, sku: str, region: str, catalog: Catalog) -> Place:
    """A place whose machine only its backend knew, with the machine that it was measured on."""
    if found.sku != ANY_CPU:
        return found
    return replace(
        found, sku=sku, region=region, price=find_price(catalog, found.backend, sku, region, found.tier)
    )


def _near(text: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches

    names = sorted(known)
    close = get_close_matches(text, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names[:12])}"
