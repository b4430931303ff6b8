"""The verdict of ``isthmus data bench``: what was measured and what is published, against what the recipe's GPUs take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.cli.data_bench_setup import Setup
    from isthmus.core.recipe.schema import Recipe
    from isthmus.cost.feeding import Delivered, Limit, Need
    from isthmus.storage.stream.bench import Measurement

_AS_IT_SHOULD = 1.15
"""Bytes read a byte of the samples, up and down, of which nothing is said."""


def feeding(
    setup: Setup, found: dict[str, Any], ranks: Sequence[dict[str, Any]], region: str | None
) -> dict[str, Any] | None:
    """Whether the recipe's GPUs are fed; None without a recipe, or where its need is not known.

    Args:
        found: `stream.bench.verdict` of the depths, with `best`, the best of them.
        ranks: measurements of ranks that read together; the best of the depths when there are none.
        region: of the storage accounts, where the recipe does not say it.
    """
    from isthmus.cost.feeding import judge, need

    if setup.recipe is None:
        return None
    needed = need(setup.recipe, setup.stage, setup.row_bytes)
    if needed is None:
        return None
    got = _delivered(setup, found, ranks)
    verdict = judge(needed, got, _limits(setup, setup.recipe, needed, region))
    return {
        **verdict.to_json(),
        "need": {
            "gpu": needed.gpu,
            "gpus": needed.gpus,
            "images_per_s": needed.images_per_s,
            "interval80": list(needed.interval80),
            "row_bytes": needed.row_bytes,
            "rank_bytes_per_s": needed.gpu_bytes_per_s,
            "node_bytes_per_s": needed.node_bytes_per_s,
            "bytes_per_s": needed.bytes_per_s,
            "basis": needed.basis,
        },
        "delivered": {
            "processes": got.processes,
            "rank_bytes_per_s": got.rank_bytes_per_s,
            "bytes_per_s": got.bytes_per_s,
            "bottleneck": got.bottleneck,
        },
    }


def _delivered(setup: Setup, found: dict[str, Any], ranks: Sequence[dict[str, Any]]) -> Delivered:
    from isthmus.cost.feeding import Delivered
    from isthmus.storage.filesystems import is_local

    together = list(ranks) or [found["best"]]
    # Samples, not bytes: what is read ahead while it is measured is none that a step gets.
    rates = [one["samples_per_s"] * setup.row_bytes for one in together]
    size, asked = sum(one["bytes"] for one in together), sum(one["requests"] for one in together)
    return Delivered(
        processes=len(together),
        rank_bytes_per_s=min(rates),
        bytes_per_s=sum(rates),
        bottleneck=found["limit"],
        block_bytes=size / asked if asked else setup.row_bytes / setup.requests_per_row,
        depth=max(one["depth_reached"] for one in together),
        access=setup.mode,
        local=all(is_local(root) for dataset in setup.datasets for root in dataset.roots),
    )


def _limits(setup: Setup, recipe: Recipe, needed: Need, region: str | None) -> list[Limit]:
    from isthmus.backends.azure.egress import account_limit
    from isthmus.cost.feeding import store_limits

    accounts: dict[str, float] = {}
    prefixes: dict[str, float] = {}
    weights = [
        dataset.manifest.samples * float(repeat)
        for dataset, repeat in zip(setup.datasets, setup.repeats, strict=True)
    ]
    for dataset, weight in zip(setup.datasets, weights, strict=True):
        for root in dataset.roots:
            share = weight / sum(weights) / len(dataset.roots)
            if (account := _account(root, recipe)) is not None:
                accounts[account] = accounts.get(account, 0.0) + share
            elif root.startswith("s3://"):
                prefixes[root.rstrip("/")] = prefixes.get(root.rstrip("/"), 0.0) + share
    azure = recipe.backends.get("azure", {})
    where = region or _region(recipe, "azure")
    limits = list(
        store_limits(
            needed,
            requests_per_row=setup.requests_per_row,
            account_shares=list(accounts.values()),
            account_bytes_per_s=account_limit(where, azure.get("storage_egress_gbps")),
            prefix_shares=list(prefixes.values()),
        )
    )
    limits += _network(recipe, needed, "azure" if accounts else "sagemaker" if prefixes else "")
    return limits


def _account(root: str, recipe: Recipe) -> str | None:
    """The storage account of a root in Azure; `the account` where only the environment knows its name."""
    from isthmus.backends.azure.places import blob_of
    from isthmus.errors import UsageError

    try:
        blob = blob_of(root, recipe.backends.get("azure", {}).get("storage_account"))
    except UsageError:
        return "the account"
    return blob.account if blob is not None else None


def _region(recipe: Recipe, backend: str) -> str | None:
    offers = [offer.region for offer in recipe.compute.offers if offer.backend == backend]
    told = recipe.backends.get(backend, {}).get("region")
    return next((name for name in [*offers, told] if name), None)


def _network(recipe: Recipe, needed: Need, cloud: str) -> list[Limit]:
    """Of the machine that the cloud beside the data has for the recipe's GPUs."""
    from isthmus.backends.azure import skus as azure
    from isthmus.backends.sagemaker import skus as sagemaker
    from isthmus.cost.feeding import network_limit
    from isthmus.errors import UsageError

    if cloud == "azure":
        try:
            machine = azure.choose(recipe.compute.gpu, recipe.compute.gpus_per_node)
        except UsageError:
            return []
        return [network_limit(needed, machine.name, machine.ethernet_gbps * 1e9 / 8)]
    if cloud == "sagemaker":
        instance = sagemaker.default(recipe.compute)
        return [network_limit(needed, instance.name, instance.gbps * 1e9 / 8)] if instance else []
    return []


def read_again(best: Measurement, row_bytes: float) -> tuple[float, str | None]:
    """How often the bytes of a sample were read for it to be delivered once, and the sentence for it, where it needs one.

    Near 1 for a dataset of many row groups, and over a long time. Few rows: a block that several lanes or windows share is read
    for each of them. Less than 1 over a short time: what was read ahead before the clock started.

    Args:
        row_bytes: of a sample, as the files have it.
    """
    factor = best.bytes / (best.samples * row_bytes)
    if 1 / _AS_IT_SHOULD < factor < _AS_IT_SHOULD:
        return factor, None
    used = best.samples_per_s * row_bytes / 1e6
    why = (
        "a block is read whole for each lane and window that takes rows of it, so that few rows are read often"
        if factor > 1
        else "the rest was read ahead before the clock started; --seconds 30 tells more"
    )
    return factor, f"MB/s are bytes read, {factor:.2g} times the {used:,.3g} MB/s of the samples: {why}."


def together(ranks: Sequence[dict[str, Any]], asked: int) -> dict[str, Any]:
    """What ranks that read at the same time got, all of them and each."""
    return {
        "asked": asked,
        "processes": len(ranks),
        "megabytes_per_s": sum(one["megabytes_per_s"] for one in ranks),
        "samples_per_s": sum(one["samples_per_s"] for one in ranks),
        "slowest_samples_per_s": min(one["samples_per_s"] for one in ranks),
        # Of the slowest rank: percentiles of several cannot be put together.
        "latency_s": {name: max(one["latency_s"][name] for one in ranks) for name in ("p50", "p99", "max")},
        "retries": sum(one["retries"] for one in ranks),
        "throttled": sum(one["throttled"] for one in ranks),
        "each": list(ranks),
    }
