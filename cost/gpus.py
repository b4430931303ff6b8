"""GPUs as the estimator knows them: what the makers' data sheets say, and what matrix products reach of it."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.core.recipe.checks import PEAK_FLOPS

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator.

    Args:
        name: the recipe's word for it, or that of a row the estimator was fitted on.
        peak: dense bf16 FLOP/s of the data sheet.
        matmul: FLOP/s that large bf16 matrix products reach.
        bandwidth: bytes/s of its memory, data sheet.
        link: bytes/s that one GPU sends to its neighbours within a node (NVLink, PCIe), one direction.
        network: bytes/s that one GPU has of its node's network, by fabric; the first is the usual one.
        domain: GPUs that share such links when that is more than a node (GB200 NVL72); 0 for a node's own.
        chip: types with one chip share what is learned of it from published rows.
    """

    name: str
    peak: float
    matmul: float
    bandwidth: float
    link: float
    network: dict[str, float]
    domain: int = 0
    chip: str = ""


def _gpu(
    name: str,
    peak: float,
    matmul: float,
    bandwidth: float,
    link: float,
    network: dict[str, float],
    domain: int = 0,
    chip: str = "",
) -> Gpu:
    return Gpu(
        name=name,
        peak=PEAK_FLOPS.get(name, peak * TERA),
        matmul=matmul * TERA,
        bandwidth=bandwidth * TERA,
        link=link * GIGA,
        network={fabric: rate * GIGA for fabric, rate in network.items()},
        domain=domain,
        chip=chip or name,
    )


# A node of eight with one 100 Gb/s card.
_SLOW = 12.5 / 8
_A100 = {"infiniband": 25.0, "efa": 6.25, "ethernet": _SLOW}
_HOPPER = {"infiniband": 50.0, "efa": 50.0, "ethernet": _SLOW}

# Matmul: measured by others are A100 271 of 312, H100 795 of 989, B200 1745 of 2250 (docs/cost.md has the source). The
# rest, from the data sheet's peak: the share of the GPU most like it (GB200, GB300: B200; the others: H100).
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 312, 271, 1.555, 300, _A100, chip="a100"),
        _gpu("a100-80gb", 312, 271, 2.039, 300, _A100, chip="a100"),
        _gpu("h100-80gb", 989, 795, 3.35, 450, _HOPPER),
        _gpu("h200-141gb", 989, 795, 4.8, 450, _HOPPER),
        _gpu("b200-180gb", 2250, 1745, 7.7, 900, _HOPPER),
        _gpu("l40s-48gb", 362, 290, 0.864, 32, {"ethernet": 12.5, "efa": 6.25}),
        _gpu("a10g-24gb", 125, 56, 0.6, 32, {"ethernet": _SLOW, "efa": _SLOW}),
        # Of no recipe; submitters of MLPerf ran them.
        _gpu("gb200-186gb", 2500, 1940, 8.0, 900, _HOPPER, domain=72),
        _gpu("gb300-288gb", 2500, 1940, 8.0, 900, _HOPPER, domain=72),
    )
}
"""By name. NVIDIA's data sheets; a dictionary of fabrics in GB/s for each GPU: 8 x 200 Gb/s on A100 nodes, 8 x 400 on later ones,
400 Gb/s a node on p4d, 400 a node of four on the one published L40S cluster."""
