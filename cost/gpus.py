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
        domain: GPUs that share such links when that is more than a node (GB200 NVL72); 0 for a node's own.
    """

    name: str
    peak: float
    matmul: float
    bandwidth: float
    link: float
    domain: int = 0


def _gpu(name: str, peak: float, matmul: float, bandwidth: float, link: float, domain: int = 0) -> Gpu:
    return Gpu(
        name=name,
        peak=PEAK_FLOPS.get(name, peak * TERA),
        matmul=matmul * TERA,
        bandwidth=bandwidth * TERA,
        link=link * GIGA,
        domain=domain,
    )


# Matmul: measured figures are A100 271 of 312, H100 795 of 989, B200 1745 of 2250 (published by others, see docs/cost.md);
# the rest are their maker's peak times 0.80, the ratio of the H100, which has the same limit: power.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 312, 271, 1.555, 300),
        _gpu("a100-80gb", 312, 271, 2.039, 300),
        _gpu("h100-80gb", 989, 795, 3.35, 450),
        _gpu("h200-141gb", 989, 795, 4.8, 450),
        _gpu("b200-180gb", 2250, 1745, 7.7, 900),
        _gpu("l40s-48gb", 362, 290, 0.864, 32),
        _gpu("a10g-24gb", 125, 70, 0.6, 32),
        # Of no recipe; submitters of MLPerf ran them.
        _gpu("gb200-186gb", 2500, 1940, 8.0, 900, 72),
        _gpu("gb300-288gb", 2500, 1940, 8.0, 900, 72),
        _gpu("tpu-v5p", 459, 367, 2.765, 300, 8960),
    )
}
"""By name. NVIDIA's and Google's data sheets."""
