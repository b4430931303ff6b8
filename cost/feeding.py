"""What training must be fed with, and whether a place that was measured gives it. Arithmetic only.

Training takes `images/s x bytes of a row`: of each rank, of each node, of the store. What a rank gets is measured (`isthmus data
bench`); what an account, a prefix or a machine's network gives is published, and known before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, Any

from isthmus.core.models.profiles import profile
from isthmus.cost.throughput import estimate_throughput

if TYPE_CHECKING:
    from isthmus.core.recipe.schema import Recipe

S3_GETS_PER_S = 5_500.0
"""GET requests that S3 answers for a partitioned prefix, at least (Amazon S3: performance guidelines). Beyond, 503 SlowDown; S3
splits a prefix that is asked for more, in 30 to 60 minutes of such answers. Its bandwidth has no published limit."""
AZURE_REQUESTS_PER_S = 20_000.0
"""Of a general-purpose v2 account (Microsoft: scalability targets for standard storage accounts); 40,000 in some regions."""
SHARE = 0.9
"""Of a published limit that is counted on: restarts, validation and other jobs read too."""
SOURCES = {
    "s3-gets": "Amazon S3 performance guidelines: 5,500 GET/s a partitioned prefix",
    "azure-requests": "Microsoft, standard storage account targets: 20,000 requests/s",
    "azure-egress": "Microsoft, standard storage account targets: 200 Gb/s of egress in listed regions, 50 elsewhere",
    "network": "the machine's data sheet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a stage takes at the GPUs' full speed."""

    gpu: str
    gpus: int
    gpus_per_node: int
    images_per_s: float
    """Of all GPUs."""
    interval80: tuple[float, float]
    """Of `images_per_s`."""
    row_bytes: float
    """Of a sample, as it is read."""
    basis: str

    @property
    def gpu_bytes_per_s(self) -> float:
        """Of one rank."""
        return self.images_per_s / self.gpus * self.row_bytes

    @property
    def node_bytes_per_s(self) -> float:
        """Of a node, all its ranks together."""
        return self.gpu_bytes_per_s * min(self.gpus, self.gpus_per_node)

    @property
    def bytes_per_s(self) -> float:
        """Of all nodes."""
        return self.images_per_s * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What something gives to all ranks that share it."""

    name: str
    """For people, such as `egress of 2 storage accounts`."""
    gives: float
    needs: float
    unit: str
    """`bytes/s` or `requests/s`."""
    source: str
    remedy: str
    """What to do where it is too little."""

    def gpus(self, gpus: int) -> int:
        """GPUs that it is enough for, when `gpus` take `needs`."""
        return floor(self.gives / self.needs * gpus) if self.needs else gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What was measured: some processes of one machine, reading at the same time."""

    processes: int
    rank_bytes_per_s: float
    """Of the slowest of them."""
    bytes_per_s: float
    """Of all together."""
    bottleneck: str
    """As `stream.bench.verdict` calls it: latency, throttling, errors, cpu, process, disk, store."""
    block_bytes: float
    """Of a request, the mean."""
    depth: int
    """Reads in flight, of each process."""
    access: str
    local: bool
    max_depth: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the GPUs are fed."""

    feeds: bool
    gpus: int
    """That are fed at full speed by what was measured and by every limit; at most the recipe's where that is measured only."""
    sentence: str
    reasons: tuple[str, ...]
    """What is too little."""
    remedies: tuple[str, ...]
    caveats: tuple[str, ...]
    limits: tuple[Limit, ...]

    def to_json(self) -> dict[str, Any]:
        """As `isthmus data bench --json` prints it."""
        return asdict(self)


def need(recipe: Recipe, stage: int, row_bytes: float, *, fabric: str | None = None) -> Need | None:
    """What a stage of a recipe takes; None where it has no GPU, or its model's figures are not known.

    Args:
        row_bytes: of a sample as it lies in the shards: latents and one caption's embeddings.
        fabric: what joins the nodes; None: the GPU's usual.

    Raises:
        UsageError: the recipe's numbers make no training.
    """
    compute, chosen = recipe.compute, recipe.stages[stage]
    if compute.gpu == "none" or profile(recipe.model) is None:
        return None
    gpus = compute.nodes * compute.gpus_per_node
    found = estimate_throughput(
        model=recipe.model,
        gpu=compute.gpu,
        gpus=gpus,
        gpus_per_node=compute.gpus_per_node,
        global_batch_size=chosen.global_batch_size,
        resolution=chosen.resolution,
        precision=recipe.parallel.precision,
        strategy=recipe.parallel.strategy,
        fabric=fabric,
        activation_checkpointing=bool(recipe.parallel.activation_checkpointing),
    )
    return Need(
        gpu=compute.gpu,
        gpus=gpus,
        gpus_per_node=compute.gpus_per_node,
        images_per_s=found.images_per_s,
        interval80=found.interval80,
        row_bytes=row_bytes,
        basis=found.basis,
    )


def store_limits(
    need: Need,
    *,
    requests_per_row: float,
    account_shares: Sequence[float] = (),
    account_bytes_per_s: float | None = None,
    prefix_shares: Sequence[float] = (),
) -> tuple[Limit, ...]:
    """The published limits of where the data lies.

    Args:
        requests_per_row: GET requests that a sample costs.
        account_shares: of each Azure storage account, its share of what is read; empty where there is none.
        account_bytes_per_s: egress of one of them.
        prefix_shares: the same of each S3 prefix.
    """
    requests = need.images_per_s * requests_per_row
    found = []
    if account_shares:
        largest, count = max(account_shares), len(account_shares)
        many = f"{count} storage account{'' if count == 1 else 's'}"
        if account_bytes_per_s is not None:
            accounts = ceil(need.bytes_per_s * sum(account_shares) / (SHARE * account_bytes_per_s))
            found.append(
                Limit(
                    name=f"egress of {many}",
                    gives=SHARE * account_bytes_per_s,
                    needs=need.bytes_per_s * largest,
                    unit="bytes/s",
                    source=SOURCES["azure-egress"],
                    remedy=_accounts(accounts, count),
                )
            )
        accounts = ceil(requests * sum(account_shares) / (SHARE * AZURE_REQUESTS_PER_S))
        found.append(
            Limit(
                name=f"requests to {many}",
                gives=SHARE * AZURE_REQUESTS_PER_S,
                needs=requests * largest,
                unit="requests/s",
                source=SOURCES["azure-requests"],
                remedy=f"{_accounts(accounts, count)}, or larger row groups",
            )
        )
    if prefix_shares:
        largest, count = max(prefix_shares), len(prefix_shares)
        prefixes = ceil(requests * sum(prefix_shares) / (SHARE * S3_GETS_PER_S))
        many = f"{prefixes} prefixes" if prefixes > count else "prefixes with equal shares"
        found.append(
            Limit(
                name=f"requests to {count} S3 prefix{'' if count == 1 else 'es'}",
                gives=SHARE * S3_GETS_PER_S,
                needs=requests * largest,
                unit="requests/s",
                source=SOURCES["s3-gets"],
                remedy=f"{many} (a list in `uri`), or larger row groups",
            )
        )
    return tuple(found)


def network_limit(need: Need, machine: str, bytes_per_s: float) -> Limit:
    """What a node reads through: its own network, which its ranks share."""
    ranks = max(1, floor(SHARE * bytes_per_s / need.gpu_bytes_per_s)) if need.gpu_bytes_per_s else 1
    return Limit(
        name=f"network of a {machine}",
        gives=SHARE * bytes_per_s,
        needs=need.node_bytes_per_s,
        unit="bytes/s",
        source=SOURCES["network"],
        remedy=f"a machine with a faster network, or at most {ranks} ranks on each of more nodes",
    )


def judge(need: Need, got: Delivered, limits: Sequence[Limit]) -> Verdict:
    """Whether what was measured and the limits are enough for the recipe's GPUs at full speed."""
    reasons, remedies = [], []
    for limit in limits:
        if limit.gives < limit.needs:
            reasons.append(f"{limit.name}: {_rates(limit)}")
            remedies.append(limit.remedy)
    node_ranks = min(need.gpus, need.gpus_per_node)
    rank, node = need.gpu_bytes_per_s, need.node_bytes_per_s
    if got.rank_bytes_per_s < rank:
        reasons.append(f"a rank gets {_mb(got.rank_bytes_per_s)} of {_mb(rank)}")
        remedies += _measured_remedies(got, rank)
    elif got.processes >= node_ranks and got.bytes_per_s < node:
        reasons.append(f"a node's {node_ranks} ranks get {_mb(got.bytes_per_s)} of {_mb(node)}")
        remedies += _measured_remedies(got, rank)
    caveats = []
    if not reasons and got.processes < node_ranks and got.bytes_per_s < node:
        caveats.append(
            f"of a node's {node_ranks} ranks {got.processes} read here: run it on a node with --ranks {node_ranks}"
        )
    fed = min(
        [floor(min(1.0, got.rank_bytes_per_s / rank) * need.gpus) if rank else need.gpus]
        + [limit.gpus(need.gpus) for limit in limits]
    )
    return Verdict(
        feeds=not reasons,
        gpus=fed,
        sentence=_sentence(need, got, limits, reasons, remedies, caveats),
        reasons=tuple(reasons),
        remedies=tuple(dict.fromkeys(remedies)),
        caveats=tuple(caveats),
        limits=tuple(limits),
    )


def _measured_remedies(got: Delivered, rank: float) -> list[str]:
    """What helps a rank that gets too little, by what limited it."""
    share = rank / max(got.rank_bytes_per_s, 1.0)
    elsewhere = [] if got.access != "stream" or got.local else ["mount or download instead of stream"]
    if got.bottleneck == "latency":
        if got.depth < got.max_depth:
            return [f"more reads in flight than {got.depth} (data.read_depth: auto)", *elsewhere]
        larger = got.block_bytes * share
        now = f"{got.block_bytes / 1e6:.3g} MB"
        return [f"row groups of {larger / 1e6:.3g} MB instead of {now} (isthmus data repack)", *elsewhere]
    if got.bottleneck in ("throttling", "store"):
        return [f"{ceil(share)} times as many accounts or prefixes (a list in `uri`)", *elsewhere]
    if got.bottleneck in ("cpu", "process"):
        cores = "more cores a rank, larger row groups" if got.bottleneck == "cpu" else "larger row groups"
        return [cores, *elsewhere]
    if got.bottleneck == "errors":
        return ["a store or a path to it that does not fail", *elsewhere]
    return ["a faster disk, or the store itself instead of it"]


def _sentence(
    need: Need,
    got: Delivered,
    limits: Sequence[Limit],
    reasons: Sequence[str],
    remedies: Sequence[str],
    caveats: Sequence[str],
) -> str:
    gpus = f"{need.gpus} x {need.gpu}"
    takes = (
        f"they take {need.images_per_s:,.4g} images/s x {need.row_bytes / 1e3:,.4g} kB = {_mb(need.bytes_per_s)}, "
        f"{_mb(need.gpu_bytes_per_s)} a rank"
    )
    if reasons:
        what = " and ".join(dict.fromkeys(remedies))
        return f"starves {gpus}: needs {what}. {takes[0].upper()}{takes[1:]}; {'; '.join(reasons)}."
    ranks = "a rank" if got.processes == 1 else f"each of {got.processes} ranks"
    parts = [f"feeds {gpus}: {takes}; {ranks} got {_mb(got.rank_bytes_per_s)} here"]
    if limits:
        tight = max(limits, key=lambda limit: limit.needs / limit.gives)
        more = tight.gpus(need.gpus)
        # A node's network does not care how many nodes there are.
        enough = "" if tight.source == SOURCES["network"] else f", enough for {more} GPUs"
        parts.append(f"tightest: {tight.name}, {_rates(tight)}{enough}")
    return "; ".join([*parts, *caveats]) + "."


def _rates(limit: Limit) -> str:
    """`needs 3.04 GB/s of 5.63 GB/s`: of what is counted on."""
    if limit.unit == "bytes/s":
        return f"needs {_mb(limit.needs)} of {_mb(limit.gives)}"
    return f"needs {limit.needs:,.0f} of {limit.gives:,.0f} requests/s"


def _accounts(wanted: int, there: int) -> str:
    if wanted <= there:
        return "accounts with equal shares of the data (a list in `uri`)"
    return f"{wanted} accounts (a list in `uri`)"


def _mb(rate: float) -> str:
    """A rate for people."""
    return f"{rate / 1e9:,.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.3g} MB/s"
