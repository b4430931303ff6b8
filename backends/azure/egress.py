"""What training reads in a second, against what storage accounts and a node's Ethernet give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.backends.azure.places import blob_of
from isthmus.backends.azure.skus import Sku
from isthmus.core.models.profiles import profile
from isthmus.core.recipe.checks import PEAK_FLOPS
from isthmus.core.recipe.schema import Recipe
from isthmus.errors import UsageError

UTILIZATION = 0.28
"""Share of a GPU's dense bf16 peak that training takes; what was published for SD2 on A100."""
LARGE_GBPS, SMALL_GBPS = 200.0, 50.0
"""Egress of a general-purpose v2 account, in the regions below and elsewhere. Azure raises both on request."""
LARGE_REGIONS = frozenset(
    {
        "australiaeast", "brazilsouth", "canadacentral", "centralindia", "centralus", "eastasia", "eastus", "eastus2",
        "francecentral", "germanywestcentral", "japaneast", "koreacentral", "northcentralus", "northeurope", "norwayeast",
        "southafricanorth", "southcentralus", "southeastasia", "swedencentral", "uaenorth", "uksouth", "westeurope",
        "westus", "westus2", "westus3",
    }
)  # fmt: skip
"""Microsoft's page of storage scalability targets lists these; Italy North is not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Of the stage that reads most."""

    stage: str
    images_per_s: float
    """Of all GPUs."""
    bytes_per_image: int
    """Latent mean and log-variance, one caption's embeddings; uncompressed, so known without looking."""
    node_bytes_per_s: float
    accounts: dict[str, float]
    """Storage account -> bytes per second; roots are taken as equally large."""

    @property
    def total(self) -> float:
        """Bytes per second of all nodes."""
        return self.images_per_s * self.bytes_per_image


def bytes_per_image(recipe: Recipe, resolution: int) -> int:
    """What a rank reads for one sample: fp16 latents [C, H, W] twice, and per encoder [tokens, width] and a pooled vector."""
    autoencoder = recipe.encoders.autoencoder
    side = resolution // autoencoder.factor
    latents = 2 * 2 * autoencoder.latent_channels * side * side
    text = sum(2 * (one.max_tokens * one.width + (one.pooled_width or 0)) for one in recipe.encoders.text)
    return latents + text


def need(recipe: Recipe, default_account: str | None = None) -> Need | None:
    """The reading that training needs; None where nobody knows the model's pace (no GPU, an unknown model)."""
    known = profile(recipe.model)
    if recipe.compute.gpu == "none" or known is None:
        return None
    peak = UTILIZATION * PEAK_FLOPS[recipe.compute.gpu]
    rates = [
        (peak / known.train_flops[stage.resolution] * bytes_per_image(recipe, stage.resolution), stage)
        for stage in recipe.stages
        if known.train_flops.get(stage.resolution)
    ]
    if not rates:
        return None
    gpu_rate, stage = max(rates, key=lambda pair: pair[0])
    gpus = recipe.compute.nodes * recipe.compute.gpus_per_node
    size = bytes_per_image(recipe, stage.resolution)
    total = gpu_rate * gpus
    shares = account_shares(recipe, default_account)
    return Need(
        stage=stage.name,
        images_per_s=total / size,
        bytes_per_image=size,
        node_bytes_per_s=gpu_rate * recipe.compute.gpus_per_node,
        accounts={account: share * total for account, share in shares.items()},
    )


def account_shares(recipe: Recipe, default_account: str | None) -> dict[str, float]:
    """Storage account -> its share of what is read, by the sources' repeats and the number of their roots."""
    weights: dict[str, float] = {}
    everything = 0.0
    for source in recipe.data.sources:
        uris: Sequence[str] = [source.uri] if isinstance(source.uri, str) else list(source.uri)
        for uri in uris:
            weight = float(source.repeat) / len(uris)
            everything += weight
            try:
                blob = blob_of(uri, default_account)
            except UsageError:
                blob = None
            if blob is not None:
                weights[blob.account] = weights.get(blob.account, 0.0) + weight
    return {account: weight / everything for account, weight in sorted(weights.items())} if everything else {}


def account_limit(region: str | None, raised_gbps: float | None) -> float:
    """Bytes per second that one account gives."""
    gbps = raised_gbps or (LARGE_GBPS if region in LARGE_REGIONS else SMALL_GBPS)
    return gbps * 1e9 / 8


def ethernet(sku: Sku) -> float:
    """Bytes per second that a node reads at most."""
    return sku.ethernet_gbps * 1e9 / 8
