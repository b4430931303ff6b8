"""What a planned copy takes: bytes, requests, hours, dollars. Prices are asked of whoever has them: storage knows none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from isthmus.storage import filesystems
from isthmus.storage.ranges.settings import AZURE_SCHEMES
from isthmus.storage.transfer.plan import Plan

Price = Callable[[str, str, str, str, float], float | None]
"""(kind, cloud, region, to, amount) -> dollars, or None where nobody prices it.

Kinds: `egress` (GB to the internet) and `inter_region` (GB to a region of the same cloud), `read_requests` and
`write_requests` (requests). Clouds: sagemaker (S3), azure (Blob).
"""


@dataclass(frozen=True, slots=True)
class End:
    """Where one side lies."""

    cloud: str
    """sagemaker (S3), azure (Blob), or empty: this machine."""
    region: str = ""
    """Empty: nobody said."""


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is paid for."""

    name: str
    amount: float
    unit: str
    usd: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a copy takes."""

    bytes: int
    """That go over the wire in this copy."""
    requests: dict[str, int]
    hours: float | None
    """At the bandwidth; None: nobody said one."""
    lines: tuple[Line, ...]

    @property
    def usd(self) -> float | None:
        """The sum; None when a part of it is not known."""
        known = [line.usd for line in self.lines]
        return None if None in known else float(sum(usd or 0.0 for usd in known))


def end_of(uri: str, region: str = "") -> End:
    """The side of a copy that a URI is."""
    scheme = filesystems.scheme_of(uri)
    return End("sagemaker" if scheme == "s3" else "azure" if scheme in AZURE_SCHEMES else "", region)


def estimate(plan: Plan, source: End, target: End, bandwidth: float | None, price: Price) -> Estimate:
    """What the plan takes.

    Args:
        bandwidth: bytes a second.
        price: see `Price`.
    """
    left = max(plan.bytes - plan.bytes_there, 0)
    requests = plan.requests()
    lines = []
    if source.cloud:
        lines.append(_traffic(left, source, target, price))
        lines.append(_requests("reads", requests["read"], "read_requests", source, price))
    if target.cloud:
        lines.append(
            _requests(
                "writes and lists", requests["write"] + requests["list"], "write_requests", target, price
            )
        )
    hours = left / bandwidth / 3600 if bandwidth else None
    return Estimate(left, requests, hours, tuple(lines))


def _traffic(size: int, source: End, target: End, price: Price) -> Line:
    amount = size / 1e9
    if source.cloud == target.cloud and source.region and source.region == target.region:
        return Line("traffic", amount, "GB", 0.0, f"within {source.region}")
    if source.cloud == target.cloud:
        if not (source.region and target.region):
            return Line("traffic", amount, "GB", None, "nothing within a region; name both regions to know")
        usd = price("inter_region", source.cloud, source.region, target.region, amount)
        return Line("traffic", amount, "GB", usd, f"{source.region} to {target.region}")
    if not source.region:
        return Line("traffic", amount, "GB", None, "which region it leaves is not known")
    usd = price("egress", source.cloud, source.region, "internet", amount)
    return Line(
        "traffic",
        amount,
        "GB",
        usd,
        f"out of {source.region}; this month's other traffic may change the rate",
    )


def _requests(name: str, count: int, kind: str, end: End, price: Price) -> Line:
    usd = price(kind, end.cloud, end.region, "", count) if end.region else None
    return Line(name, count, "requests", 0.0 if not count else usd, end.region or "its region is not known")
